"""Families: how each one's `config.json` and tensor names map to ours. Data, not code.

A family is a row of `FAMILIES`: which of its config fields mean ours (`fields`), which fields it must not set, where
its tensors lie in a checkpoint and what they are called (`names`). To add one, add a row and an oracle test.
May import: config, errors, fields, names, seq2seq.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model import fields, names, seq2seq
from model.config import DecoderConfig, EncoderConfig
from model.errors import CheckpointError
from model.fields import Raw

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
        spare: Beginnings of names that checkpoints keep though their config has no use for them.
        refused_unless: Further fields that must have one of these values.
        decoder: How the decoder beside the encoder is read; its `fields` gives what `model.seq2seq` says.
    """

    names: Mapping[str, str]
    fields: Callable[[Raw], dict[str, Any]]
    prefix: str
    ignored: tuple[str, ...] = ()
    refused_unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    decoder: "Family | None" = None
    spare: tuple[str, ...] = ()


_HEADS = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "classifier.", "qa_outputs.")
_ROBERTA = Family(names.BERT, fields.roberta, "roberta.", (*_HEADS, "lm_head."))
_T5_HEADS = ("lm_head.", "classification_head.", "classifier.")
_PAIR = {"is_encoder_decoder": (None, True, False)}
_T5 = Family(
    names.T5,
    fields.t5,
    "transformer.",
    ("decoder.", *_T5_HEADS),
    _PAIR,
    Family(
        seq2seq.T5_DECODER,
        seq2seq.t5_decoder,
        "transformer.",
        # In the oldest checkpoints, where nothing adds it to anything.
        ("encoder.", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.", *_T5_HEADS),
    ),
)
_BART_HEADS = ("lm_head.", "final_logits_bias", "classification_head.", "qa_outputs.")
# What transformers never reads, and conversions of other computations set.
_POST_NORM = {"normalize_before": (None, False), "add_final_layer_norm": (None, False)}
_PRE_NORM = {"normalize_before": (None, True), "add_final_layer_norm": (None, True)}
_LEARNED = {"static_position_embeddings": (None, False), "normalize_embedding": (None, True)}
_FIXED = {"static_position_embeddings": (None, True), "normalize_embedding": (None, False)}

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
    "t5": _T5,
    "mt5": _T5,
    "deberta-v2": Family(  # and v3, which calls itself so
        names.DEBERTA,
        fields.deberta,
        "deberta.",
        (*_HEADS, "lm_predictions.", "mask_predictions."),
        spare=("embeddings.position_embeddings.", "encoder.rel_embeddings.", "encoder.LayerNorm."),
    ),
    "bart": Family(
        seq2seq.BART,
        seq2seq.bart,
        "model.",
        ("decoder.", "encoder.version", *_BART_HEADS),
        {**_PAIR, **_POST_NORM, **_LEARNED},
        Family(
            seq2seq.BART_DECODER,
            seq2seq.bart_decoder,
            "model.",
            ("encoder.", "decoder.version", *_BART_HEADS),
        ),
    ),
    "mbart": Family(
        seq2seq.MBART,
        seq2seq.mbart,
        "model.",
        ("decoder.", *_BART_HEADS),
        {**_PAIR, **_PRE_NORM, **_LEARNED},
        Family(seq2seq.MBART_DECODER, seq2seq.bart_decoder, "model.", ("encoder.", *_BART_HEADS)),
    ),
    "marian": Family(
        seq2seq.MARIAN,
        seq2seq.marian,
        "model.",
        ("decoder.", *_BART_HEADS),
        {**_PAIR, **_POST_NORM, **_FIXED},
        Family(seq2seq.MARIAN_DECODER, seq2seq.marian_decoder, "model.", ("encoder.", *_BART_HEADS)),
    ),
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


def read_decoder_config(raw: Raw) -> DecoderConfig:
    """Read the decoder from a parsed `config.json` of a family that has one.

    Raises:
        CheckpointError: As `read_config`.
    """
    encoder = read_config(raw)
    family = FAMILIES[encoder.family].decoder
    assert family is not None, f"{encoder.family} has no decoder"
    own = family.fields(raw)
    ends = {name: own.pop(name) for name in ("start_token_id", "eos_token_id")}
    return DecoderConfig(stack=replace(encoder, **own), **ends)
