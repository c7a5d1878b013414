"""Loading: every form of a checkpoint gives the same numbers, and what is wrong is named at once."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertForMaskedLM

from model.checkpoint import load_encoder, rename
from model.errors import CheckpointError
from model.families import FAMILIES

QUERY = "encoder.layer.1.attention.self.query.weight"
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(make_bert: Callable[..., Path]) -> Path:
    """Give a checkpoint with one safetensors file."""
    return make_bert()


@pytest.fixture(scope="module")
def state(plain: Path) -> State:
    """Give the plain checkpoint's tensors, pooler included."""
    return load_file(plain / "model.safetensors")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Give a copy of the plain checkpoint without its weights."""
    copied = Path(shutil.copytree(plain, tmp_path / "checkpoint"))
    (copied / "model.safetensors").unlink()
    return copied


def save_shards(folder: Path, state: State, save: Callable[[State, Path], Any], single: str) -> list[Path]:
    """Save a state in three shards with an index."""
    stem, suffix = single.split(".")
    names, weight_map = sorted(state), {}
    paths = [folder / f"{stem}-0000{n + 1}-of-00003.{suffix}" for n in range(3)]
    for n, path in enumerate(paths):
        save({name: state[name] for name in names[n::3]}, path)
        weight_map |= dict.fromkeys(names[n::3], path.name)
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return paths


def assert_same(folder: Path, state: State) -> None:
    """Hold the loaded encoder's every tensor against the state's, to the bit."""
    encoder = load_encoder(folder)
    ours = encoder.state_dict()
    expected = {
        rename(name, FAMILIES["bert"])[0]: tensor for name, tensor in state.items() if not name.startswith("pooler.")
    }
    assert set(ours) == set(expected)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].float()), name
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_safetensors(plain: Path, state: State):
    """One safetensors file is loaded, its pooler left alone."""
    assert "pooler.dense.weight" in state
    assert_same(plain, state)


@pytest.mark.parametrize("zipped", [True, False])
def test_bin(folder: Path, state: State, zipped: bool):
    """One `.bin` file is loaded, of torch's zip format and of the older one."""
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_same(folder, state)


def test_sharded_safetensors(make_bert: Callable[..., Path], state: State):
    """The shards that transformers writes are loaded as one."""
    sharded = make_bert(max_shard_size="6KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    assert not (sharded / "model.safetensors").exists()
    assert_same(sharded, state)


@pytest.mark.parametrize(("save", "single"), [(torch.save, "pytorch_model.bin"), (save_file, "model.safetensors")])
def test_shards_with_an_index(folder: Path, state: State, save: Callable[[State, Path], Any], single: str):
    """Shards are found by their index."""
    save_shards(folder, state, save, single)
    assert_same(folder, state)


def test_safetensors_come_first(plain: Path, state: State, tmp_path: Path):
    """Where both forms are, safetensors are read and the pickle is not even opened."""
    folder = shutil.copytree(plain, tmp_path / "both")
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert_same(folder, state)


def test_a_head_is_left_alone(folder: Path, state: State):
    """A checkpoint with a task head keeps its encoder under `bert.`; only that is loaded."""
    config = BertForMaskedLM.config_class.from_pretrained(folder)
    model = BertForMaskedLM(config)
    model.bert.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    assert f"bert.{QUERY}" in names
    assert any(name.startswith("cls.") for name in names)
    assert_same(folder, state)


def test_old_names_of_layer_norm(folder: Path, state: State):
    """LayerNorm's weight and bias may be called gamma and beta, and position_ids may be there."""
    old = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t for name, t in state.items()}
    assert "embeddings.LayerNorm.gamma" in old
    save_file(old | {"embeddings.position_ids": torch.arange(40)[None]}, folder / "model.safetensors")
    assert_same(folder, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_half_precision_becomes_float32(folder: Path, state: State, dtype: torch.dtype):
    """Half-precision weights are loaded as the same numbers in float32."""
    halved = {name: tensor.to(dtype) for name, tensor in state.items()}
    save_file(halved, folder / "model.safetensors")
    assert_same(folder, halved)


def test_all_that_is_wrong_is_in_one_error(folder: Path, state: State):
    """Missing, unexpected, misshapen, integer and broken tensors are all named, each once, in one error."""
    broken = dict(state)
    del broken["embeddings.LayerNorm.bias"]
    broken["encoder.layer.2.output.dense.bias"] = torch.zeros(24)  # the config has layers 0 and 1
    broken["adapter.weight"] = torch.zeros(2)
    broken[QUERY] = torch.zeros(24, 23)
    broken["encoder.layer.0.intermediate.dense.bias"] = torch.zeros(40, dtype=torch.int64)
    broken["encoder.layer.0.output.dense.bias"] = torch.full((24,), torch.nan)
    broken["encoder.layer.1.output.dense.bias"] = torch.full((24,), torch.inf)
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_encoder(folder)
    head, _, listing = str(caught.value).partition(": ")
    assert head == f"{folder} does not fit its config.json"
    assert set(listing.split("; ")) == {
        "missing tensor embeddings.LayerNorm.bias (24,)",
        "unexpected tensor encoder.layer.2.output.dense.bias (24,)",
        "unexpected tensor adapter.weight (2,)",
        f"misshapen tensor {QUERY} (24, 23), expected (24, 24)",
        "mistyped tensor encoder.layer.0.intermediate.dense.bias int64, expected floating point",
        "broken tensor encoder.layer.0.output.dense.bias with NaN or infinity",
        "broken tensor encoder.layer.1.output.dense.bias with NaN or infinity",
    }


def test_a_tensor_under_two_names(folder: Path, state: State):
    """A weight that is there under its old and its new name is refused, since it is not clear which one counts."""
    save_file(state | {"embeddings.LayerNorm.gamma": torch.ones(24)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"duplicate tensor embeddings\.LayerNorm\.(gamma|weight) \(24,\)"):
        load_encoder(folder)


def test_numbers_beyond_float32(folder: Path, state: State):
    """A float64 weight that float32 cannot hold is refused by name."""
    save_file(state | {QUERY: torch.full((24, 24), 1e300, dtype=torch.float64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"broken tensor {QUERY} with NaN or infinity"):
        load_encoder(folder)


def test_a_sparse_tensor(folder: Path, state: State):
    """A weight that is not stored in full is refused by name."""
    torch.save(state | {QUERY: state[QUERY].to_sparse()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"mistyped tensor {QUERY} sparse_coo, expected dense"):
        load_encoder(folder)


def test_what_has_no_name_is_left_alone(folder: Path, state: State):
    """Entries of a `.bin` file that are no named tensors change nothing."""
    torch.save(state | {1: torch.zeros(2), "epoch": 3}, folder / "pytorch_model.bin")
    assert_same(folder, state)


def test_a_long_list_of_faults_is_cut(folder: Path, state: State):
    """Of many faults the first are named and the rest counted."""
    save_file({"embeddings.LayerNorm.bias": state["embeddings.LayerNorm.bias"]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensor .*; and 24 more$"):
        load_encoder(folder)


def test_missing_names_carry_the_prefix(folder: Path, state: State):
    """A missing tensor is named as the checkpoint would name it."""
    prefixed = {f"bert.{name}": tensor for name, tensor in state.items() if name != QUERY}
    save_file(prefixed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensor bert.{QUERY}"):
        load_encoder(folder)


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_truncated_safetensors(plain: Path, folder: Path, kept: int):
    """A safetensors file that was cut anywhere is refused by its name."""
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable weights file"):
        load_encoder(folder)


@pytest.mark.parametrize("kept", [0, 100, -1000])
def test_truncated_bin(folder: Path, state: State, kept: int):
    """A `.bin` file that was cut is refused by its name."""
    path = folder / "pytorch_model.bin"
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a readable weights file"):
        load_encoder(folder)


class Bomb:
    """Creates a file when it is unpickled by a reader that runs what a pickle says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_code_in_a_pickle_is_refused(folder: Path, state: State, write: Callable[[Any, Path], Any], tmp_path: Path):
    """A pickle with code in it is refused, and nothing of it is run."""
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(mark)))  # noqa: S301 - shows that a reader that trusts the pickle runs it
    mark.unlink()
    write(state | {"bomb": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a readable weights file"):
        load_encoder(folder)
    assert not mark.exists()


def test_a_bin_must_hold_named_tensors(folder: Path):
    """A `.bin` file that holds something else says what it holds."""
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin must hold named tensors, got list"):
        load_encoder(folder)


@pytest.mark.parametrize("outside", ["../{}", "sub/{}", "{folder}/../{}", "..", ""])
def test_shards_outside_the_folder_are_refused(folder: Path, state: State, outside: str):
    """An index may not name a file beyond its own folder, even where there is one."""
    shard = save_shards(folder, state, save_file, "model.safetensors")[0]
    (folder / "sub").mkdir()
    for place in (folder.parent, folder / "sub"):
        shutil.copy(shard, place)
    index = folder / "model.safetensors.index.json"
    name = outside.format(shard.name, folder=folder)
    index.write_text(index.read_text("utf-8").replace(shard.name, name), "utf-8")
    with pytest.raises(CheckpointError, match="which is not in the folder") as caught:
        load_encoder(folder)
    assert repr(name) in str(caught.value)


def test_an_absent_shard_is_named(folder: Path, state: State):
    """A shard that the index names and that is not there is named."""
    save_shards(folder, state, save_file, "model.safetensors")[1].unlink()
    with pytest.raises(CheckpointError, match=r"names the shard 'model-00002-of-00003\.safetensors'"):
        load_encoder(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_without_a_map_is_refused(folder: Path, index: dict[str, object]):
    """An index must map tensors to file names."""
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_encoder(folder)


def test_no_weights(folder: Path):
    """A folder without weights says which files were looked for."""
    with pytest.raises(CheckpointError, match=r"holds no weights; expected one of model\.safetensors, pytorch_model"):
        load_encoder(folder)
