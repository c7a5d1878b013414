"""Fields: what each family's config fields mean in ours, and how single fields are read.

A family's reader takes a parsed `config.json` and gives arguments of `EncoderConfig`.
May import: config, errors.
"""

import sys
from collections.abc import Mapping
from typing import Any

from model.config import ACTIVATIONS
from model.errors import CheckpointError

Raw = Mapping[str, Any]
"""A parsed `config.json`."""


def bert(raw: Raw) -> dict[str, Any]:
    """Read BERT's fields, which most families share."""
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    return {
        "vocab_size": positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": positive(raw, "num_hidden_layers"),
        "num_attention_heads": heads,
        "head_dim": head_dim("hidden_size", hidden, "num_attention_heads", heads),
        "intermediate_size": positive(raw, "intermediate_size"),
        "hidden_act": activation(raw, "hidden_act"),
        "max_position_embeddings": positive(raw, "max_position_embeddings"),
        "type_vocab_size": positive(raw, "type_vocab_size"),
        "norm_eps": number(raw, "layer_norm_eps", default=1e-12),
        "pad_token_id": integer(raw, "pad_token_id", default=0),
    }


def roberta(raw: Raw) -> dict[str, Any]:
    """Read RoBERTa's: BERT's, with positions that count from behind the padding index."""
    pad = integer(raw, "pad_token_id", default=1)
    return {**bert({**raw, "pad_token_id": pad}), "position_offset": pad + 1}


def electra(raw: Raw) -> dict[str, Any]:
    """Read ELECTRA's: BERT's, with embeddings of a width of their own."""
    return {**bert(raw), "embedding_size": positive(raw, "embedding_size", default=positive(raw, "hidden_size"))}


def mpnet(raw: Raw) -> dict[str, Any]:
    """Read MPNet's: RoBERTa's without segments, with a position bias."""
    pad = integer(raw, "pad_token_id", default=1)
    return {
        **bert({**raw, "type_vocab_size": 1, "pad_token_id": pad}),
        "type_vocab_size": 0,
        "position_offset": pad + 1,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    }


def distilbert(raw: Raw) -> dict[str, Any]:
    """Read DistilBERT's, whose names are its own."""
    hidden, heads = positive(raw, "dim"), positive(raw, "n_heads")
    return {
        "vocab_size": positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": positive(raw, "n_layers"),
        "num_attention_heads": heads,
        "head_dim": head_dim("dim", hidden, "n_heads", heads),
        "intermediate_size": positive(raw, "hidden_dim"),
        "hidden_act": activation(raw, "activation"),
        "max_position_embeddings": positive(raw, "max_position_embeddings"),
        "type_vocab_size": 0,
        "norm_eps": 1e-12,  # not in the config: every DistilBERT has it
        "pad_token_id": integer(raw, "pad_token_id", default=0),
    }


def t5(raw: Raw) -> dict[str, Any]:
    """Read T5's encoder."""
    hidden = positive(raw, "d_model")
    form = str(raw.get("feed_forward_proj", "relu"))
    gated, activation = form.startswith("gated-"), form.removeprefix("gated-")
    # Hugging Face reads `gated-gelu` as the tanh approximation, as T5 1.1 was trained.
    activation = supported("feed_forward_proj", form, "gelu_new" if gated and activation == "gelu" else activation)
    for name, agreed in (("dense_act_fn", activation), ("is_gated_act", gated)):
        if raw.get(name) not in (None, agreed):
            raise CheckpointError(f"config field {name}={raw[name]!r} is at odds with feed_forward_proj={form!r}")
    return {
        "vocab_size": positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": positive(raw, "num_layers"),
        "num_attention_heads": positive(raw, "num_heads"),
        "head_dim": positive(raw, "d_kv"),
        "intermediate_size": positive(raw, "d_ff"),
        "hidden_act": activation,
        "gated": gated,
        "max_position_embeddings": 0,
        "type_vocab_size": 0,
        "embedding_norm": False,
        "norm": "rms",
        "norm_eps": number(raw, "layer_norm_epsilon", default=1e-6),
        "pre_norm": True,
        "bias": False,
        "scaled": False,
        "relative_attention_num_buckets": positive(raw, "relative_attention_num_buckets", default=32),
        "relative_attention_max_distance": positive(raw, "relative_attention_max_distance", default=128),
        "pad_token_id": integer(raw, "pad_token_id", default=0),
    }


def head_dim(size_name: str, size: int, heads_name: str, heads: int) -> int:
    """Give the width of one head, of a width that must be a multiple of the heads."""
    if heads < 1 or size % heads:
        raise CheckpointError(f"config field {size_name}={size} is not divisible by {heads_name}={heads}")
    return size // heads


def activation(raw: Raw, name: str) -> str:
    """Read the name of an activation that the encoder has."""
    value = raw.get(name)
    if not isinstance(value, str):
        raise CheckpointError(f"config field {name} must name an activation, got {value!r}")
    return supported(name, value, "silu" if value == "swish" else value)  # one function of two names


def supported(name: str, value: str, activation: str) -> str:
    """Give an activation that the encoder has; `name` and `value` are what the config says."""
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"config field {name}={value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return activation


def integer(raw: Raw, name: str, default: int | None = None) -> int:
    """Read a whole number."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config field {name} must be a whole number, got {value!r}")
    return value


def positive(raw: Raw, name: str, default: int | None = None) -> int:
    """Read a whole number of at least 1."""
    value = integer(raw, name, default)
    if value < 1:
        raise CheckpointError(f"config field {name} must be at least 1, got {value}")
    return value


def number(raw: Raw, name: str, default: float) -> float:
    """Read a finite number that is not below 0."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config field {name} must be a number, got {value!r}")
    if not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"config field {name} must be finite and not below 0, got {value}")
    return float(value)
