"""Fields: what each family's config fields mean in ours.

A family's reader takes a parsed `config.json` and gives arguments of `EncoderConfig`; those of families with rotary
positions are in `rotary_fields`. May import: reading, errors.
"""

from typing import Any

from model.errors import CheckpointError
from model.reading import Raw, activation, flag, head_dim, integer, number, positive, supported, whole


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
    gated, named = form.startswith("gated-"), form.removeprefix("gated-")
    # Hugging Face reads `gated-gelu` as the tanh approximation, as T5 1.1 was trained.
    hidden_act = supported("feed_forward_proj", form, "gelu_new" if gated and named == "gelu" else named)
    for name, agreed in (("dense_act_fn", hidden_act), ("is_gated_act", gated)):
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
        "hidden_act": hidden_act,
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


def deberta(raw: Raw) -> dict[str, Any]:
    """Read DeBERTa-v2's and v3's: BERT's, with disentangled attention and, in some of v2, a convolution."""
    positions, hidden = positive(raw, "max_position_embeddings"), positive(raw, "hidden_size")
    width = head_dim("hidden_size", hidden, "num_attention_heads", positive(raw, "num_attention_heads"))
    if raw.get("attention_head_size") not in (None, width):
        raise CheckpointError(
            f"config field attention_head_size={raw['attention_head_size']!r} must be hidden_size divided by "
            f"num_attention_heads, {width}"
        )
    return {
        **bert({**raw, "type_vocab_size": 1}),
        "embedding_size": positive(raw, "embedding_size", default=hidden),
        "projection_first": True,
        "max_position_embeddings": positions if flag(raw, "position_biased_input", default=True) else 0,
        "type_vocab_size": whole(raw, "type_vocab_size", default=0),
        "norm_eps": number(raw, "layer_norm_eps", default=1e-7),
        **_relative(raw, positions),
        "conv_kernel_size": max(integer(raw, "conv_kernel_size", default=0), 0),
        "conv_groups": positive(raw, "conv_groups", default=1),
        "conv_act": activation({"conv_act": "tanh", **raw}, "conv_act"),
    }


def _relative(raw: Raw, positions: int) -> dict[str, Any]:
    """Read how DeBERTa attends to relative positions; a longest distance that is not set is that of `positions`."""
    norms = _listed(raw, "norm_rel_ebd", ("none", "layer_norm"))
    terms = _listed(raw, "pos_att_type", ("c2p", "p2c"))
    if not flag(raw, "relative_attention", default=False):
        return {"pos_att_type": terms}
    longest = integer(raw, "max_relative_positions", default=-1)
    return {
        "pos_att_type": terms,
        "max_relative_positions": longest if longest > 0 else positions,
        "position_buckets": max(integer(raw, "position_buckets", default=-1), 0),
        "share_att_key": flag(raw, "share_att_key", default=False),
        "norm_rel_ebd": "layer_norm" in norms,
    }


def _listed(raw: Raw, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Read names from a list, or from a text that parts them by `|`; none where the field is not set."""
    value = raw.get(name)
    found = [part.strip() for part in value.lower().split("|")] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(part in known for part in found):
        raise CheckpointError(f"config field {name} must list some of {', '.join(known)}, got {value!r}")
    return tuple(part for part in known if part in found)


def albert(raw: Raw) -> dict[str, Any]:
    """Read ALBERT's: ELECTRA's, with layers that share their weights."""
    layers, groups = positive(raw, "num_hidden_layers"), positive(raw, "num_hidden_groups", default=1)
    inner = positive(raw, "inner_group_num", default=1)
    if groups > layers:
        raise CheckpointError(f"config field num_hidden_groups={groups} is above num_hidden_layers={layers}")
    return {
        **electra({**raw, "embedding_size": positive(raw, "embedding_size", default=128)}),
        "embedding_projection": True,
        "num_hidden_layers": layers * inner,
        "num_hidden_groups": groups,
        "inner_group_num": inner,
    }
