"""Sentencepiece models: a `.spm` file's pieces, scores and normalizer, as a tokenizer of the tokenizers' library.

Unigram models (Kudo 2018) as Marian and T5 have them, read by their wire format (sentencepiece_model.proto), so that
sentencepiece itself is not needed. May import: confined, errors, google.protobuf, tokenizers.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model.confined import MOST_TOKENIZER_BYTES, plain_file
from model.errors import CheckpointError

_FIELD = descriptor_pb2.FieldDescriptorProto
# The part of the proto that is looked at: message -> field -> number, type, and default.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, Any, str]]] = {
    "Model": {"pieces": (1, "Piece", ""), "trainer": (2, "Trainer", ""), "normalizer": (3, "Normalizer", "")},
    "Piece": {
        "piece": (1, _FIELD.TYPE_STRING, ""),
        "score": (2, _FIELD.TYPE_FLOAT, "0"),
        "type": (3, _FIELD.TYPE_INT32, "1"),
    },
    "Trainer": {
        "model_type": (3, _FIELD.TYPE_INT32, "1"),
        "whitespace_behind": (24, _FIELD.TYPE_BOOL, "false"),
        "byte_fallback": (35, _FIELD.TYPE_BOOL, "false"),
    },
    "Normalizer": {
        "table": (2, _FIELD.TYPE_BYTES, ""),
        "dummy_prefix": (3, _FIELD.TYPE_BOOL, "true"),
        "without_extra_spaces": (4, _FIELD.TYPE_BOOL, "true"),
        "escaped_spaces": (5, _FIELD.TYPE_BOOL, "true"),
    },
}
_UNIGRAM, _NORMAL, _USER_DEFINED = 1, 1, 4  # as the proto numbers them
_TABLE_SIZE_BYTES = 4  # before the table, little-endian (normalizer.cc, DecodePrecompiledCharsMap)


class Spm(NamedTuple):
    """What a file holds.

    Attributes:
        pieces: All of them, in order.
        scores: Of those that a text can be cut into.
        table: The normalizer's table of characters; empty where it maps none.
    """

    pieces: list[str]
    scores: dict[str, float]
    table: bytes


def read_spm(path: Path) -> Spm:
    """Read a file.

    Raises:
        CheckpointError: It is absent, broken, or of another kind than Unigram with the usual handling of spaces.
    """
    try:
        raw = _model_class().FromString(plain_file(path, MOST_TOKENIZER_BYTES).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (message.DecodeError, OSError) as error:
        raise CheckpointError(f"{path} is no sentencepiece model: {error}") from error
    usual = raw.normalizer.dummy_prefix and raw.normalizer.without_extra_spaces and raw.normalizer.escaped_spaces
    if raw.trainer.model_type != _UNIGRAM or raw.trainer.byte_fallback or raw.trainer.whitespace_behind or not usual:
        raise CheckpointError(f"{path} is of a kind that is not supported; expected Unigram with a space before a text")
    table = raw.normalizer.table
    declared = int.from_bytes(table[:_TABLE_SIZE_BYTES], "little")
    if declared > max(len(table) - _TABLE_SIZE_BYTES, 0):
        raise CheckpointError(f"{path} has a table of characters that declares {declared} bytes, more than it holds")
    scores = {one.piece: one.score for one in raw.pieces if one.type == _NORMAL}
    best = max(scores.values(), default=0.0)
    for one in raw.pieces:
        if one.type == _USER_DEFINED:  # wins over all others (unigram_model.cc, PopulateNodes)
            scores[one.piece] = len(one.piece) * best - 0.1
    if not scores:
        raise CheckpointError(f"{path} has no piece to cut a text into")
    return Spm([one.piece for one in raw.pieces], scores, table)


def make_tokenizer(
    spm: Spm, ids: Mapping[str, int], added: Sequence[str], *, unk: str, around: tuple[str, str]
) -> Tokenizer:
    """Make a tokenizer that cuts as a file says and numbers as a vocabulary says.

    A vocabulary of two languages has tokens that are no pieces of the file. Of them a text is cut into the single
    characters alone, which the file knows in none of its pieces: so does sentencepiece, which gives what is unknown as
    it stands, but several in a row as one token.

    Args:
        spm: The file.
        ids: Of every token its number; a piece that has none is not cut from a text.
        added: Tokens that stand for themselves wherever a text has them.
        unk: The token of what no piece covers.
        around: Templates of a text and of a pair, whose special tokens are among those that are added.
    """
    # A token that the file cannot make keeps its number under a name with a space, of which no text has any left.
    tokens = [(f" {number}", 0.0) for number in range(max(ids.values()) + 1)]
    for token, number in ids.items():
        cut = token in spm.scores or token in added or len(token) == 1
        tokens[number] = (token if cut else f" {token}", spm.scores.get(token, 0.0))
    tokenizer = Tokenizer(models.Unigram(tokens, unk_id=ids[unk], byte_fallback=False))
    steps = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*([normalizers.Precompiled(spm.table)] if spm.table else []), *steps])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around[0], pair=around[1], special_tokens=[(token, ids[token]) for token in added if token in around[0]]
    )
    return tokenizer


@cache
def _model_class() -> Any:
    """Make the class that reads a ModelProto."""
    file = descriptor_pb2.FileDescriptorProto(name="spm.proto", package="spm", syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for key, (number, kind, default) in fields.items():
            label = _FIELD.LABEL_REPEATED if key == "pieces" else _FIELD.LABEL_OPTIONAL
            if isinstance(kind, str):
                kinds = {"type": _FIELD.TYPE_MESSAGE, "type_name": f".spm.{kind}"}
                described.field.add(name=key, number=number, label=label, **kinds)
            else:
                described.field.add(name=key, number=number, label=label, type=kind, default_value=default)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("spm.Model"))
