"""Encoder-decoders: tensor names and config fields of BART, mBART and Marian, and of T5's decoder. Data, not code.

As in `names` and `fields`. A decoder's reader gives those arguments of `EncoderConfig` in which the decoder is not as
its encoder, and the arguments of `DecoderConfig`. May import: errors, fields, reading.
"""

import math
from typing import Any

from model import reading
from model.errors import CheckpointError
from model.reading import Raw

_TOKENS = "embeddings.token.weight"
_SHARED = {"shared.weight": _TOKENS}
# Where both sides share one table, a checkpoint may hold it under any of these names.
_ANY_TABLE = {**_SHARED, "encoder.embed_tokens.weight": _TOKENS, "decoder.embed_tokens.weight": _TOKENS}


def _t5_attention(theirs: str, ours: str) -> dict[str, str]:
    pairs = zip("qkvo", ("query", "key", "value", "output"), strict=True)
    return {f"decoder.block.{{n}}.{theirs}.{one}.weight": f"layers.{{n}}.{ours}.{other}.weight" for one, other in pairs}


T5_DECODER = {
    **_ANY_TABLE,
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "position_bias.bias.weight",
    **_t5_attention("layer.0.SelfAttention", "attention"),
    "decoder.block.{n}.layer.0.layer_norm.weight": "layers.{n}.attention_norm.weight",
    **_t5_attention("layer.1.EncDecAttention", "cross_attention"),
    "decoder.block.{n}.layer.1.layer_norm.weight": "layers.{n}.cross_attention_norm.weight",
    "decoder.block.{n}.layer.2.DenseReluDense.wi.weight": "layers.{n}.feed_forward.intermediate.weight",
    "decoder.block.{n}.layer.2.DenseReluDense.wi_0.weight": "layers.{n}.feed_forward.intermediate.weight",
    "decoder.block.{n}.layer.2.DenseReluDense.wi_1.weight": "layers.{n}.feed_forward.gate.weight",
    "decoder.block.{n}.layer.2.DenseReluDense.wo.weight": "layers.{n}.feed_forward.output.weight",
    "decoder.block.{n}.layer.2.layer_norm.weight": "layers.{n}.feed_forward_norm.weight",
    "decoder.final_layer_norm.weight": "final_norm.weight",
}


def _bart_attention(side: str, theirs: str, ours: str) -> dict[str, str]:
    pairs = zip(("q_proj", "k_proj", "v_proj", "out_proj"), ("query", "key", "value", "output"), strict=True)
    rows = {f"{side}.layers.{{n}}.{theirs}.{one}.{{p}}": f"layers.{{n}}.{ours}.{other}.{{p}}" for one, other in pairs}
    return {**rows, f"{side}.layers.{{n}}.{theirs}_layer_norm.{{p}}": f"layers.{{n}}.{ours}_norm.{{p}}"}


def _bart_stack(side: str) -> dict[str, str]:
    return {
        f"{side}.embed_positions.weight": "embeddings.position.weight",
        **_bart_attention(side, "self_attn", "attention"),
        f"{side}.layers.{{n}}.fc1.{{p}}": "layers.{n}.feed_forward.intermediate.{p}",
        f"{side}.layers.{{n}}.fc2.{{p}}": "layers.{n}.feed_forward.output.{p}",
        f"{side}.layers.{{n}}.final_layer_norm.{{p}}": "layers.{n}.feed_forward_norm.{p}",
    }


_ENCODER = _bart_stack("encoder")
_DECODER = {**_bart_stack("decoder"), **_bart_attention("decoder", "encoder_attn", "cross_attention")}
BART = {**_ANY_TABLE, **_ENCODER, "encoder.layernorm_embedding.{p}": "embeddings.norm.{p}"}
BART_DECODER = {**_ANY_TABLE, **_DECODER, "decoder.layernorm_embedding.{p}": "embeddings.norm.{p}"}
MBART = {**BART, "encoder.layer_norm.{p}": "final_norm.{p}"}
MBART_DECODER = {**BART_DECODER, "decoder.layer_norm.{p}": "final_norm.{p}"}
# Marian's two sides may have tables of their own.
MARIAN = {**_SHARED, "encoder.embed_tokens.weight": _TOKENS, **_ENCODER}
MARIAN_DECODER = {**_SHARED, "decoder.embed_tokens.weight": _TOKENS, **_DECODER}


def t5_decoder(raw: Raw) -> dict[str, Any]:
    """Read T5's decoder, which starts with the padding token where the config does not say."""
    return {
        "num_hidden_layers": reading.positive(raw, "num_decoder_layers", default=reading.positive(raw, "num_layers")),
        **_ends(raw, start=reading.integer(raw, "pad_token_id", default=0), eos=1),
    }


def bart(raw: Raw) -> dict[str, Any]:
    """Read BART's encoder; its positions begin at 2, and padding takes places too."""
    hidden, heads = reading.positive(raw, "d_model"), reading.positive(raw, "encoder_attention_heads")
    offset = 2
    return {
        "vocab_size": reading.positive(raw, "vocab_size"),
        "embedding_size": hidden,
        "hidden_size": hidden,
        "num_hidden_layers": reading.positive(raw, "encoder_layers"),
        "num_attention_heads": heads,
        "head_dim": reading.head_dim("d_model", hidden, "encoder_attention_heads", heads),
        "intermediate_size": reading.positive(raw, "encoder_ffn_dim"),
        "hidden_act": reading.activation(raw, "activation_function"),
        "max_position_embeddings": reading.positive(raw, "max_position_embeddings") + offset,
        "position_offset": offset,
        "padding_takes_places": True,
        "type_vocab_size": 0,
        "embedding_scale": math.sqrt(hidden) if _flag(raw, "scale_embedding") else 1.0,
        "norm_eps": 1e-5,  # not in the config: every BART has it
        "pad_token_id": reading.integer(raw, "pad_token_id", default=1),
    }


def bart_decoder(raw: Raw) -> dict[str, Any]:
    """Read BART's decoder."""
    hidden, heads = reading.positive(raw, "d_model"), reading.positive(raw, "decoder_attention_heads")
    return {
        "num_hidden_layers": reading.positive(raw, "decoder_layers"),
        "num_attention_heads": heads,
        "head_dim": reading.head_dim("d_model", hidden, "decoder_attention_heads", heads),
        "intermediate_size": reading.positive(raw, "decoder_ffn_dim"),
        **_ends(raw, start=2, eos=2),
    }


def mbart(raw: Raw) -> dict[str, Any]:
    """Read mBART's encoder: BART's with norms before the sublayers."""
    return {**bart(raw), "pre_norm": True}


def marian(raw: Raw) -> dict[str, Any]:
    """Read Marian's encoder: BART's with sinusoidal positions from 0, and without a norm of the embeddings."""
    return {
        **bart({**raw, "pad_token_id": reading.integer(raw, "pad_token_id", default=58100)}),
        "max_position_embeddings": reading.positive(raw, "max_position_embeddings"),
        "position_offset": 0,
        "padding_takes_places": False,
        "sinusoidal": True,
        "embedding_norm": False,
    }


def marian_decoder(raw: Raw) -> dict[str, Any]:
    """Read Marian's decoder, which may have a vocabulary of its own."""
    size = reading.positive(raw, "vocab_size")
    own = reading.positive(raw, "decoder_vocab_size", default=size)
    if own != size and _flag(raw, "share_encoder_decoder_embeddings", default=True):
        raise CheckpointError(
            f"config field decoder_vocab_size={own} is at odds with vocab_size={size}, which "
            "share_encoder_decoder_embeddings says are one"
        )
    pad = reading.integer(raw, "pad_token_id", default=58100)
    return {**bart_decoder(raw), "vocab_size": own, **_ends(raw, start=pad, eos=0)}


def _ends(raw: Raw, *, start: int, eos: int) -> dict[str, Any]:
    """Read what a target begins and ends with."""
    ends = raw.get("eos_token_id")
    first = {"eos_token_id": ends[0]} if isinstance(ends, list) and ends else {}
    return {
        "start_token_id": reading.integer(raw, "decoder_start_token_id", default=start),
        "eos_token_id": reading.integer({**raw, **first}, "eos_token_id", default=eos),
    }


def _flag(raw: Raw, name: str, *, default: bool = False) -> bool:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config field {name} must be true or false, got {value!r}")
    return value
