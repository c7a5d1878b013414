"""read_config: what it reads from a config.json, and what it refuses, by the field's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint import read_json
from model.config import EncoderConfig
from model.errors import CheckpointError
from model.families import read_config

BERT: dict[str, object] = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 3,
}
SIZES = [name for name in BERT if name not in ("model_type", "hidden_act", "layer_norm_eps", "pad_token_id")]


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in BERT.items() if key != name}


def test_reads_every_field():
    """Each field has the value of the config.json's field of that name, model_type being the family."""
    config = read_config(BERT)
    named = {name: value for name, value in BERT.items() if name not in ("model_type", "layer_norm_eps")}
    assert config == EncoderConfig(family="bert", norm_eps=1e-5, embedding_size=384, head_dim=32, **named)
    assert config.max_tokens == 512


def test_reads_what_transformers_writes(make_bert: Callable[..., Path]):
    """A config.json that transformers saved is read, whatever else it holds."""
    raw = json.loads((make_bert(hidden_act="relu") / "config.json").read_text("utf-8"))
    config = read_config(raw)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (24, 3, 8)
    assert (config.hidden_act, config.vocab_size, config.max_tokens) == ("relu", 41, 40)


def test_defaults_are_those_of_bert():
    """A config.json without layer_norm_eps and pad_token_id, or with null there, gets BERT's: 1e-12 and 0."""
    raw = {name: BERT[name] for name in ("model_type", "hidden_act", *SIZES)}
    for absent in ({}, {"layer_norm_eps": None, "pad_token_id": None}):
        config = read_config(raw | absent)
        assert (config.norm_eps, config.pad_token_id) == (1e-12, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "absolute"),
        ("position_embedding_type", None),
        ("is_decoder", False),
        ("add_cross_attention", False),
        ("quantization_config", None),
        ("pruned_heads", {}),
        ("hidden_dropout_prob", 0.1),
        ("architectures", ["BertModel"]),
        ("layer_norm_eps", 1),
    ],
)
def test_accepts_what_changes_nothing(name: str, value: object):
    """A field that asks for no other computation is accepted."""
    assert read_config(BERT | {name: value}).family == "bert"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("model_type", ["bert"]),
        ("hidden_act", None),
        ("hidden_act", "swiglu"),
        ("position_embedding_type", "relative_key"),
        ("position_embedding_type", "relative_key_query"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("pruned_heads", {"0": [1]}),
        ("layer_norm_eps", "1e-12"),
        ("layer_norm_eps", True),
        ("layer_norm_eps", -1.0),
        ("layer_norm_eps", float("nan")),
        ("layer_norm_eps", float("inf")),
        ("pad_token_id", -1),
        ("pad_token_id", 30522),
    ],
)
def test_refuses_what_it_would_compute_otherwise(name: str, value: object):
    """A field that asks for another computation, or is of no use, is refused with its name and value."""
    with pytest.raises(CheckpointError, match=f"config field {name}") as caught:
        read_config(BERT | {name: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "supported"),
    [
        (
            "model_type",
            "supported families: bert, roberta, .*, mpnet, .*albert, modernbert, .*t5, mt5",
        ),
        ("hidden_act", "supported: gelu, gelu_new, relu, silu"),
    ],
)
def test_refusals_say_what_is_supported(name: str, supported: str):
    """An unknown family or activation is refused with the list of those that are known."""
    with pytest.raises(CheckpointError, match=supported) as caught:
        read_config(BERT | {name: "swiglu"})
    assert "swiglu" in str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_must_be_there(name: str):
    """A missing size is named."""
    with pytest.raises(CheckpointError, match=f"config field {name} must be a whole number, got None"):
        read_config(without(name))


@pytest.mark.parametrize("value", ["12", 12.0, True, None, [12]], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_every_size_must_be_a_whole_number(name: str, value: object):
    """A size of another type is refused with its name and value."""
    with pytest.raises(CheckpointError, match=f"config field {name} must be a whole number") as caught:
        read_config(BERT | {name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", SIZES)
def test_every_size_must_be_positive(name: str, value: int):
    """A size below 1 is refused with its name and value."""
    with pytest.raises(CheckpointError, match=f"config field {name} must be at least 1, got {value}"):
        read_config(BERT | {name: value})


def test_heads_must_divide_the_hidden_size():
    """A hidden size that does not divide into the heads is refused with both fields."""
    with pytest.raises(CheckpointError, match=r"hidden_size=384 is not divisible by num_attention_heads=7"):
        read_config(BERT | {"num_attention_heads": 7})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is missing"),
        (b"{", "is not readable JSON"),
        (b"\xff", "is not readable JSON"),
        (b"[]", "must hold a JSON dict, got list"),
    ],
)
def test_an_unreadable_config(tmp_path: Path, text: bytes | None, reason: str):
    """A config.json that is absent, no JSON or no object is refused with its path."""
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
