"""What surrounds the encoder in a checkpoint's folder: tokenizer, length, pooling, prompts.

A sentence-transformers folder says all of it (`modules.json` and what that names); a plain
Hugging Face folder gets sentence-transformers' own defaults: mean pooling, not normalized, no prompts.
May import: config, checkpoint, confined, head, pieces, errors, tokenizers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from torch import nn

from model.checkpoint import read_json
from model.config import DecoderConfig, EncoderConfig
from model.confined import MOST_TOKENIZER_BYTES, inner_folder, plain_file, refuse_code
from model.errors import CheckpointError, first_line
from model.head import Normalize, SentenceHead, read_dense, read_poolings
from model.pieces import (
    DEBERTA_PIECES,
    SOURCE_PIECES,
    T5_PIECES,
    read_deberta,
    read_marian,
    read_mbart_target,
    read_t5,
)

# The names under which sentence-transformers looks for the Transformer module's settings, in its order.
_TRANSFORMER_FILES = [
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_PACKAGE = "sentence_transformers."
# Settings of that module that are honoured, or that say what is done anyway.
_TRANSFORMER_FIELDS = ("max_seq_length", "do_lower_case", "modality_config")
_AS_ALWAYS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
_MODALITIES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_SLOW_VOCABULARY = "vocab.txt"
_SLOW_CLASSES = [
    f"{family}Tokenizer{form}" for family in ("Bert", "DistilBert", "Electra", "MPNet") for form in ("", "Fast")
]
_T5_FAMILIES = ("t5", "mt5")
_DEBERTA_FAMILIES = ("deberta-v2",)
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# What T5 was trained on, and what it gets where nothing sets a limit (Raffel et al. 2020, section 3.1.2).
_TOKENS_WITHOUT_LIMIT = 512
_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """How a text becomes a sequence, and a sequence one vector.

    Attributes:
        max_tokens: Longest sequence in tokens, special tokens included.
        normalize: Whether pooled vectors are scaled to length 1.
        prompts: Prompt name to the text that is put before an input.
        default_prompt_name: The prompt of a request that names none; None for no prompt.
        pool_prompt: Whether a prompt's tokens are pooled with the text's.
    """

    max_tokens: int
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pool_prompt: bool = True


def read_sentence(folder: Path, config: EncoderConfig) -> tuple[SentenceSettings, SentenceHead]:
    """Read a folder's sentence-transformers files, or give the defaults of a folder without them.

    Raises:
        CheckpointError: A module or pooling that is not supported, or a file that cannot be read.
    """
    source = encoder_folder(folder)
    _check_transformer(source)
    max_tokens = _max_tokens(source, config)
    if not (folder / "modules.json").is_file():
        return SentenceSettings(max_tokens), SentenceHead(["mean"])
    modules = _modules(folder)
    if [kind for kind, _ in modules[:2]] != ["Transformer", "Pooling"]:
        listed = ", ".join(kind for kind, _ in modules)
        raise CheckpointError(
            f"{folder}/modules.json must list a Transformer module and then a Pooling module, got {listed}"
        )
    poolings, include_prompt = read_poolings(modules[1][1] / "config.json")
    behind: list[nn.Module] = []
    for kind, path in modules[2:]:
        if kind == "Dense":
            behind.append(read_dense(path, SentenceHead(poolings, behind).size(config.hidden_size)))
        elif kind == "Normalize":
            behind.append(Normalize())
        else:
            raise CheckpointError(f"{folder}/modules.json lists a second {kind} module")
    normalize = bool(behind) and isinstance(behind[-1], Normalize)
    prompts, default = _prompts(folder)
    settings = SentenceSettings(max_tokens, normalize, prompts, default, include_prompt)
    return settings, SentenceHead(poolings, behind[:-1] if normalize else behind)


def encoder_folder(folder: Path) -> Path:
    """Give the folder of the encoder itself: a sentence-transformers folder may keep it in one of its own.

    Raises:
        CheckpointError: `modules.json` cannot be read.
    """
    if not (folder / "modules.json").is_file():
        return folder
    return _modules(folder)[0][1]


def _transformer_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read the Transformer module's settings; empty where there are none."""
    path = next((folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()), None)
    return (folder, {}) if path is None else (path, read_json(path))


def _check_transformer(folder: Path) -> None:
    """Refuse settings of the Transformer module that would change the numbers."""
    path, raw = _transformer_settings(folder)
    others = [
        name
        for name, value in raw.items()
        if name not in _TRANSFORMER_FIELDS and value not in (None, False, {}, [], _AS_ALWAYS.get(name))
    ]
    if raw.get("modality_config") not in (None, {}, _MODALITIES):
        others.append("modality_config")
    if others:
        raise CheckpointError(f"{path} sets {', '.join(others)}, which is not supported")


def read_target_tokenizer(folder: Path, decoder: DecoderConfig, source: Tokenizer) -> Tokenizer | None:
    """Load the tokenizer of what a decoder reads: `source`, the encoder's, where it has none of its own.

    None where an mBART is told no target language, or one that does not go with the token that it starts with.

    Raises:
        CheckpointError: As `read_tokenizer`.
    """
    if _has_two(folder, decoder.stack):
        return read_tokenizer(folder, decoder.stack, target=True)
    if decoder.stack.family != "mbart":
        return source
    target = read_mbart_target(folder, source)
    # transformers wraps the last token around to the front, whichever it is.
    return target if target is not None and target.encode("").ids[-1:] == [decoder.start_token_id] else None


def read_tokenizer(folder: Path, config: EncoderConfig, *, target: bool = False) -> Tokenizer:
    """Load the folder's tokenizer, without the truncation and padding that may be saved in it.

    Where sentence-transformers' `do_lower_case` is set, texts are lowercased first.
    A folder without `tokenizer.json` has its slow tokenizer's files converted, by transformers or as `pieces` says.

    Args:
        folder: Holds the tokenizer's files.
        config: Of what reads its tokens.
        target: Whether that is the decoder.

    Raises:
        CheckpointError: There is no tokenizer, it cannot be read, or its ids exceed the vocabulary.
    """
    path = folder / "tokenizer.json"
    if _has_two(folder, config):
        tokenizer = _tried(folder, lambda: read_marian(folder, target=target, vocab_size=config.vocab_size))
    elif path.is_file():
        tokenizer = _load_tokenizer(path)
    elif config.family in _T5_FAMILIES and (folder / T5_PIECES).is_file():
        tokenizer = _tried(folder / T5_PIECES, lambda: read_t5(folder, config.vocab_size))
    elif config.family in _DEBERTA_FAMILIES and (folder / DEBERTA_PIECES).is_file():
        tokenizer = _tried(folder / DEBERTA_PIECES, lambda: read_deberta(folder))
    else:
        tokenizer = _convert_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _optional_json(folder / "tokenizer_config.json")
    refuse_code(folder / "tokenizer_config.json", settings)
    tokenizer = _with_prefix_space(tokenizer, settings.get("add_prefix_space"))
    if _lower_case(folder):
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise CheckpointError(f"the tokenizer of {folder} has an empty vocabulary")
    # A template names special tokens by number, whether or not they are in the vocabulary.
    around = _tried(path, lambda: tokenizer.encode("", "").ids)
    largest = max(*tokenizer.get_vocab(with_added_tokens=True).values(), *around, 0)
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {folder} has ids up to {largest}, config field vocab_size is {config.vocab_size}"
        )
    return tokenizer


def _has_two(folder: Path, config: EncoderConfig) -> bool:
    """Tell whether a checkpoint has a tokenizer for the source and one for the target."""
    return config.family == "marian" and (folder / SOURCE_PIECES).is_file()


def _load_tokenizer(path: Path) -> Tokenizer:
    plain_file(path, MOST_TOKENIZER_BYTES)
    loaded: Tokenizer = _tried(path, lambda: Tokenizer.from_file(str(path)))
    return loaded


def _tried(path: Path, step: Callable[[], Any]) -> Any:
    """Give what a step of the tokenizers' library gives, and make one error of what may come instead."""
    try:
        return step()
    except CheckpointError:
        raise
    except BaseException as error:  # tokenizers raises plain Exception, and its panics not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path} is not a readable tokenizer: {first_line(error)}") from error


def _convert_tokenizer(folder: Path) -> Tokenizer:
    if not (folder / _SLOW_VOCABULARY).is_file():  # transformers would make up an empty tokenizer
        raise CheckpointError(f"{folder} has no tokenizer; expected tokenizer.json or {_SLOW_VOCABULARY}")
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt"):
            plain_file(path, MOST_TOKENIZER_BYTES)
    settings = _optional_json(folder / "tokenizer_config.json")
    refuse_code(folder / "tokenizer_config.json", settings)
    if (kind := settings.get("tokenizer_class")) not in (None, *_SLOW_CLASSES):  # transformers would look it up
        raise CheckpointError(
            f"{folder}/tokenizer_config.json names the tokenizer_class {kind!r}; supported: {', '.join(_SLOW_CLASSES)}"
        )
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, and seldom needed

    try:
        loaded = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        backend: Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # transformers raises many kinds for an absent or broken file
        raise CheckpointError(f"{folder} has no tokenizer that can be loaded: {first_line(error)}") from error
    return backend


def _with_prefix_space(tokenizer: Tokenizer, wanted: object) -> Tokenizer:
    """Let a byte-level tokenizer put a space before a text, or not, as its config says over its file."""
    state = json.loads(tokenizer.to_str())
    before = state.get("pre_tokenizer") or {}
    if not isinstance(wanted, bool) or before.get("type") != "ByteLevel" or before["add_prefix_space"] == wanted:
        return tokenizer
    before["add_prefix_space"] = wanted
    return Tokenizer.from_str(json.dumps(state))


def _optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that may be absent; then it is empty."""
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def _lower_case(folder: Path) -> bool:
    return _transformer_settings(folder)[1].get("do_lower_case") is True


def _max_tokens(folder: Path, config: EncoderConfig) -> int:
    """Give the longest sequence: sentence-transformers' limit, the tokenizer's, the model's."""
    most = config.max_tokens or _TOKENS_WITHOUT_LIMIT
    path, raw = _transformer_settings(folder)
    tokenizer = folder / "tokenizer_config.json"
    sources = ((path, raw, "max_seq_length"), (tokenizer, _optional_json(tokenizer), "model_max_length"))
    for where, settings, key in sources:
        limit = settings.get(key)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
            raise CheckpointError(f"{where}: {key} must be a number of tokens, got {limit!r}")
        # Tokenizers write an absurdly large number for no limit.
        return int(limit) if config.max_tokens is None and limit < _NO_LIMIT else int(min(limit, most))
    return most


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """List the modules of `modules.json` in order: class name and folder."""
    path = folder / "modules.json"
    try:
        entries = [(entry["type"], inner_folder(folder, entry["path"])) for entry in read_json(path, list)]
        # A class of the checkpoint's own keeps its whole name, which nothing below knows.
        listed = [(name.rsplit(".", 1)[-1] if name.startswith(_PACKAGE) else name, place) for name, place in entries]
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


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    raw = read_json(path)
    prompts, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if raw.get("truncate_dim") is not None:
        raise CheckpointError(f"{path} sets truncate_dim, which is not supported; requests may ask for dimensions")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must map names to texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(f"{path}: default_prompt_name {default!r} is not among prompts {sorted(prompts)}")
    return prompts, default
