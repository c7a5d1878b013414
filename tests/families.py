"""Tiny seeded checkpoints of every family, made by transformers, and its eager answers as the oracle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast, T5EncoderModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_BERT_LIKE = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 80,
}
_OFFSET = {**_BERT_LIKE, "max_position_embeddings": 82, "pad_token_id": 1, "type_vocab_size": 1}
_DISTILBERT = {
    "vocab_size": 60,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 80,
}
_MPNET = {key: value for key, value in _OFFSET.items() if key != "type_vocab_size"}
_T5 = {
    "vocab_size": 60,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 60,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 80,
}
_MARIAN = {**_BART, "pad_token_id": 7, "decoder_start_token_id": 7, "activation_function": "swish"}
_OWN_TABLES = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 50}
_DEBERTA = {
    **_BERT_LIKE,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 16,
    "share_att_key": True,
    "layer_norm_eps": 1e-7,
}
_DEBERTA_CONV = {**_DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu", "share_att_key": False}
_ALBERT = {**_BERT_LIKE, "embedding_size": 16}
_ROTARY = {**_BERT_LIKE, "pad_token_id": 0}
_MODERNBERT = {
    **_ROTARY,
    "num_hidden_layers": 4,
    "local_attention": 8,
    **{f"{name}_token_id": number for number, name in enumerate(("bos", "eos", "cls", "sep"), 1)},
}
# How the two were published, before transformers had them.
_PUBLISHED_NOMIC = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "n_embd": 24,
    "n_head": 3,
    "n_inner": 40,
    "n_layer": 2,
    "n_positions": 160,
    "max_trained_positions": 80,
    "layer_norm_epsilon": 1e-12,
    "vocab_size": 60,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "prenorm": False,
    "rotary_scaling_factor": 2,
    "rotary_emb_scale_base": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "causal": False,
    "use_rms_norm": False,
    "scale_attn_weights": True,
    "pad_token_id": 0,
    "parallel_block": False,
    "type_vocab_size": 2,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
}
_PUBLISHED_GTE = {
    **_ROTARY,
    "model_type": "new",
    "type_vocab_size": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 160000,
    "rope_scaling": None,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
}


def _turning(base: float, kind: str = "default", **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **more}}


# Family, and the configs that differ in the fields that matter; `published` stands in for transformers' own config.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT_LIKE),
    "bert, relu, one head": ("bert", {**_BERT_LIKE, "hidden_act": "relu", "num_attention_heads": 1}),
    "bert, gelu_new, three segments": ("bert", {**_BERT_LIKE, "hidden_act": "gelu_new", "type_vocab_size": 3}),
    "roberta": ("roberta", _OFFSET),
    "roberta, padding index 0": ("roberta", {**_OFFSET, "pad_token_id": 0}),
    "roberta, 1e-5, silu": ("roberta", {**_OFFSET, "layer_norm_eps": 1e-5, "hidden_act": "silu"}),
    "xlm-roberta": ("xlm-roberta", _OFFSET),
    "xlm-roberta, one layer": ("xlm-roberta", {**_OFFSET, "num_hidden_layers": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta, padding index 3": ("xlm-roberta", {**_OFFSET, "pad_token_id": 3, "max_position_embeddings": 84}),
    "camembert": ("camembert", _OFFSET),
    "camembert, four heads": ("camembert", {**_OFFSET, "num_attention_heads": 4}),
    "camembert, two segments": ("camembert", {**_OFFSET, "type_vocab_size": 2}),
    "distilbert": ("distilbert", _DISTILBERT),
    "distilbert, sinusoidal": ("distilbert", {**_DISTILBERT, "sinusoidal_pos_embds": True}),
    "distilbert, relu, two heads": ("distilbert", {**_DISTILBERT, "activation": "relu", "n_heads": 2}),
    "electra": ("electra", {**_BERT_LIKE, "embedding_size": 24}),
    "electra, small embeddings": ("electra", {**_BERT_LIKE, "embedding_size": 16}),
    "electra, large embeddings": ("electra", {**_BERT_LIKE, "embedding_size": 32, "hidden_act": "relu"}),
    "mpnet": ("mpnet", _MPNET),
    "mpnet, one layer": ("mpnet", {**_MPNET, "num_hidden_layers": 1}),
    "mpnet, four heads, 1e-5": ("mpnet", {**_MPNET, "num_attention_heads": 4, "layer_norm_eps": 1e-5}),
    "deberta-v2, as v3": ("deberta-v2", _DEBERTA),
    "deberta-v2, convolution, own projections": ("deberta-v2", {**_DEBERTA_CONV, "position_buckets": 8}),
    "deberta-v2, tanh over five tokens, content to position": (
        "deberta-v2",
        {**_DEBERTA_CONV, "conv_kernel_size": 5, "conv_act": "tanh", "conv_groups": 3, "pos_att_type": ["c2p"]},
    ),
    "deberta-v2, position to content, no buckets, small embeddings": (
        "deberta-v2",
        {
            **_DEBERTA,
            "pos_att_type": ["p2c"],
            "position_buckets": -1,
            "max_relative_positions": 20,
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "embedding_size": 16,
        },
    ),
    "deberta-v2, positions in the input, two segments, no terms": (
        "deberta-v2",
        {**_DEBERTA, "pos_att_type": None, "position_biased_input": True, "type_vocab_size": 2},
    ),
    "deberta-v2, no relative positions": (
        "deberta-v2",
        {**_DEBERTA, "relative_attention": False, "position_biased_input": True, "embedding_size": 32},
    ),
    "albert": ("albert", _ALBERT),
    "albert, two groups of three": ("albert", {**_ALBERT, "num_hidden_layers": 6, "num_hidden_groups": 2}),
    "albert, five layers, two groups of two, whole embeddings": (
        "albert",
        {
            **_ALBERT,
            "num_hidden_layers": 5,
            "num_hidden_groups": 2,
            "inner_group_num": 2,
            "embedding_size": 24,
            "hidden_act": "gelu",
        },
    ),
    "modernbert": ("modernbert", _MODERNBERT),
    "modernbert, biases, every second layer global": (
        "modernbert",
        {
            **_MODERNBERT,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "local_attention": 17,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "modernbert, own bases, one layer, silu": (
        "modernbert",
        {
            **_MODERNBERT,
            "num_hidden_layers": 1,
            "hidden_activation": "silu",
            "rope_parameters": {"full_attention": {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 5.0}},
        },
    ),
    "modernbert, long texts": ("modernbert", {**_MODERNBERT, "max_position_embeddings": 2500, "local_attention": 100}),
    "nomic_bert": ("nomic_bert", _ROTARY),
    "nomic_bert, gelu, other head width, base 100": (
        "nomic_bert",
        {
            **_ROTARY,
            "hidden_act": "gelu",
            "head_dim": 6,
            **_turning(100.0),
        },
    ),
    "nomic_bert, three segments, scaled beyond its places": (
        "nomic_bert",
        {
            **_ROTARY,
            "type_vocab_size": 3,
            **_turning(1000.0, "dynamic", factor=2.0),
        },
    ),
    "gte": ("gte", {**_ROTARY, "type_vocab_size": 0}),
    "gte, two segments, silu": ("gte", {**_ROTARY, "type_vocab_size": 2, "hidden_act": "silu", "pad_token_id": 1}),
    "gte, places divided by four": (
        "gte",
        {**_ROTARY, **_turning(10000.0, "linear", factor=4.0)},
    ),
    "nomic_bert, as published": ("nomic_bert", {**_ROTARY, "published": _PUBLISHED_NOMIC}),
    "new": ("new", {**_ROTARY, "type_vocab_size": 0, "published": _PUBLISHED_GTE}),
    "new, two segments, base 500": (
        "new",
        {
            **_ROTARY,
            "type_vocab_size": 2,
            **_turning(500.0),
            "published": {**_PUBLISHED_GTE, "type_vocab_size": 2, "rope_theta": 500},
        },
    ),
    "new, scaled": (
        "new",
        {
            # a base twice as large, and angles less by 2 to the power of 2 / head_dim
            **_ROTARY,
            "type_vocab_size": 0,
            **_turning(1000.0, "linear", factor=2 ** (2 / 8)),
            "published": {**_PUBLISHED_GTE, "rope_theta": 500, "rope_scaling": {"type": "ntk", "factor": 2.0}},
        },
    ),
    "t5, plain": ("t5", _T5),
    "t5, gated, other head width": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "d_kv": 5}),
    "t5, eight buckets to 20": (
        "t5",
        {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "mt5": ("mt5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5, gated silu": ("mt5", {**_T5, "feed_forward_proj": "gated-silu", "num_layers": 1}),
    "mt5, plain": ("mt5", {**_T5, "feed_forward_proj": "relu"}),
    "bart": ("bart", _BART),
    "bart, scaled, relu": ("bart", {**_BART, "scale_embedding": True, "activation_function": "relu"}),
    "bart, one layer, one head": ("bart", {**_BART, "encoder_layers": 1, "encoder_attention_heads": 1}),
    "mbart": ("mbart", _BART),
    "mbart, scaled": ("mbart", {**_BART, "scale_embedding": True}),
    "mbart, relu, four heads": ("mbart", {**_BART, "activation_function": "relu", "encoder_attention_heads": 4}),
    "marian": ("marian", {**_MARIAN, "scale_embedding": True}),
    "marian, plain, odd width": ("marian", {**_MARIAN, "d_model": 27, "decoder_attention_heads": 3}),
    "marian, two tables": ("marian", {**_MARIAN, **_OWN_TABLES, "scale_embedding": True}),
}


def make_model(name: str, *, whole: bool = False) -> Any:
    """Make a case's model with random weights so large that differences show; `whole` with T5's decoder, and heads."""
    family, settings = CASES[name]
    settings = {key: value for key, value in settings.items() if key != "published"}
    config = CONFIG_MAPPING[{"new": "gte"}.get(family, family)](**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    if whole:
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    elif family in ("t5", "mt5"):
        from transformers import MT5EncoderModel

        model = (MT5EncoderModel if family == "mt5" else T5EncoderModel)(config)
    else:
        model = AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                middle = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
                parameter.copy_(middle + torch.randn_like(parameter) * 0.2)
    return model.eval()


def save(name: str, folder: Path, *, whole: bool = False) -> Any:
    """Save a case's checkpoint with a small tokenizer that fits it; gives the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    model = make_model(name, whole=whole)
    model.save_pretrained(folder)
    if published := CASES[name][1].get("published"):
        (folder / "config.json").write_text(json.dumps(published), "utf-8")
    pad = model.config.pad_token_id
    specials = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    words = [word for key, word in specials.items() if key != "pad_token"]
    words += [*"abcdefghijklmnopqrstuvwxyz", *(["the", "old", "man", "sat", "by", "river", "and", "watched", "boats"])]
    words.insert(pad, "<pad>")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    t5 = CASES[name][0] in ("t5", "mt5", "marian")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>" if t5 else "<s> $A </s>",
        pair="$A </s> $B </s>" if t5 else "<s> $A </s> $B </s>",
        special_tokens=[(word, words.index(word)) for word in ("<s>", "</s>")],
    )
    language = {"tgt_lang": "the"} if CASES[name][0] == "mbart" else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials, **language).save_pretrained(folder)
    return model


def padded_batch(model: Any, lengths: tuple[int, ...], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Make random ids and their mask, (batch, seq) int64; no token inside is the padding token."""
    pad = model.config.pad_token_id
    draw = torch.Generator().manual_seed(sum(lengths))
    seq = max(lengths)
    places = torch.arange(seq)
    count = torch.tensor(lengths)[:, None]
    mask = ((places >= seq - count) if left else (places < count)).long()
    ids = torch.randint(pad + 1, model.config.vocab_size, (len(lengths), seq), generator=draw)
    return ids * mask + pad * (1 - mask), mask


def oracle(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """Give transformers' own answer, with all hidden states and attentions; an encoder-decoder's encoder's."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.inference_mode():
        return encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)


def targets(model: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    """Make random labels, (batch, target) int64, padded on the right with -100, which transformers does not read."""
    size = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
    draw = torch.Generator().manual_seed(sum(lengths) + 1)
    labels = torch.randint(0, size, (len(lengths), max(lengths)), generator=draw)
    return labels.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -100)


def run_graphs(artifact: Path, fed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Run an artifact's graphs on the CPU provider; gives outputs, and hidden_states_0, attentions_0 and so on."""
    encode, attention = (
        onnxruntime.InferenceSession(artifact / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encode", "attention")
    )
    fed = {**fed, "state_rows": np.arange(len(fed["input_ids"]))}
    names = [put.name for put in encode.get_outputs()]
    arrays = dict(zip(names, encode.run(names, {put.name: fed[put.name] for put in encode.get_inputs()}), strict=True))
    arrays |= {f"hidden_states_{layer}": state for layer, state in enumerate(arrays.pop("hidden_states"))}
    described = json.loads((artifact / "artifact.json").read_text("utf-8"))["attention_weights"]
    for layer, places in enumerate(described):
        inputs = {"hidden_state": arrays[f"hidden_states_{layer}"], "attention_mask": fed["attention_mask"]}
        for name, place in places.items():
            shape = tuple(place["shape"])
            inputs[name] = np.memmap(artifact / "weights.bin", np.float32, "r", place["offset"], shape)
        arrays[f"attentions_{layer}"] = attention.run(["attention"], inputs)[0]
    return arrays
