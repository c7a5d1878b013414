"""Tokenizers of somebody who means ill: refused by name, or held to what a text may cost."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.artifact import open_artifact
from service.errors import ArtifactError
from service.request import TextInput, TokenizeRequest
from service.tokenization import TextTokenizer
from tests.service.hostile import seal

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
FIRST = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}


@pytest.fixture
def folder(tiny_artifact: Path, tmp_path: Path) -> Path:
    """Give a copy of a whole artifact."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


def write(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tokenizer's file and seal the artifact."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw, ensure_ascii=False), "utf-8")
    seal(folder)


def _normalizer(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


def _doubling(times: int) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": "x"}, "content": "xx"}] * times


def _table(declared: int, content: bytes = b"") -> dict[str, Any]:
    table = declared.to_bytes(4, "little") + content
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def _long_words(raw: dict[str, Any]) -> None:
    raw["model"]["max_input_chars_per_word"] = 1 << 40


def _template(**changed: object) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["post_processor"].update(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_normalizer(*_doubling(40)), "bytes of one by replacing"),
        (_normalizer({"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 1000}), "makes 1001 bytes of one"),
        (_normalizer({"type": "Prepend", "prepend": "x" * 1000}), "puts 1000 characters before a text"),
        (_normalizer(*[{"type": "NFC"}] * 33), "takes 34 steps before the model"),
        (_normalizer(_table(0xFFFFFF00)), "declares 4294967040 bytes and holds 4"),
        (_normalizer(_table(0, b"x" * 65)), "makes more than 64 bytes of one character"),
        (_normalizer({"type": "Precompiled", "precompiled_charsmap": "****"}), "that is not base64"),
        (lambda raw: raw.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES] * 10}), "makes 1024 bytes"),
        (_long_words, "lets words have 1099511627776 characters"),
        (_template(single=[TEXT, TEXT]), "has a template that repeats a text"),
        (_template(pair=[FIRST] * 65), "puts 65 special tokens around texts"),
        (_template(special_tokens={}), "cannot be loaded"),
        (lambda raw: raw["model"].update(type="Pickle"), "cannot be loaded"),
    ],
)
def test_tokenizers_that_cost(folder: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    """A tokenizer that would make much of little, or sets aside what it declares, is refused."""
    write(folder, change)
    artifact = open_artifact(folder)
    with pytest.raises(ArtifactError, match=message):
        TextTokenizer(artifact)


def test_names_behind_escapes(folder: Path) -> None:
    """A file whose names are spelt with escapes, so that a look at its bytes would not find them, is refused."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"WordPiece"', '"\\u0057ordPiece"'), "utf-8")
    seal(folder)
    artifact = open_artifact(folder)
    with pytest.raises(ArtifactError, match="hides plain letters behind escapes"):
        TextTokenizer(artifact)


def test_ordinary_tokenizers(folder: Path) -> None:
    """Backslashes in the vocabulary, and as many replacements as a language may want, do no harm."""
    step = {"type": "Replace", "pattern": {"String": "\u201c"}, "content": '"'}
    _normalizer(*[step] * 20)(raw := {})
    write(folder, lambda found: found.update(raw) or found["model"]["vocab"].update({"\\u0041": 41}))
    assert TextTokenizer(open_artifact(folder)).tokenize(TokenizeRequest(inputs=(TextInput("abc"),)), describe=False)


def test_padding_that_is_saved(folder: Path) -> None:
    """A length to pad to, which the file may carry, sets nothing aside."""
    padding = {"strategy": {"Fixed": 10**6}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    write(folder, lambda raw: raw.update(padding={**padding, "pad_to_multiple_of": None}))
    (sequence,) = TextTokenizer(open_artifact(folder)).tokenize(
        TokenizeRequest(inputs=(TextInput("abc"),)), describe=False
    )
    assert sequence.length == 5


def test_an_expression_that_never_ends(folder: Path) -> None:
    """A regular expression that would try for years gives up within a second, as an error of this text alone."""
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    write(folder, lambda raw: raw.update(pre_tokenizer=split))
    tokenizer = TextTokenizer(open_artifact(folder))
    with pytest.raises(RuntimeError, match="the tokenizer gave up"):
        tokenizer.tokenize(TokenizeRequest(inputs=(TextInput("a" * 100 + "!"),)), describe=False)
    assert tokenizer.tokenize(TokenizeRequest(inputs=(TextInput("bc"),)), describe=False)[0].length > 2
