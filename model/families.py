"""Families: how each one's `config.json` and tensor names map to ours. Data, not code.

A family is a row of `FAMILIES`: which of its config fields mean ours (`fields`), which fields it must not set, where
its tensors lie in a checkpoint and what they are called (`names`). To add one, add a row and an oracle test.
May import: config, errors, fields, names, reading, rotary_fields, seq2seq.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from model import fields, names, rotary_fields, seq2seq
from model.config import DecoderConfig, EncoderConfig
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


class About(NamedTuple):
    """What is said of a family to people: `attencode families` prints it.

    Attributes:
        models: Published models that are of it.
        positions: How a token's place comes in.
        attention: What a token looks at, and how.
        max_tokens: Config fields that give the longest text in tokens, special tokens included.
        notes: What else there is to know; empty for nothing.
    """

    models: str = ""
    positions: str = "learned"
    attention: str = "global"
    max_tokens: str = "max_position_embeddings"
    notes: str = ""


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
        about: What is said of it to people.
        code: Beginnings of the names of published code that computes what the encoder does; a config may name it.
        decoder: How the decoder beside the encoder is read; its `fields` gives what `model.seq2seq` says.
    """

    names: Names
    fields: Callable[[Raw], dict[str, Any]]
    prefix: str
    ignored: tuple[str, ...] = ()
    refused_unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    decoder: "Family | None" = None
    spare: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    about: About = field(default_factory=About)


_FLOAT32 = "float32 on CUDA"
_HEADS = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "classifier.", "qa_outputs.")
_BEHIND_PAD = About(
    positions="learned, from behind the padding index", max_tokens="max_position_embeddings - pad_token_id - 1"
)
_ROBERTA = Family(names.BERT, fields.roberta, "roberta.", (*_HEADS, "lm_head."), about=_BEHIND_PAD)
_ABOUT_T5 = About("T5, Flan-T5", "one relative bias for all layers", max_tokens="no limit")
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
    about=_ABOUT_T5,
)
_BART_HEADS = ("lm_head.", "final_logits_bias", "classification_head.", "qa_outputs.")
# What transformers never reads, and conversions of other computations set.
_POST_NORM = {"normalize_before": (None, False), "add_final_layer_norm": (None, False)}
_PRE_NORM = {"normalize_before": (None, True), "add_final_layer_norm": (None, True)}
_LEARNED = {"static_position_embeddings": (None, False), "normalize_embedding": (None, True)}
_FIXED = {"static_position_embeddings": (None, True), "normalize_embedding": (None, False)}
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
    "bert": Family(names.BERT, fields.bert, "bert.", _HEADS, about=About("BERT, MiniLM, BGE, E5")),
    "roberta": replace(_ROBERTA, about=_BEHIND_PAD._replace(models="RoBERTa")),
    "xlm-roberta": replace(_ROBERTA, about=_BEHIND_PAD._replace(models="XLM-R, multilingual E5, BGE-M3")),
    "camembert": replace(_ROBERTA, about=_BEHIND_PAD._replace(models="CamemBERT")),
    "distilbert": Family(
        names.DISTILBERT,
        fields.distilbert,
        "distilbert.",
        (*_HEADS, "vocab_", "pre_classifier."),
        {"sinusoidal_pos_embds": (None, False, True)},  # either way the table is in the checkpoint
        about=About("DistilBERT", "learned or sinusoidal"),
    ),
    "electra": Family(
        {**names.BERT, "embeddings_project.{p}": "embeddings.projection.{p}"},
        fields.electra,
        "electra.",
        (*_HEADS, "discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
        about=About("ELECTRA", notes="embeddings may be narrower than layers"),
    ),
    "mpnet": Family(
        names.MPNET,
        fields.mpnet,
        "mpnet.",
        (*_HEADS, "lm_head."),
        # Hugging Face's code has these numbers built in, whatever the config says.
        {"relative_attention_num_buckets": (None, 32), "pad_token_id": (None, 1)},
        about=_BEHIND_PAD._replace(
            models="MPNet", positions="learned, from behind the padding index, and one relative bias for all layers"
        ),
    ),
    "albert": Family(
        names.ALBERT,
        fields.albert,
        "albert.",
        (*_HEADS, "predictions.", "sop_classifier."),
        about=About("ALBERT", notes="layers share weights, in groups, which are stored once"),
    ),
    "modernbert": Family(
        names.MODERNBERT,
        rotary_fields.modernbert,
        "model.",
        ("head.", "decoder.", "classifier."),
        about=About(
            *("ModernBERT", "rotary, of one base for global layers and one for local", "global and local by turns"),
            notes=_FLOAT32,
        ),
    ),
    "nomic_bert": Family(
        names.NOMIC_BERT,
        rotary_fields.nomic_bert,
        "nomic_bert.",
        (*_HEADS, "encoder.rotary_emb."),
        _NOMIC_REFUSED,
        code=("nomic-ai/nomic-bert-2048--", "configuration_hf_nomic_bert.", "modeling_hf_nomic_bert."),
        about=About(
            *("nomic-embed-text v1, v1.5", "rotary"),
            max_tokens="max_position_embeddings; as published n_positions, or with a rotary_scaling_factor at most "
            "max_trained_positions",
            notes=_FLOAT32,
        ),
    ),
    "gte": Family(
        names.GTE,
        rotary_fields.gte,
        "new.",
        (*_HEADS, "lm_head."),
        _GTE_REFUSED,
        about=About("GTE, as transformers has it", "rotary", notes=_FLOAT32),
    ),
    "new": Family(
        names.GTE,
        rotary_fields.new,
        "new.",
        (*_HEADS, "lm_head."),
        _GTE_REFUSED,
        code=("Alibaba-NLP/new-impl--", "configuration.New", "modeling.New"),
        about=About("gte-*-en-v1.5, gte-multilingual, as published", "rotary, scaled or not", notes=_FLOAT32),
    ),
    "t5": _T5,
    "mt5": replace(_T5, about=_ABOUT_T5._replace(models="mT5")),
    "deberta-v2": Family(  # and v3, which calls itself so
        names.DEBERTA,
        fields.deberta,
        "deberta.",
        (*_HEADS, "lm_predictions.", "mask_predictions."),
        spare=("embeddings.position_embeddings.", "encoder.rel_embeddings.", "encoder.LayerNorm."),
        about=About(
            *("DeBERTa-v2, DeBERTa-v3", "relative, in buckets", "global, content and place apart"),
            max_tokens="no limit; with position_biased_input max_position_embeddings",
            notes=_FLOAT32,
        ),
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
        about=About("BART"),
    ),
    "mbart": Family(
        seq2seq.MBART,
        seq2seq.mbart,
        "model.",
        ("decoder.", *_BART_HEADS),
        {**_PAIR, **_PRE_NORM, **_LEARNED},
        Family(seq2seq.MBART_DECODER, seq2seq.bart_decoder, "model.", ("encoder.", *_BART_HEADS)),
        about=About("mBART"),
    ),
    "marian": Family(
        seq2seq.MARIAN,
        seq2seq.marian,
        "model.",
        ("decoder.", *_BART_HEADS),
        {**_PAIR, **_POST_NORM, **_FIXED},
        Family(seq2seq.MARIAN_DECODER, seq2seq.marian_decoder, "model.", ("encoder.", *_BART_HEADS)),
        about=About("Marian, opus-mt", "sinusoidal"),
    ),
}


def table() -> list[dict[str, str]]:
    """Say of each family, by its `model_type`, what is supported: column -> text."""
    return [
        {
            "model_type": name,
            "models": family.about.models,
            "positions": family.about.positions,
            "attention": family.about.attention,
            "longest text, in tokens": family.about.max_tokens,
            "align": "yes" if family.decoder else "no",
            "notes": family.about.notes,
        }
        for name, family in FAMILIES.items()
    ]


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
