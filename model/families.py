"""Families: how each one's `config.json` and tensor names map to ours. Data, not code.

A family is a row of `FAMILIES`: which of its config fields mean ours, which fields it must not set, where
its tensors lie in a checkpoint and what they are called. To add one, add a row and an oracle test.
May import: config, errors.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import ACTIVATIONS, EncoderConfig
from model.errors import CheckpointError

Raw = Mapping[str, Any]

# Fields that ask for another computation than the encoder's, with the values that do not.
_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}

# Tensor names: the checkpoint's -> ours. `{n}` stands for a layer number, `{p}` for weight or bias.
_BERT_ATTENTION = {
    "encoder.layer.{n}.attention.self.query.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.self.key.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.self.value.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.output.dense.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.output.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
}
_BERT_FEED_FORWARD = {
    "encoder.layer.{n}.intermediate.dense.{p}": "layers.{n}.feed_forward.intermediate.{p}",
    "encoder.layer.{n}.output.dense.{p}": "layers.{n}.feed_forward.output.{p}",
    "encoder.layer.{n}.output.LayerNorm.{p}": "layers.{n}.feed_forward_norm.{p}",
}
_EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "embeddings.token.weight",
    "embeddings.position_embeddings.weight": "embeddings.position.weight",
    "embeddings.LayerNorm.{p}": "embeddings.norm.{p}",
}
_SEGMENTS = {"embeddings.token_type_embeddings.weight": "embeddings.segment.weight"}
_BERT_NAMES = {**_EMBEDDINGS, **_SEGMENTS, **_BERT_ATTENTION, **_BERT_FEED_FORWARD}
_DISTILBERT_NAMES = {
    **_EMBEDDINGS,
    "transformer.layer.{n}.attention.q_lin.{p}": "layers.{n}.attention.query.{p}",
    "transformer.layer.{n}.attention.k_lin.{p}": "layers.{n}.attention.key.{p}",
    "transformer.layer.{n}.attention.v_lin.{p}": "layers.{n}.attention.value.{p}",
    "transformer.layer.{n}.attention.out_lin.{p}": "layers.{n}.attention.output.{p}",
    "transformer.layer.{n}.sa_layer_norm.{p}": "layers.{n}.attention_norm.{p}",
    "transformer.layer.{n}.ffn.lin1.{p}": "layers.{n}.feed_forward.intermediate.{p}",
    "transformer.layer.{n}.ffn.lin2.{p}": "layers.{n}.feed_forward.output.{p}",
    "transformer.layer.{n}.output_layer_norm.{p}": "layers.{n}.feed_forward_norm.{p}",
}
_MPNET_NAMES = {
    **_EMBEDDINGS,
    **_BERT_FEED_FORWARD,
    "encoder.layer.{n}.attention.attn.q.{p}": "layers.{n}.attention.query.{p}",
    "encoder.layer.{n}.attention.attn.k.{p}": "layers.{n}.attention.key.{p}",
    "encoder.layer.{n}.attention.attn.v.{p}": "layers.{n}.attention.value.{p}",
    "encoder.layer.{n}.attention.attn.o.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.relative_attention_bias.weight": "position_bias.bias.weight",
}
_T5_NAMES = {
    "shared.weight": "embeddings.token.weight",
    "encoder.embed_tokens.weight": "embeddings.token.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "position_bias.bias.weight",
    "encoder.block.{n}.layer.0.SelfAttention.q.weight": "layers.{n}.attention.query.weight",
    "encoder.block.{n}.layer.0.SelfAttention.k.weight": "layers.{n}.attention.key.weight",
    "encoder.block.{n}.layer.0.SelfAttention.v.weight": "layers.{n}.attention.value.weight",
    "encoder.block.{n}.layer.0.SelfAttention.o.weight": "layers.{n}.attention.output.weight",
    "encoder.block.{n}.layer.0.layer_norm.weight": "layers.{n}.attention_norm.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi.weight": "layers.{n}.feed_forward.intermediate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi_0.weight": "layers.{n}.feed_forward.intermediate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wi_1.weight": "layers.{n}.feed_forward.gate.weight",
    "encoder.block.{n}.layer.1.DenseReluDense.wo.weight": "layers.{n}.feed_forward.output.weight",
    "encoder.block.{n}.layer.1.layer_norm.weight": "layers.{n}.feed_forward_norm.weight",
    "encoder.final_layer_norm.weight": "final_norm.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's checkpoints are read.

    Attributes:
        names: The checkpoint's tensor names to ours.
        fields: Reads the config fields that are the family's own; gives arguments of `EncoderConfig`.
        prefix: Where the encoder lies in a checkpoint that also has a task head.
        ignored: Beginnings of names, behind the prefix, that change nothing the encoder computes.
        refused_unless: Further fields that must have one of these values.
    """

    names: Mapping[str, str]
    fields: Callable[[Raw], dict[str, Any]]
    prefix: str
    ignored: tuple[str, ...] = ()
    refused_unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _bert(raw: Raw) -> dict[str, Any]:
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    return {
        "vocab_size": _positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": _positive(raw, "num_hidden_layers"),
        "num_attention_heads": heads,
        "head_dim": _head_dim("hidden_size", hidden, "num_attention_heads", heads),
        "intermediate_size": _positive(raw, "intermediate_size"),
        "hidden_act": _activation(raw, "hidden_act"),
        "max_position_embeddings": _positive(raw, "max_position_embeddings"),
        "type_vocab_size": _positive(raw, "type_vocab_size"),
        "norm_eps": _number(raw, "layer_norm_eps", default=1e-12),
        "pad_token_id": _integer(raw, "pad_token_id", default=0),
    }


def _roberta(raw: Raw) -> dict[str, Any]:
    pad = _integer(raw, "pad_token_id", default=1)
    return {**_bert({**raw, "pad_token_id": pad}), "position_offset": pad + 1}


def _electra(raw: Raw) -> dict[str, Any]:
    return {**_bert(raw), "embedding_size": _positive(raw, "embedding_size", default=_positive(raw, "hidden_size"))}


def _mpnet(raw: Raw) -> dict[str, Any]:
    pad = _integer(raw, "pad_token_id", default=1)
    return {
        **_bert({**raw, "type_vocab_size": 1, "pad_token_id": pad}),
        "type_vocab_size": 0,
        "position_offset": pad + 1,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    }


def _distilbert(raw: Raw) -> dict[str, Any]:
    hidden, heads = _positive(raw, "dim"), _positive(raw, "n_heads")
    return {
        "vocab_size": _positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": _positive(raw, "n_layers"),
        "num_attention_heads": heads,
        "head_dim": _head_dim("dim", hidden, "n_heads", heads),
        "intermediate_size": _positive(raw, "hidden_dim"),
        "hidden_act": _activation(raw, "activation"),
        "max_position_embeddings": _positive(raw, "max_position_embeddings"),
        "type_vocab_size": 0,
        "norm_eps": 1e-12,  # not in the config: every DistilBERT has it
        "pad_token_id": _integer(raw, "pad_token_id", default=0),
    }


def _t5(raw: Raw) -> dict[str, Any]:
    hidden = _positive(raw, "d_model")
    form = str(raw.get("feed_forward_proj", "relu"))
    gated, activation = form.startswith("gated-"), form.removeprefix("gated-")
    # Hugging Face reads `gated-gelu` as the tanh approximation, as T5 1.1 was trained.
    activation = _supported("feed_forward_proj", form, "gelu_new" if gated and activation == "gelu" else activation)
    for name, agreed in (("dense_act_fn", activation), ("is_gated_act", gated)):
        if raw.get(name) not in (None, agreed):
            raise CheckpointError(f"config field {name}={raw[name]!r} is at odds with feed_forward_proj={form!r}")
    return {
        "vocab_size": _positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": _positive(raw, "num_layers"),
        "num_attention_heads": _positive(raw, "num_heads"),
        "head_dim": _positive(raw, "d_kv"),
        "intermediate_size": _positive(raw, "d_ff"),
        "hidden_act": activation,
        "gated": gated,
        "max_position_embeddings": 0,
        "type_vocab_size": 0,
        "embedding_norm": False,
        "norm": "rms",
        "norm_eps": _number(raw, "layer_norm_epsilon", default=1e-6),
        "pre_norm": True,
        "bias": False,
        "scaled": False,
        "relative_attention_num_buckets": _positive(raw, "relative_attention_num_buckets", default=32),
        "relative_attention_max_distance": _positive(raw, "relative_attention_max_distance", default=128),
        "pad_token_id": _integer(raw, "pad_token_id", default=0),
    }


_HEADS = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "classifier.", "qa_outputs.")
_ROBERTA = Family(_BERT_NAMES, _roberta, "roberta.", (*_HEADS, "lm_head."))
_T5 = Family(
    _T5_NAMES,
    _t5,
    "transformer.",
    ("decoder.", "lm_head.", "classification_head.", "classifier."),
    {"is_encoder_decoder": (None, True, False)},  # the encoder is taken, the decoder left
)

FAMILIES: Mapping[str, Family] = {
    "bert": Family(_BERT_NAMES, _bert, "bert.", _HEADS),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        _DISTILBERT_NAMES,
        _distilbert,
        "distilbert.",
        (*_HEADS, "vocab_", "pre_classifier."),
        {"sinusoidal_pos_embds": (None, False, True)},  # either way the table is in the checkpoint
    ),
    "electra": Family(
        {**_BERT_NAMES, "embeddings_project.{p}": "embeddings.projection.{p}"},
        _electra,
        "electra.",
        (*_HEADS, "discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    ),
    "mpnet": Family(
        _MPNET_NAMES,
        _mpnet,
        "mpnet.",
        (*_HEADS, "lm_head."),
        # Hugging Face's code has these numbers built in, whatever the config says.
        {"relative_attention_num_buckets": (None, 32), "pad_token_id": (None, 1)},
    ),
    "t5": _T5,
    "mt5": _T5,
}


def read_config(raw: Raw) -> EncoderConfig:
    """Read a parsed Hugging Face `config.json`.

    Args:
        raw: The parsed JSON object.

    Returns:
        The encoder's configuration.

    Raises:
        CheckpointError: The family is not supported, a field is missing or of the wrong type, or a field
            asks for a computation that the encoder does not do; the message names the field.
    """
    name = str(raw.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        raise CheckpointError(
            f"config field model_type is {raw.get('model_type')!r}; supported families: {', '.join(FAMILIES)}"
        )
    for refused, accepted in {**_REFUSED_UNLESS, **family.refused_unless}.items():
        if raw.get(refused) not in accepted:
            raise CheckpointError(f"config field {refused}={raw[refused]!r} is not supported by the encoder")
    return EncoderConfig(family=name, **family.fields(raw))


def _head_dim(size_name: str, size: int, heads_name: str, heads: int) -> int:
    if heads < 1 or size % heads:
        raise CheckpointError(f"config field {size_name}={size} is not divisible by {heads_name}={heads}")
    return size // heads


def _activation(raw: Raw, name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise CheckpointError(f"config field {name} must name an activation, got {value!r}")
    return _supported(name, value, value)


def _supported(name: str, value: str, activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"config field {name}={value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return activation


def _integer(raw: Raw, name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config field {name} must be a whole number, got {value!r}")
    return value


def _positive(raw: Raw, name: str, default: int | None = None) -> int:
    value = _integer(raw, name, default)
    if value < 1:
        raise CheckpointError(f"config field {name} must be at least 1, got {value}")
    return value


def _number(raw: Raw, name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config field {name} must be a number, got {value!r}")
    if not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"config field {name} must be finite and not below 0, got {value}")
    return float(value)
