"""Spans of text that name no token: the message says why, and what to change."""

import re
from typing import Any

import pytest

from attencode import Client, InvalidRequest

LONG = "dog " * 400  # the model takes 256 tokens: 254 of these


@pytest.mark.parametrize(
    ("text", "span", "options", "message"),
    [
        (
            "short",
            (0, 0),
            {},
            "keys name characters 0 to 0 of text 0, which is empty: a span goes from its start up to",
        ),
        ("short", (3, 3), {}, "keys name characters 3 to 3 of text 0, which is empty"),
        ("short", (5, 2), {}, "keys name characters 5 to 2 of text 0, which is reversed"),
        (
            "short",
            (4, 1),
            {},
            "which is reversed: a span goes from its start up to, not including, its end; give an end",
        ),
        (
            "short",
            (0, 5, 7),
            {},
            "of text 7, and there are only texts 0 and 1, the second of a pair; name (start, end)",
        ),
        ("short", (0, 5, 1), {}, "input 0: keys name characters 0 to 5 of text 1, and this input is one text, not a"),
        ("short", (7, 9), {}, "input 0: keys name characters 7 to 9 of text 0, which has 5 characters; name a part of"),
        (("short", "longer"), (6, 9, 1), {}, "characters 6 to 9 of text 1, which has 6 characters"),
        ("so  it", (2, 4), {}, "characters 2 to 4 of text 0, where only white space is; name a part with other"),
        ("so \x00\x01 it", (3, 5), {}, r"and the tokenizer makes no token of '\x00\x01' there; name a part with other"),
        (LONG, (1300, 1303), {}, "which truncation cut off: characters 0 to 1015 are left; name a part of these"),
        (LONG, (0, 3), {"truncation": "left"}, "which truncation cut off: characters 584 to 1599 are left"),
        (LONG, (3, 4), {}, "characters 3 to 4 of text 0, where only white space is"),
        (LONG, (1600, 1601), {}, "which has 1600 characters"),
        ([101, 3899, 102], (0, 3), {}, "this input is token ids without a text; name tokens by their numbers"),
    ],
)
def test_why_no_token_is_there(
    minilm_client: Client, text: Any, span: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    """Empty, reversed, of no text, beyond the text, white space, cut off: each is told as what it is."""
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        minilm_client.attend(text, keys=[span], **options)


def test_what_lies_within_a_token_names_it(minilm_client: Client) -> None:
    """A span that a token covers in part names that token, beside white space as well."""
    assert minilm_client.attend("so  it", keys=[(1, 4)]).column_labels == ["so"]
