"""Rotary fields: what the config fields of families with rotary positions mean in ours.

May import: config, fields, reading, errors.
"""

from collections.abc import Mapping
from typing import Any

from model.config import Rotary
from model.errors import CheckpointError
from model.fields import bert
from model.reading import Raw, above_zero, activation, flag, head_dim, integer, mapping, number, positive


def modernbert(raw: Raw) -> dict[str, Any]:
    """Read ModernBERT's, in the form of its publication and in that of newer versions of transformers."""
    layers = positive(raw, "num_hidden_layers")
    window = positive(raw, "local_attention", default=128)
    if window < 2:
        raise CheckpointError(f"config field local_attention must be at least 2, got {window}")
    bias, feed_forward = flag(raw, "attention_bias", default=False), flag(raw, "mlp_bias", default=False)
    hidden_act = activation({"hidden_activation": "gelu", **raw}, "hidden_activation")
    shared = {**raw, "hidden_act": hidden_act, "type_vocab_size": 1}
    return {
        **bert(
            {
                **shared,
                "layer_norm_eps": number(raw, "norm_eps", default=1e-5),
                "pad_token_id": integer(raw, "pad_token_id", default=50283),
            }
        ),
        "gated": True,
        "max_position_embeddings": 0,
        "type_vocab_size": 0,
        "pre_norm": True,
        "first_norm": False,
        "norm_bias": flag(raw, "norm_bias", default=False),
        "bias": bias,
        "intermediate_bias": feed_forward,
        "output_bias": feed_forward,
        "rotary": _kind_rotary(raw, "full_attention", "global_rope_theta", 160_000.0),
        "local_rotary": _kind_rotary(raw, "sliding_attention", "local_rope_theta", 10_000.0),
        "max_rotary_positions": positive(raw, "max_position_embeddings"),
        "local_layers": _local_layers(raw, layers),
        "local_reach": window // 2,
    }


def nomic_bert(raw: Raw) -> dict[str, Any]:
    """Read NomicBERT's, in the form that transformers writes and in that of its publication, in GPT-2's names."""
    if "n_embd" in raw:
        raw = _published_nomic(raw)
    theta = _rotary(raw, 1000.0)
    return {
        **_gated(raw, theta),
        "bias": False,
        "head_dim": _own_head_dim(raw),
    }


def gte(raw: Raw) -> dict[str, Any]:
    """Read GTE's."""
    return {**_gated(raw, _rotary(raw, 160_000.0)), "intermediate_bias": False}


def new(raw: Raw) -> dict[str, Any]:
    """Read those of GTE as it was published under the type `new`."""
    scaling = raw.get("rope_scaling")
    base = number(raw, "rope_theta", default=10_000.0)
    rotary = Rotary(base)
    if scaling is not None:
        if not isinstance(scaling, Mapping) or scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
            raise CheckpointError(f"config field rope_scaling={scaling!r} is not supported; supported: type ntk")
        factor = above_zero("rope_scaling.factor", scaling.get("factor"))
        # Fixed scaling: a base `factor` times as large, and all angles less by factor^(2 / head_dim).
        heads = positive(raw, "num_attention_heads")
        width = head_dim("hidden_size", positive(raw, "hidden_size"), "num_attention_heads", heads)
        rotary = Rotary(base * factor, factor ** (2 / width))
    return {**_gated(raw, rotary), "intermediate_bias": False}


def _gated(raw: Raw, rotary: Rotary) -> dict[str, Any]:
    """Read what NomicBERT and GTE share: BERT's, with rotary positions and a gated feed-forward block."""
    segments = integer(raw, "type_vocab_size")
    if segments < 0:
        raise CheckpointError(f"config field type_vocab_size must not be below 0, got {segments}")
    return {
        **bert({**raw, "type_vocab_size": 1}),
        "type_vocab_size": segments,
        "gated": True,
        "max_position_embeddings": 0,
        "max_rotary_positions": positive(raw, "max_position_embeddings"),
        "rotary": rotary,
    }


def _published_nomic(raw: Raw) -> dict[str, Any]:
    """Give NomicBERT's published fields in transformers' names, and refuse those that compute something else."""
    gates = {"swiglu": "silu", "geglu": "gelu"}
    form = raw.get("activation_function")
    if form not in gates:
        raise CheckpointError(
            f"config field activation_function={form!r} is not supported; supported: {', '.join(gates)}"
        )
    most = positive(raw, "n_positions")
    if raw.get("rotary_scaling_factor") is not None:  # beyond the trained places it would turn by each text's length
        most = min(most, positive(raw, "max_trained_positions"))
    size = positive(raw, "n_embd")
    return {
        "vocab_size": raw.get("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": positive(raw, "n_layer"),
        "num_attention_heads": positive(raw, "n_head"),
        "intermediate_size": positive(raw, "n_inner", default=4 * size),
        "hidden_act": gates[str(form)],
        "max_position_embeddings": most,
        "type_vocab_size": raw.get("type_vocab_size"),
        "layer_norm_eps": number(raw, "layer_norm_epsilon", default=1e-5),
        "pad_token_id": raw.get("pad_token_id"),
        "rope_theta": number(raw, "rotary_emb_base", default=10_000.0),
    }


def _own_head_dim(raw: Raw) -> int:
    heads = positive(raw, "num_attention_heads")
    if raw.get("head_dim") is not None:
        return positive(raw, "head_dim")
    return head_dim("hidden_size", positive(raw, "hidden_size"), "num_attention_heads", heads)


def _rotary(raw: Raw, default: float, given: object = None, where: str = "rope_parameters") -> Rotary:
    """Read rotary positions from `rope_parameters`, or from the older fields rope_theta and rope_scaling.

    Of the scalings those are taken that are the same for every text: none, a divisor of all places, and one that
    begins where the model's places end, which no text reaches.
    """
    given = raw.get("rope_parameters") if given is None else given
    if given is None:
        given, where = {"rope_theta": raw.get("rope_theta"), **mapping(raw, "rope_scaling")}, "rope_scaling"
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config field {where} must be an object, got {given!r}")
    theta = given.get("rope_theta")
    base = above_zero(f"{where}.rope_theta", default if theta is None else theta)
    kind = given.get("rope_type", given.get("type", "default"))
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"config field partial_rotary_factor={partial!r} is not supported; supported: 1.0")
    if kind not in ("default", "linear", "dynamic"):
        raise CheckpointError(f"config field {where} asks for rope_type {kind!r}; supported: default, linear, dynamic")
    return Rotary(base, above_zero(f"{where}.factor", given.get("factor")) if kind == "linear" else 1.0)


def _kind_rotary(raw: Raw, kind: str, older: str, default: float) -> Rotary:
    """Read ModernBERT's rotary positions of one kind of layer."""
    if older in raw and raw[older] is None:
        raise CheckpointError(f"config field {older} must be a number, got None")
    base = number(raw, older, default=default)
    parameters = mapping(raw, "rope_parameters").get(kind)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise CheckpointError(f"config field rope_parameters.{kind} must be an object, got {parameters!r}")
    scaling = mapping(raw, "rope_scaling")
    return _rotary(
        raw, base, {**(parameters or {}), **scaling}, "rope_scaling" if scaling else f"rope_parameters.{kind}"
    )


def _local_layers(raw: Raw, layers: int) -> frozenset[int]:
    """Read which of ModernBERT's layers look at neighbours alone."""
    every = positive(raw, "global_attn_every_n_layers", default=3)
    counted = frozenset(number for number in range(layers) if number % every)
    kinds = raw.get("layer_types")
    if kinds is None:
        return counted
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"config field layer_types must name {' or '.join(known)} for each of {layers} layers, got {kinds!r:.200}"
        )
    named = frozenset(number for number, kind in enumerate(kinds) if kind == known[1])
    if raw.get("global_attn_every_n_layers") is not None and named != counted:
        raise CheckpointError(f"config field layer_types is at odds with global_attn_every_n_layers={every}")
    return named
