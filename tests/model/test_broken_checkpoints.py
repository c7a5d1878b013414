"""A hundred broken checkpoints, drawn by seed over every family: each gives one error that says what is wrong."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import families
from model.checkpoint import load_encoder
from model.errors import CheckpointError
from model.families import FAMILIES
from model.sentence import read_sentence, read_tokenizer

BASES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert, sinusoidal",
    "electra, small embeddings",
    "mpnet",
    "t5, plain",
    "t5, gated, other head width",
    "mt5",
)
# Fields without which nothing can be computed, by the name that the family has for them.
_BERT_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_DISTILBERT_SIZES = ("dim", "n_layers", "n_heads", "hidden_dim")
_T5_SIZES = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
ANY_TYPE = ("12", 12.5, True, [12], {"a": 1})


class Broken:
    """A copy of a checkpoint that is about to be broken."""

    def __init__(self, folder: Path, case: str, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        self.family = families.CASES[case][0]
        self.state = load_file(folder / "model.safetensors")

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes that the family's config.json must have."""
        if self.family == "distilbert":
            return ("vocab_size", "max_position_embeddings", *_DISTILBERT_SIZES)
        return ("vocab_size", *_T5_SIZES) if "t5" in self.family else ("vocab_size", *_BERT_SIZES)

    def tensor(self) -> str:
        """Draw a tensor that the encoder needs."""
        ignored = FAMILIES[self.family].ignored
        return self.draw.choice([name for name in sorted(self.state) if not name.startswith(ignored)])

    def save_state(self) -> None:
        save_file(self.state, self.folder / "model.safetensors")

    def save_config(self, **changed: Any) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.config | changed), "utf-8")


# Each of these breaks one thing and gives what the error must name.


def missing(broken: Broken) -> str:
    name = broken.tensor()
    del broken.state[name]
    broken.save_state()
    return f" {name} "


def renamed(broken: Broken) -> str:
    name = broken.tensor()
    place = broken.draw.randrange(len(name) + 1)
    other = name[:place] + broken.draw.choice("xyz_") + name[place:]
    broken.state[other] = broken.state.pop(name)
    broken.save_state()
    return f" {name} "


def misshapen(broken: Broken) -> str:
    name = broken.tensor()
    tensor = broken.state[name]
    others = [tensor[1:], tensor[None], tensor.flatten()[:-1], tensor.repeat(2, 1)]
    broken.state[name] = broken.draw.choice(others).contiguous()
    broken.save_state()
    return f"misshapen tensor {name} "


def mistyped(broken: Broken) -> str:
    name = broken.tensor()
    dtype = broken.draw.choice([torch.int8, torch.int64, torch.bool, torch.complex64])
    broken.state[name] = broken.state[name].to(dtype)
    broken.save_state()
    return f"mistyped tensor {name} "


def not_a_number(broken: Broken) -> str:
    name = broken.tensor()
    flat = broken.state[name].flatten().clone()
    flat[broken.draw.randrange(len(flat))] = broken.draw.choice([torch.nan, torch.inf, -torch.inf])
    broken.state[name] = flat.view(broken.state[name].shape)
    broken.save_state()
    return f"broken tensor {name} "


def truncated_weights(broken: Broken) -> str:
    path = broken.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: broken.draw.randrange(len(content))])
    return "model.safetensors"


def absent_weights(broken: Broken) -> str:
    path = broken.folder / "model.safetensors"
    path.unlink()
    if broken.draw.random() < 0.5:
        return "holds no weights"
    shard = "model-00001-of-00002.safetensors"
    index = {"weight_map": dict.fromkeys(broken.state, shard)}
    (broken.folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return shard


def absent_field(broken: Broken) -> str:
    field = broken.draw.choice([*broken.sizes, "model_type"])
    del broken.config[field]
    broken.save_config()
    return f"config field {field} "


def field_of_another_type(broken: Broken) -> str:
    field = broken.draw.choice([*broken.sizes, "model_type", "pad_token_id"])
    broken.save_config(**{field: broken.draw.choice(ANY_TYPE)})
    return f"config field {field}"


def field_out_of_range(broken: Broken) -> str:
    field = broken.draw.choice(broken.sizes)
    broken.save_config(**{field: broken.draw.choice([0, -1, -7])})
    return f"config field {field}"


def contradictory_size(broken: Broken) -> str:
    field = broken.draw.choice(broken.sizes)
    if field in ("num_attention_heads", "n_heads"):  # a divisor of the hidden size would change no tensor
        broken.save_config(**{field: broken.draw.choice([5, 7])})
        return f"is not divisible by {field}"
    broken.save_config(**{field: broken.config[field] + broken.draw.choice([-1, 1, 2])})
    return f"config field {field}=" if field in ("hidden_size", "dim") else " tensor "


def another_computation(broken: Broken) -> str:
    asked: list[tuple[str, Any]] = [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("pruned_heads", {"0": [1]}),
        ("model_type", "gpt2"),
        ("pad_token_id", 1000),
        ("pad_token_id", -1),
    ]
    epsilon = "layer_norm_epsilon" if "t5" in broken.family else "layer_norm_eps"
    asked += [(epsilon, bad) for bad in (-1.0, float("nan"), "1e-5", [1e-5]) if broken.family != "distilbert"]
    activation = {"distilbert": "activation", "t5": "feed_forward_proj", "mt5": "feed_forward_proj"}
    asked += [(activation.get(broken.family, "hidden_act"), bad) for bad in ("swiglu", 7, ["gelu"], "gated-mish")]
    field, value = broken.draw.choice(asked)
    broken.save_config(**{field: value})
    return f"config field {field}"


def no_tokenizer(broken: Broken) -> str:
    for path in broken.folder.glob("*token*.json"):
        path.unlink()
    return f"{broken.folder} has no tokenizer"


def large_tokenizer(broken: Broken) -> str:
    path = str(broken.folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    size = broken.config["vocab_size"] + broken.draw.randrange(1, 5)
    tokenizer.add_tokens([f"<new{number}>" for number in range(size - tokenizer.get_vocab_size())])
    tokenizer.save(path)
    return f"has ids up to {size - 1}, config field vocab_size"


def truncated_json(broken: Broken) -> str:
    name = broken.draw.choice(["config.json", "tokenizer.json", "tokenizer_config.json"])
    content = (broken.folder / name).read_bytes().rstrip()
    (broken.folder / name).write_bytes(content[: broken.draw.randrange(len(content))])
    return name


def broken_modules(broken: Broken) -> str:
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    name, modules[1:] = broken.draw.choice(
        [
            ("1_Pooling/config.json is missing", modules[1:]),
            ("the module LSTM", [{"path": "1_LSTM", "type": "sentence_transformers.models.LSTM"}]),
            ("modules.json must list", [{"path": 1, "type": "sentence_transformers.models.Pooling"}]),
            ("modules.json must list", []),
        ]
    )
    (broken.folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    return name


KINDS: tuple[Callable[[Broken], str], ...] = (
    missing,
    renamed,
    misshapen,
    mistyped,
    not_a_number,
    truncated_weights,
    absent_weights,
    absent_field,
    field_of_another_type,
    field_out_of_range,
    contradictory_size,
    another_computation,
    no_tokenizer,
    large_tokenizer,
    truncated_json,
    broken_modules,
    missing,
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give a whole checkpoint of every family, each loaded once without complaint."""
    folders = {case: tmp_path_factory.mktemp("base") for case in BASES}
    for case, folder in folders.items():
        families.save(case, folder)
        load(folder)
    return folders


def load(folder: Path) -> None:
    """Read a folder in the order in which an export reads it."""
    encoder = load_encoder(folder)
    read_sentence(folder, encoder.config)
    read_tokenizer(folder, encoder.config)


# 17 kinds and 10 bases: no pair of them comes twice.
@pytest.mark.parametrize("number", range(100), ids=lambda n: f"{n}-{KINDS[n % 17].__name__}-{BASES[n % 10]}")
def test_a_broken_checkpoint(bases: dict[str, Path], tmp_path: Path, number: int):
    """What is broken is named in a single CheckpointError of one line, whatever the family."""
    case = BASES[number % 10]
    folder = Path(shutil.copytree(bases[case], tmp_path / "broken"))
    named = KINDS[number % 17](Broken(folder, case, random.Random(number)))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert named in message
    assert len(message.splitlines()) == 1
