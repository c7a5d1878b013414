"""What surrounds the encoder in a checkpoint's folder: tokenizer, length, pooling, prompts.

A sentence-transformers folder says all of it (`modules.json` and what that names); a plain
Hugging Face folder gets sentence-transformers' own defaults: mean pooling, not normalized, no prompts.
May import: config, checkpoint, pooling, errors, tokenizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from model.checkpoint import read_json
from model.config import EncoderConfig
from model.errors import CheckpointError

# sentence-transformers' pooling flags, and its newer one-word names, to ours.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How a text becomes a sequence, and a sequence one vector.

    Attributes:
        max_tokens: Longest sequence in tokens, special tokens included.
        pooling: A key of `model.pooling.POOLINGS`.
        normalize: Whether pooled vectors are scaled to length 1.
        prompts: Prompt name to the text that is put before an input.
        default_prompt_name: The prompt of a request that names none; None for no prompt.
    """

    max_tokens: int
    pooling: str = "mean"
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def read_settings(folder: Path, config: EncoderConfig) -> SentenceSettings:
    """Read a folder's sentence-transformers files, or give the defaults of a folder without them.

    Raises:
        CheckpointError: A module or pooling that is not supported, or a file that cannot be read.
    """
    max_tokens = _max_tokens(folder, config)
    if not (folder / "modules.json").is_file():
        return SentenceSettings(max_tokens)
    pooling, normalize = "mean", False
    for position, (kind, path) in enumerate(_modules(folder)):
        if (kind == "Transformer") != (position == 0):
            raise CheckpointError(f"{folder}/modules.json must list one Transformer module, and list it first")
        if kind == "Pooling":
            pooling = _pooling(path / "config.json")
        normalize = normalize or kind == "Normalize"
    prompts, default = _prompts(folder)
    return SentenceSettings(max_tokens, pooling, normalize, prompts, default)


def read_tokenizer(folder: Path, config: EncoderConfig) -> Tokenizer:
    """Load the folder's tokenizer, without the truncation and padding that may be saved in it.

    A folder without `tokenizer.json` has its slow tokenizer's files converted by transformers.

    Raises:
        CheckpointError: There is no tokenizer, it cannot be read, or its ids exceed the vocabulary.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
    else:
        tokenizer = _convert_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise CheckpointError(f"the tokenizer of {folder} has an empty vocabulary")
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {folder} has ids up to {largest}, config field vocab_size is {config.vocab_size}"
        )
    return tokenizer


def _convert_tokenizer(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, and seldom needed

    try:
        loaded = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        backend: Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # transformers raises many kinds for an absent or broken file
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    return backend


def _max_tokens(folder: Path, config: EncoderConfig) -> int:
    """Give the longest sequence: sentence-transformers' limit, the tokenizer's, the model's."""
    limits = [config.max_tokens]
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if not (folder / name).is_file():
            continue
        limit = read_json(folder / name).get(key)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 1:
            raise CheckpointError(f"{folder / name}: {key} must be a number of tokens, got {limit!r}")
        limits.append(int(limit))
        break
    return min(limits)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """List the modules of `modules.json` in order: class name and folder."""
    path = folder / "modules.json"
    try:
        listed = [(entry["type"].rsplit(".", 1)[-1], folder / entry["path"]) for entry in read_json(path, list)]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} must list objects with type and path: {error!r}") from error
    for kind, _ in listed:
        if kind not in _MODULES:
            raise CheckpointError(
                f"{path} has the module {kind}, which is not supported; supported: {', '.join(_MODULES)}"
            )
    if not listed:
        raise CheckpointError(f"{path} lists no module")
    return listed


def _pooling(path: Path) -> str:
    """Read a pooling module's config: exactly one supported mode."""
    raw = read_json(path)
    named = raw.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    else:
        modes = [name for name, on in raw.items() if name.startswith("pooling_mode_") and on is True]
    ours = [_POOLING_NAMES.get(mode) or _POOLING_FLAGS.get(mode) for mode in modes]
    if len(ours) != 1 or ours[0] is None:
        supported = ", ".join(_POOLING_NAMES)
        raise CheckpointError(f"{path} asks for pooling {' + '.join(modes) or 'none'}; supported: one of {supported}")
    return ours[0]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    raw = read_json(path)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must map names to texts")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path}: default_prompt_name {default!r} is not among prompts {sorted(prompts)}")
    return prompts, default
