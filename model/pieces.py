"""Pieces: tokenizers of encoder-decoders that are not in `tokenizer.json` as they are needed.

Marian's two sides have a sentencepiece model each and number their pieces by a vocabulary, mostly one for both; T5's
numbers are the places in its model; mBART's target has the source's pieces, and the code of another language.
May import: checkpoint, confined, errors, spm, tokenizers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from model.checkpoint import read_json
from model.confined import refuse_code
from model.errors import CheckpointError
from model.spm import make_tokenizer, read_spm

SOURCE_PIECES = "source.spm"
T5_PIECES = "spiece.model"
_EOS, _UNK, _PAD = "</s>", "<unk>", "<pad>"
_T5_EXTRA = 100  # sentinels behind the pieces, where a checkpoint does not say how many


def read_marian(folder: Path, *, target: bool, vocab_size: int) -> Tokenizer:
    """Read the tokenizer of one side of a Marian checkpoint.

    A language's code, `>>fra<<` for instance, is a token wherever a text has it.

    Args:
        folder: Holds `source.spm`, `target.spm` and `vocab.json`, and `target_vocab.json` for two vocabularies.
        target: Whether the target's is wanted.
        vocab_size: Numbers must be below this.

    Raises:
        CheckpointError: A file is absent, broken or not of the kind that is supported.
    """
    settings = _settings(folder)
    own = target and settings.get("separate_vocabs") is True
    path = folder / ("target_vocab.json" if own else "vocab.json")
    ids = _vocabulary(path, read_json(path), vocab_size)
    codes = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    spm = read_spm(folder / ("target.spm" if target else SOURCE_PIECES))
    return make_tokenizer(spm, ids, [_EOS, _UNK, _PAD, *codes], unk=_UNK, around=("$A </s>", "$A $B </s>"))


def read_t5(folder: Path, vocab_size: int) -> Tokenizer:
    """Read the tokenizer of a T5 checkpoint that has no `tokenizer.json`.

    Args:
        folder: Holds `spiece.model`.
        vocab_size: Numbers must be below this.

    Raises:
        CheckpointError: The file is broken or not of the kind that is supported.
    """
    path = folder / T5_PIECES
    spm = read_spm(path)
    extra = _settings(folder).get("extra_ids", _T5_EXTRA)
    if type(extra) is not int or not 0 <= extra <= vocab_size:
        raise CheckpointError(f"{folder}/tokenizer_config.json: extra_ids must be a number of tokens, got {extra!r}")
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(extra))]
    ids = _vocabulary(path, {token: number for number, token in enumerate([*spm.pieces, *sentinels])}, vocab_size)
    return make_tokenizer(spm, ids, [_EOS, _UNK, _PAD, *sentinels], unk=_UNK, around=("$A </s>", "$A </s> $B </s>"))


def read_mbart_target(folder: Path, source: Tokenizer) -> Tokenizer | None:
    """Make the tokenizer of an mBART's targets from its sources' one.

    Args:
        folder: Its `tokenizer_config.json` names the targets' language, `tgt_lang`.
        source: Puts one language's code around a text.

    Returns:
        The same with the other language's code; None where no language, or none of the vocabulary, is named.
    """
    language = _settings(folder).get("tgt_lang")
    state = json.loads(source.to_str())
    template = state["post_processor"] or {}
    codes = [token for token in template.get("special_tokens", {}) if token != _EOS]
    number = source.token_to_id(language) if isinstance(language, str) else None
    if number is None or template.get("type") != "TemplateProcessing" or len(codes) != 1:
        return None
    template["special_tokens"][codes[0]] = {"id": codes[0], "ids": [number], "tokens": [language]}
    return Tokenizer.from_str(json.dumps(state))


def _settings(folder: Path) -> Mapping[str, object]:
    path = folder / "tokenizer_config.json"
    settings: dict[str, object] = read_json(path) if path.is_file() else {}
    refuse_code(path, settings)
    return settings


def _vocabulary(path: Path, raw: Mapping[str, object], vocab_size: int) -> dict[str, int]:
    """Check that a vocabulary gives every token a number of its own, and has the three that it cannot be without."""
    ids = {token: number for token, number in raw.items() if type(number) is int and 0 <= number < vocab_size}
    if len(ids) < len(raw) or len(set(ids.values())) < len(ids):
        raise CheckpointError(f"{path} must give each token a number of its own below vocab_size={vocab_size}")
    if missing := [token for token in (_EOS, _UNK, _PAD) if token not in ids]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return ids
