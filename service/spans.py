"""Spans: why a part of a text names no token, told to who asked for it. Pure.

May import: attention, errors, request.
"""

from collections.abc import Sequence

from service.attention import Span
from service.errors import InvalidRequest
from service.request import Tokens

_SHOWN = 20  # letters of a text


class Uncovered(InvalidRequest):
    """Report a span that no token covers; `why_uncovered` says more where the text is known."""

    def __init__(self, name: str, span: Span) -> None:
        """Keep the span, and whether it was to choose queries or keys."""
        super().__init__(f"{written(name, span)}, which no token of this input covers; name others")
        self.name = name
        self.span = span


def written(name: str, span: Span) -> str:
    """Name a span and what it was to choose."""
    return f"{name} name characters {span.start} to {span.end} of text {span.sequence}"


def check_span(name: str, span: Span) -> None:
    """Refuse a span that is none in any text.

    Raises:
        InvalidRequest: It is empty or reversed, or in a third text.
    """
    if span.sequence not in (0, 1):
        raise InvalidRequest(
            f"{written(name, span)}, and there are only texts 0 and 1, the second of a pair; "
            f"name (start, end) for the first, (start, end, 1) for the second"
        )
    if span.start >= span.end:
        kind = "empty" if span.start == span.end else "reversed"
        raise InvalidRequest(
            f"{written(name, span)}, which is {kind}: a span goes from its start up to, not including, its end; "
            "give an end above the start"
        )


def why_uncovered(error: Uncovered, texts: Sequence[str], tokens: Tokens, *, truncated: bool) -> str:
    """Say why no token of an input covers a span, and what to change.

    Args:
        error: About a span that `check_span` lets pass.
        texts: The input's, one or two; none if it was token ids.
        tokens: The input's.
        truncated: Whether tokens were dropped.
    """
    span, told = error.span, written(error.name, error.span)
    if not texts:
        return f"{told}, and this input is token ids without a text; name tokens by their numbers"
    if span.sequence >= len(texts):
        return f"{told}, and this input is one text, not a pair; leave the 1 out, or send a pair"
    text = texts[span.sequence]
    if span.start >= len(text):
        return f"{told}, which has {len(text)} characters; name a part of it"
    part = text[span.start : span.end]
    if part.isspace():
        return f"{told}, where only white space is; name a part with other characters"
    covered = [place for place, own in zip(tokens.char_spans, tokens.sequences, strict=True) if own == span.sequence]
    first = min((start for start, end in covered if end > start), default=0)
    last = max((end for _, end in covered), default=0)
    if truncated and (span.start >= last or span.end <= first):
        return (
            f"{told}, which truncation cut off: characters {first} to {last} are left; name a part of these, "
            "shorten the input, or cut its other end by truncation"
        )
    return (
        f"{told}, and the tokenizer makes no token of {part[:_SHOWN]!r}{'...' if len(part) > _SHOWN else ''} there; "
        "name a part with other characters"
    )
