"""Tokenizer file: an artifact's `tokenizer.json`, loaded so that neither it nor a short text can cost much.

The library trusts the file: it sets aside what a table's head declares, pads to whatever length is saved, and lets
replacements multiply a text. Its regular expressions give up by themselves, with a panic.
May import: confined, errors, tokenizers.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from service.confined import read_file
from service.errors import ArtifactError

_FILE = "tokenizer.json"
_MOST_BYTES = 128 << 20  # the largest that are published have 35 MB
_MOST_CHARS_A_WORD = 1000  # WordPiece's work grows with the square of it; published ones have 100
_MOST_GROWTH = 1000  # bytes that the steps before the model may make of one; those of published tokenizers make 8
_MOST_STEPS = 32
_LONGEST_CHARS = 64  # bytes that a table may make of one character; Unicode's longest (U+FDFA) takes 33
_LONGEST_PREFIX = 100
_MOST_SPECIAL_TOKENS = 64  # around a text; published tokenizers have 4 around a pair
# A letter, digit or underscore as an escape, which no writer makes of it, hides a name from a look at the bytes.
_HIDDEN = re.compile(rb"(\\+)u00(?:3[0-9]|[46][0-9a-fA-F]|5[0-9aAfF]|7[0-9aA])")
_TABLE = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_TABLE_SIZE_BYTES = 4  # before it, little-endian (sentencepiece, normalizer.cc, DecodePrecompiledCharsMap)


def load_tokenizer(folder: Path, name: str = _FILE) -> Tokenizer:
    """Load a folder's tokenizer, without the truncation and padding that may be saved in it.

    Args:
        folder: The artifact's.
        name: Of the file; a decoder may have one of its own.

    Raises:
        ArtifactError: It cannot be loaded, or would cost more than any that an export writes.
    """
    path, content = folder / name, read_file(folder, name, _MOST_BYTES)
    if fault := _fault_before(content):
        raise ArtifactError(f"{path} {fault}; export the model again yourself")
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        fault = next(_faults(tokenizer), None)
        if not fault:
            tokenizer.encode("x", "x")  # a template may name what is not there
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ArtifactError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
    if fault:
        raise ArtifactError(f"{path} {fault}; export the model again yourself")
    return tokenizer


def is_failure(error: BaseException) -> bool:
    """Tell an error of the library from one that ends the program; its panics derive from no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _fault_before(content: bytes) -> str | None:
    """Say what is wrong with a file that has not been loaded, None when nothing is."""
    if any(len(slashes) % 2 for slashes in _HIDDEN.findall(content)):  # two of them are one that is meant
        return "hides plain letters behind escapes"
    for encoded in _TABLE.findall(content):
        try:
            table = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            return "has a table of characters that is not base64"
        declared = int.from_bytes(table[:_TABLE_SIZE_BYTES], "little")
        if declared > len(table) - _TABLE_SIZE_BYTES:
            return f"has a table of characters that declares {declared} bytes and holds {len(table)}"
        if max(map(len, table[_TABLE_SIZE_BYTES + declared :].split(b"\0"))) > _LONGEST_CHARS:
            return f"has a table that makes more than {_LONGEST_CHARS} bytes of one character"
    return None


def _faults(tokenizer: Tokenizer) -> Iterator[str]:
    """Say what is wrong with a tokenizer that was loaded."""
    longest = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if longest > _MOST_CHARS_A_WORD:
        yield f"lets words have {longest} characters, at most {_MOST_CHARS_A_WORD} are taken"
    before = [*_parts(tokenizer.normalizer, "normalizers"), *_parts(tokenizer.pre_tokenizer, "pretokenizers")]
    growth = math.prod(_growth(part) for part in before)
    if growth > _MOST_GROWTH:
        yield f"makes {growth} bytes of one by replacing, at most {_MOST_GROWTH} are taken"
    if len(before) > _MOST_STEPS or sum(part["type"] == "Precompiled" for part in before) > 1:
        yield f"takes {len(before)} steps before the model, at most {_MOST_STEPS}, and one table, are taken"
    if (prefix := max((len(part.get("prepend", "")) for part in before), default=0)) > _LONGEST_PREFIX:
        yield f"puts {prefix} characters before a text, at most {_LONGEST_PREFIX} are taken"
    if (special := tokenizer.num_special_tokens_to_add(is_pair=True)) > _MOST_SPECIAL_TOKENS:
        yield f"puts {special} special tokens around texts, at most {_MOST_SPECIAL_TOKENS} are taken"
    for part in _parts(tokenizer.post_processor, "processors"):
        for template in (part.get("single", ()), part.get("pair", ())):
            texts = [piece["Sequence"]["id"] for piece in template if "Sequence" in piece]
            if len(texts) != len(set(texts)):
                yield "has a template that repeats a text"


def _growth(part: dict[str, Any]) -> int:
    """Say how many bytes a step can make of one, but for tables, which are looked at before."""
    if part["type"] == "Replace":
        found = len(part["pattern"].get("String", "").encode("utf-8", "replace"))
        made = len(part["content"].encode("utf-8", "replace"))
        # An expression may find nothing at all, and puts the content beside what was there.
        return max(1, math.ceil(made / found)) if found else 1 + made
    return 2 if part["type"] == "ByteLevel" else 1


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield a component's steps as JSON has them, those of sequences within it too; none where there is none."""
    left = [json.loads(component.__getstate__())] if component is not None else []
    while left:
        part = left.pop()
        if key in part:
            left += part[key]
        else:
            yield part
