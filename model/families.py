"""Families: how each one's `config.json` and tensor names map to ours. Data, not code.

A family is a row of `FAMILIES`: which of its config fields mean ours (`fields`), which fields it must not set, where
its tensors lie in a checkpoint and what they are called (`names`). To add one, add a row and an oracle test.
May import: config, errors, fields, names, reading, rotary_fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model import fields, names, rotary_fields
from model.config import EncoderConfig
from model.errors import CheckpointError
from model.names import Names
from model.reading import Raw

# Fields that ask for another computation than the encoder's, with the values that do not.
_REFUSED_UNLESS: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
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
        code: Beginnings of the names of published code that computes what the encoder does; a config may name it.
    """

    names: Names
    fields: Callable[[Raw], dict[str, Any]]
    prefix: str
    ignored: tuple[str, ...] = ()
    refused_unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    code: tuple[str, ...] = ()


_HEADS = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "classifier.", "qa_outputs.")
_ROBERTA = Family(names.BERT, fields.roberta, "roberta.", (*_HEADS, "lm_head."))
_T5 = Family(
    names.T5,
    fields.t5,
    "transformer.",
    ("decoder.", "lm_head.", "classification_head.", "classifier."),
    {"is_encoder_decoder": (None, True, False)},  # the encoder is taken, the decoder left
)
# The published code of both does more than the families' checkpoints ask of it.
_ROTARY = {"position_embedding_type": (None, "rope", "rotary")}
_NOMIC_REFUSED = {
    **_ROTARY,
    **dict.fromkeys(("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block"), (None, False)),
    **dict.fromkeys(("causal", "use_rms_norm", "rotary_emb_interleaved"), (None, False)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"), (None, False)),
    "rotary_emb_fraction": (None, 1, 1.0),
    "rotary_emb_scale_base": (None,),
    "scale_attn_weights": (None, True),
    "moe_every_n_layers": (None, 0),
}
_GTE_REFUSED = {
    **_ROTARY,
    "layer_norm_type": (None, "layer_norm"),
    "logn_attention_scale": (None, False),
    "logn_attention_clip1": (None, False),
}

FAMILIES: Mapping[str, Family] = {
    "bert": Family(names.BERT, fields.bert, "bert.", _HEADS),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        names.DISTILBERT,
        fields.distilbert,
        "distilbert.",
        (*_HEADS, "vocab_", "pre_classifier."),
        {"sinusoidal_pos_embds": (None, False, True)},  # either way the table is in the checkpoint
    ),
    "electra": Family(
        {**names.BERT, "embeddings_project.{p}": "embeddings.projection.{p}"},
        fields.electra,
        "electra.",
        (*_HEADS, "discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
    ),
    "mpnet": Family(
        names.MPNET,
        fields.mpnet,
        "mpnet.",
        (*_HEADS, "lm_head."),
        # Hugging Face's code has these numbers built in, whatever the config says.
        {"relative_attention_num_buckets": (None, 32), "pad_token_id": (None, 1)},
    ),
    "albert": Family(
        names.ALBERT,
        fields.albert,
        "albert.",
        (*_HEADS, "predictions.", "sop_classifier."),
    ),
    "modernbert": Family(names.MODERNBERT, rotary_fields.modernbert, "model.", ("head.", "decoder.", "classifier.")),
    "nomic_bert": Family(
        names.NOMIC_BERT,
        rotary_fields.nomic_bert,
        "nomic_bert.",
        (*_HEADS, "encoder.rotary_emb."),
        _NOMIC_REFUSED,
        ("nomic-ai/nomic-bert-2048--", "configuration_hf_nomic_bert.", "modeling_hf_nomic_bert."),
    ),
    "gte": Family(names.GTE, rotary_fields.gte, "new.", (*_HEADS, "lm_head."), _GTE_REFUSED),
    "new": Family(
        names.GTE,
        rotary_fields.new,
        "new.",
        (*_HEADS, "lm_head."),
        _GTE_REFUSED,
        ("Alibaba-NLP/new-impl--", "configuration.New", "modeling.New"),
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
