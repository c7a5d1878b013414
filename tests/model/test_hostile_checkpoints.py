"""Checkpoints of somebody who means ill: refused by name, none of their code run, nothing set aside or written."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.errors import CheckpointError
from model.export import export
from tests.model.hostile import change, load, write_modules

ROOT = Path(__file__).parents[2]
EMBEDDING = "embeddings.word_embeddings.weight"


def as_pickle(folder: Path) -> dict[str, torch.Tensor]:
    """Turn a checkpoint's weights into a pickle that is whole."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return state


class Touch:
    """What runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


# ---------------------------------------------------------------- code


def test_the_trap_works(tmp_path: Path) -> None:
    """What the tests below put into checkpoints does run where somebody unpickles it."""
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))  # noqa: S301 - the point of it
    assert (tmp_path / "ran").exists()


def _in_weights(folder: Path, trap: Touch) -> None:
    torch.save({**as_pickle(folder), "more": trap}, folder / "pytorch_model.bin")


def _in_old_weights(folder: Path, trap: Touch) -> None:
    state = as_pickle(folder)
    torch.save({**state, "more": trap}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _in_bare_pickle(folder: Path, trap: Touch) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(trap))


def _in_a_shard(folder: Path, trap: Touch) -> None:
    state = as_pickle(folder)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"more": trap}, folder / "pytorch_model-00002-of-00002.bin")
    places = dict.fromkeys(state, "pytorch_model-00001-of-00002.bin") | {"more": "pytorch_model-00002-of-00002.bin"}
    change(folder / "pytorch_model.bin.index.json", weight_map=places)


def _in_a_dense_module(folder: Path, trap: Touch) -> None:
    write_modules(folder)
    torch.save({"linear.weight": torch.zeros(24, 24), "more": trap}, folder / "2_Dense/pytorch_model.bin")


@pytest.mark.parametrize("hide", [_in_weights, _in_old_weights, _in_bare_pickle, _in_a_shard, _in_a_dense_module])
def test_code_in_pickles(folder: Path, tmp_path: Path, hide: Callable[[Path, Touch], None]) -> None:
    """A pickle that would run something is refused by its file's name, and it does not run."""
    hide(folder, Touch(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"pytorch_model.*bin is not a readable weights file"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def _named_by_the_config(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoModel": "trap.Trap", "AutoConfig": "trap.Trap"})


def _trusted_by_the_config(folder: Path) -> None:
    change(folder / "config.json", trust_remote_code=True)


def _named_by_the_tokenizer(folder: Path) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["trap.Trap", None]})


def _slow(folder: Path, **settings: object) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _named_by_a_slow_tokenizer(folder: Path) -> None:
    _slow(folder, auto_map={"AutoTokenizer": ["trap.Trap", None]}, tokenizer_class="BertTokenizer")


def _class_of_another_kind(folder: Path) -> None:
    _slow(folder, tokenizer_class="AutoModel")


def _module_of_its_own(folder: Path) -> None:
    write_modules(folder, {"path": "2_Trap", "type": "trap.Trap"})


def _settings_for_code(folder: Path) -> None:
    change(folder / "sentence_bert_config.json", model_args={"trust_remote_code": True})


@pytest.mark.parametrize(
    ("hide", "message"),
    [
        (_named_by_the_config, r"/config\.json names code of the checkpoint's own \(auto_map\), which is never run"),
        (_trusted_by_the_config, r"/config\.json names code of the checkpoint's own"),
        (_named_by_the_tokenizer, r"tokenizer_config\.json names code of the checkpoint's own"),
        (_named_by_a_slow_tokenizer, r"tokenizer_config\.json names code of the checkpoint's own"),
        (_class_of_another_kind, "names the tokenizer_class 'AutoModel'"),
        (_module_of_its_own, r"has the module trap\.Trap, which is not supported"),
        (_settings_for_code, "sets model_args, which is not supported"),
    ],
)
def test_code_beside_the_weights(folder: Path, tmp_path: Path, hide: Callable[[Path], None], message: str) -> None:
    """A checkpoint that brings code of its own is refused, and the code is not imported."""
    hide(folder)
    (folder / "trap.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n", "utf-8")
    with pytest.raises(CheckpointError, match=message):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_pickles_that_nobody_asked_for(folder: Path, tmp_path: Path) -> None:
    """Pickles beside safetensors, optimizers' and trainers' among them, are not opened: the export succeeds."""
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    export(str(folder), tmp_path / "made" / "artifact", report=lambda _line: None)
    assert not (tmp_path / "ran").exists()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "made"]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["artifact"]


# ---------------------------------------------------------------- sizes


def _packed(folder: Path) -> None:
    as_pickle(folder)
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr("archive/bomb", b"\0" * (64 << 20))


def _overlapping(folder: Path) -> None:
    as_pickle(folder)
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        for _ in range(100):
            archive.filelist.append(largest)
        archive._didModify = True


def _hollow(folder: Path) -> None:
    state = as_pickle(folder)
    state[EMBEDDING] = torch.zeros(1).expand(state[EMBEDDING].shape)
    torch.save(state, folder / "pytorch_model.bin")


def _nowhere(folder: Path) -> None:
    state = as_pickle(folder)
    state[EMBEDDING] = state[EMBEDDING].to("meta")
    torch.save(state, folder / "pytorch_model.bin")


def _one_for_many(folder: Path) -> None:
    write_modules(folder)
    one = torch.zeros(24, 24)
    state = {f"linear.{number}": one for number in range(1000)}
    torch.save(state, folder / "2_Dense/pytorch_model.bin")


def _sizes(**sizes: int) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **sizes)


def _sparse_file(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 256 << 20)  # takes no room on the disk


def _header(length: int, text: bytes) -> Callable[[Path], object]:
    """Write a head of safetensors that declares its own length."""
    return lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text)


def _tensors(**entries: tuple[list[int], int, int]) -> Callable[[Path], object]:
    described = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for name, (shape, start, end) in entries.items()
    }
    text = json.dumps(described).encode()
    return _header(len(text), text + b"\0" * 64)


NOT_READABLE = r"model\.safetensors is not a readable weights file"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_packed, r"pytorch_model\.bin is packed, or holds less than it says"),
        (_overlapping, r"pytorch_model\.bin is packed, or holds less than it says"),
        (_hollow, rf"hollow tensor {EMBEDDING} .* over 4 bytes"),
        (_nowhere, rf"mistyped tensor {EMBEDDING} Tensor on meta"),
        (_one_for_many, "2_Dense has tensors of more bytes than its files"),
        (_sizes(vocab_size=10**9), r"config\.json asks for \d+ numbers, but model\.safetensors has \d+ bytes"),
        (_sizes(hidden_size=3 * 10**8), "asks for"),
        (_sizes(intermediate_size=10**12), "asks for"),
        (_sizes(max_position_embeddings=10**12), "asks for"),
        (_sizes(hidden_size=3 * 2**60), "has sizes that no tensor can have"),
        (_sizes(num_hidden_layers=2**40), "num_hidden_layers must be at most 1000"),
        (_sparse_file("config.json"), r"config\.json has 268435456 bytes, at most"),
        (_sparse_file("tokenizer.json"), r"tokenizer\.json has 268435456 bytes, at most"),
        (_header(1 << 62, b"{}"), NOT_READABLE),
        (_header(99 << 20, b"{}"), NOT_READABLE),
        (_header(100_000, b"[" * 100_000), NOT_READABLE),
        (_tensors(a=([1 << 31, 1 << 31], 0, 64)), NOT_READABLE),
        (_tensors(a=([16], 0, 64), b=([16], 0, 64)), NOT_READABLE),
        (_tensors(a=([1 << 40], 0, 1 << 42)), NOT_READABLE),
    ],
)
def test_what_declares_more_than_it_holds(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    """Sizes for which there are no bytes are refused before anything is set aside for them."""
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


LOAD_ALL = """
import sys
from pathlib import Path
from model.checkpoint import load_encoder
from model.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        load_encoder(Path(name))
    except CheckpointError as error:
        print(error)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""


def test_bombs_within_bounded_memory(folder: Path, tmp_path: Path) -> None:
    """What declares terabytes is refused by a process that may have what torch takes by itself, and little more."""
    spoilt = []
    for number, spoil in enumerate((_sizes(vocab_size=10**11), _packed, _hollow, _sparse_file("config.json"))):
        spoilt.append(shutil.copytree(folder, tmp_path / f"bomb{number}"))
        spoil(spoilt[-1])
    printed = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *map(str, spoilt)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    *refusals, largest = printed.splitlines()
    assert len(refusals) == len(spoilt)
    assert int(largest) <= 1 << 20  # KiB
