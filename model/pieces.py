"""Pieces: tokenizers that are not in `tokenizer.json` as they are needed, made from sentencepiece models.

Marian's two sides have a model each and number their pieces by a vocabulary, mostly one for both; T5's and DeBERTa's
numbers are the places in its model; mBART's target has the source's pieces, and the code of another language.
May import: checkpoint, confined, errors, spm, tokenizers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model.checkpoint import read_json
from model.confined import refuse_code
from model.errors import CheckpointError
from model.spm import make_tokenizer, read_spm

SOURCE_PIECES = "source.spm"
T5_PIECES = "spiece.model"
DEBERTA_PIECES = "spm.model"
_DEBERTA_SPECIALS = {name: f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
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


def read_deberta(folder: Path) -> Tokenizer:
    """Read the tokenizer of a DeBERTa-v2 or v3 checkpoint that has no `tokenizer.json`.

    What transformers 5 makes of it: the text is not mapped by the file's own table but composed (NFC), and [MASK]
    stands behind the pieces.

    Args:
        folder: Holds `spm.model`.

    Raises:
        CheckpointError: The file is broken, or special tokens are not the family's own.
    """
    spm = read_spm(folder / DEBERTA_PIECES)
    settings = _settings(folder)
    pad, cls, sep, unk, mask = _DEBERTA_SPECIALS.values()
    if missing := [token for token in (pad, cls, sep, unk) if token not in spm.pieces]:
        raise CheckpointError(f"{folder / DEBERTA_PIECES} lacks {', '.join(missing)}")
    _refuse_other_tokens(folder, settings)
    tokens = [(piece, spm.scores.get(piece, 0.0)) for piece in spm.pieces]
    tokenizer = Tokenizer(models.Unigram(tokens, unk_id=spm.pieces.index(unk), byte_fallback=False))
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    lower = [normalizers.Lowercase()] if settings.get("do_lower_case") is True else []
    tokenizer.normalizer = normalizers.Sequence([*lower, spaces, normalizers.NFC(), normalizers.Strip(left=False)])
    apart = [pre_tokenizers.Punctuation("isolated")] if settings.get("split_by_punct") is True else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*apart, pre_tokenizers.Metaspace(prepend_scheme="always")])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (pad, cls, sep, unk)])
    tokenizer.add_special_tokens([AddedToken(mask, normalized=False, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, spm.pieces.index(token)) for token in (cls, sep)],
    )
    return tokenizer


def _refuse_other_tokens(folder: Path, settings: Mapping[str, object]) -> None:
    """Refuse tokens beyond the family's own, which a config may add to those of the pieces."""
    path = folder / "added_tokens.json"
    further = set(read_json(path)) if path.is_file() else set()
    declared = settings.get("added_tokens_decoder")
    for token in (declared if isinstance(declared, dict) else {}).values():
        further.add(str(token.get("content") if isinstance(token, dict) else token))
    for name, usual in _DEBERTA_SPECIALS.items():
        token = settings.get(f"{name}_token") or usual
        further.add(str(token.get("content") if isinstance(token, dict) else token))
    if others := sorted(further - set(_DEBERTA_SPECIALS.values())):
        raise CheckpointError(
            f"{folder} adds the tokens {', '.join(others[:5])} to {DEBERTA_PIECES}; "
            "save its tokenizer as tokenizer.json"
        )


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
