"""Fields, sizes and shapes of no use: each gets one clear refusal that names it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import families
from model.attention import KeyValueCache, MultiHeadAttention, scaled_dot_product_attention
from model.checkpoint import load_encoder, read_json
from model.errors import CheckpointError
from model.families import read_config
from model.head import read_dense
from model.sentence import read_sentence, read_tokenizer


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("bert", "hidden_act", "swiglu"),
        ("distilbert", "activation", "swiglu"),
        ("t5, plain", "feed_forward_proj", "swiglu"),
        ("t5, plain", "feed_forward_proj", "gated-swiglu"),
        ("t5, plain", "feed_forward_proj", "a-b-relu"),
        ("t5, plain", "feed_forward_proj", None),
        ("bert", "hidden_size", 0),
        ("bert", "hidden_size", -24),
        ("bert", "num_attention_heads", 0),
        ("electra", "embedding_size", 0),
        ("distilbert", "dim", 0),
        ("distilbert", "n_heads", 0),
        ("distilbert", "n_layers", 0),
        ("distilbert", "hidden_dim", 0),
        ("t5, plain", "d_kv", 0),
        ("t5, plain", "d_ff", -1),
        ("t5, plain", "d_model", 0),
        ("t5, plain", "layer_norm_epsilon", -1.0),
        ("bert", "layer_norm_eps", 10**400),
        ("t5, plain", "relative_attention_num_buckets", -32),
        ("t5, plain", "relative_attention_num_buckets", 0),
        ("t5, plain", "relative_attention_num_buckets", 2),
        ("t5, plain", "relative_attention_max_distance", 0),
        ("t5, plain", "relative_attention_max_distance", 8),
        ("bert", "num_hidden_layers", 10**9),
        ("albert", "num_hidden_groups", 3),
        ("albert", "num_hidden_groups", 0),
        ("albert", "inner_group_num", "2"),
        ("albert", "embedding_size", 0),
        ("modernbert", "local_attention", 1),
        ("modernbert", "norm_bias", 1),
        ("modernbert", "attention_bias", "false"),
        ("modernbert", "mlp_bias", []),
        ("modernbert", "hidden_activation", "swiglu"),
        ("modernbert", "layer_types", ["full_attention"]),
        ("modernbert", "layer_types", ["full_attention", "sliding_attention", "linear_attention", "full_attention"]),
        ("modernbert", "global_attn_every_n_layers", 2),
        ("modernbert", "local_rope_theta", None),
        ("modernbert", "rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 4.0}}),
        ("modernbert", "rope_parameters", {"sliding_attention": {"rope_theta": 0.0}}),
        ("modernbert", "rope_parameters", {"sliding_attention": 10000.0}),
        ("modernbert", "rope_parameters", 10000.0),
        ("modernbert", "rope_scaling", {"rope_type": "linear", "factor": -2.0}),
        ("modernbert", "max_position_embeddings", None),
        ("modernbert", "position_embedding_type", "relative_key"),
        ("nomic_bert", "rope_parameters", {"rope_type": "llama3", "rope_theta": 1000.0}),
        ("nomic_bert", "rope_parameters", {"rope_type": "linear", "rope_theta": 1000.0}),
        ("nomic_bert", "rope_parameters", {"rope_theta": float("inf")}),
        ("nomic_bert", "partial_rotary_factor", 0.5),
        ("nomic_bert", "type_vocab_size", -1),
        ("nomic_bert", "head_dim", 0),
        ("nomic_bert, as published", "activation_function", "gelu"),
        ("nomic_bert, as published", "prenorm", True),
        ("nomic_bert, as published", "qkv_proj_bias", True),
        ("nomic_bert, as published", "rotary_emb_fraction", 0.5),
        ("nomic_bert, as published", "rotary_emb_fraction", 0.0),
        ("nomic_bert, as published", "rotary_emb_interleaved", True),
        ("nomic_bert, as published", "use_rms_norm", True),
        ("nomic_bert, as published", "causal", True),
        ("nomic_bert, as published", "max_trained_positions", None),
        ("nomic_bert, as published", "moe_every_n_layers", 2),
        ("nomic_bert, as published", "n_head", 0),
        ("new", "position_embedding_type", "absolute"),
        ("new", "layer_norm_type", "rms_norm"),
        ("new", "logn_attention_scale", True),
        ("new", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("new", "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.8}),
        ("new", "rope_scaling", {"type": "ntk"}),
        ("new", "rope_scaling", "ntk"),
        ("gte", "rope_parameters", {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1000.0}),
        ("gte", "hidden_act", "swiglu"),
    ],
)
def test_the_familys_own_field_is_named(tmp_path: Path, case: str, field: str, value: object):
    """A field of no use is refused under the name that it has in the checkpoint."""
    families.save(case, tmp_path)
    change(tmp_path, **{field: value})
    with pytest.raises(CheckpointError, match=rf"config field .*{field}"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("case", ["nomic_bert, as published", "new"])
def test_published_code_of_others(tmp_path: Path, case: str):
    """A config that names code which is not its family's published one is refused, whatever else it says."""
    families.save(case, tmp_path)
    change(tmp_path, auto_map={"AutoModel": "somebody/else--modeling_hf_nomic_bert.NomicBertModel"})
    with pytest.raises(CheckpointError, match="auto_map"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(("scaling", "tokens"), [(2, 80), (None, 160)])
def test_places_that_were_trained(tmp_path: Path, scaling: int | None, tokens: int):
    """A published NomicBERT that would turn long texts otherwise takes texts of its trained places alone."""
    families.save("nomic_bert, as published", tmp_path)
    change(tmp_path, rotary_scaling_factor=scaling)
    assert load_encoder(tmp_path).config.max_tokens == tokens


@pytest.mark.parametrize("size", [10**12, 10**19, 10**40])
def test_a_size_beyond_memory(tmp_path: Path, size: int):
    """A vocabulary that no memory holds is refused before memory is asked for."""
    families.save("bert", tmp_path)
    change(tmp_path, vocab_size=size)
    with pytest.raises(CheckpointError, match=r"config\.json (asks for|has sizes)"):
        load_encoder(tmp_path)


def test_json_nested_too_deep(tmp_path: Path):
    """JSON nested deeper than the parser goes is refused as unreadable."""
    (tmp_path / "config.json").write_text("[" * 200_000, "utf-8")
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        read_json(tmp_path / "config.json")


def test_a_gated_tensor_is_named_as_it_is_called(tmp_path: Path):
    """A missing wi_0 of a gated T5 is named wi_0."""
    families.save("mt5", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"
    del state[name]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensor .*{name}"):
        load_encoder(tmp_path)


def test_a_template_beyond_the_vocabulary(tmp_path: Path):
    """A tokenizer whose template adds an id that the embedding has no row for is refused."""
    families.save("bert", tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["post_processor"]["special_tokens"]["</s>"]["ids"] = [999]
    path.write_text(json.dumps(raw), "utf-8")
    assert Tokenizer.from_file(str(path)).encode("a").ids[-1] == 999
    with pytest.raises(CheckpointError, match="ids up to 999, config field vocab_size"):
        read_tokenizer(tmp_path, read_config(read_json(tmp_path / "config.json")))


def test_a_module_before_the_pooling_is_named(tmp_path: Path):
    """A Dense module on token embeddings, before the pooling, is named."""
    families.save("bert", tmp_path)
    modules = [
        {"path": p, "type": f"sentence_transformers.models.{p or 'Transformer'}"} for p in ("", "Dense", "Pooling")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    with pytest.raises(CheckpointError, match="Dense"):
        read_sentence(tmp_path, read_config(read_json(tmp_path / "config.json")))


@pytest.mark.parametrize(
    "changed",
    [
        {"module_input_name": ["sentence_embedding"]},
        {"out_features": -8},
        {"out_features": 10**13},
        {"out_features": 10**30},
        {"activation_function": "somebody.ReLU"},
    ],
    ids=str,
)
def test_a_dense_module_of_another_kind(tmp_path: Path, changed: dict[str, object]):
    """A Dense module with a field of another kind, or somebody's own activation, is refused.

    sentence-transformers takes Tanh for an activation that is not torch's own.
    """
    config = {"in_features": 4, "out_features": 8, "bias": True, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({"linear.weight": torch.zeros(8, 4), "linear.bias": torch.zeros(8)}, tmp_path / "model.safetensors")
    read_dense(tmp_path, 4)
    change(tmp_path, **changed)
    with pytest.raises(CheckpointError):
        read_dense(tmp_path, 4)


CACHE = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize(
    ("hidden", "options", "named"),
    [
        ((2, 4, 25), {}, r"hidden must be \(batch, seq, hidden=24\), got \(2, 4, 25\)"),
        ((4, 24), {}, r"hidden must be \(batch, seq, hidden=24\), got \(4, 24\)"),
        ((2, 4, 24), {"key_value_states": torch.zeros(2, 4, 23)}, r"key_value_states must be .* got \(2, 4, 23\)"),
        ((2, 4, 24), {"head_mask": torch.ones(2)}, r"head_mask must be \(heads=3,\), got \(2,\)"),
        ((1, 4, 24), {"cache": KeyValueCache(CACHE, CACHE)}, "cache's key must be .*batch=1, heads=3"),
        ((2, 4, 24), {"cache": KeyValueCache(CACHE, CACHE[:, :2])}, "cache's value must be .*heads=3"),
        ((2, 4, 24), {"mask": torch.ones(2, 1, 1, 4, dtype=torch.int64)}, "mask must be boolean .* got torch.int64"),
    ],
)
def test_the_modules_inputs(hidden: tuple[int, ...], options: dict[str, Any], named: str):
    """Inputs of other shapes, and masks that are neither boolean nor additive, are refused by name and axes."""
    with pytest.raises(ValueError, match=named):
        MultiHeadAttention(24, 3)(torch.zeros(hidden), **options)


def test_a_head_mask_that_does_not_broadcast():
    """A head mask that does not broadcast to the weights is refused by the axis."""
    with pytest.raises(ValueError, match="head_mask has 2 on the heads axis, the scores have 3"):
        scaled_dot_product_attention(*(torch.zeros(1, 3, 4, 5) for _ in range(3)), head_mask=torch.ones(2, 1, 1))
