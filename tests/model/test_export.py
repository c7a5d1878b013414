"""The artifact: what is in it, that it is whole or absent, and that a change in it is noticed."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from model.checkpoint import load_encoder
from model.errors import CheckpointError, ExportError
from model.export import MAX_DIFFERENCE, check, export
from model.graphs import EncoderGraph
from model.head import SentenceHead
from service.artifact import open_artifact
from service.errors import ArtifactError

ROOT = Path(__file__).parents[2]
FILES = {
    *("artifact.json", "tokenizer.json", "weights.bin"),
    *("encode.onnx", "attention.onnx"),
}


@pytest.fixture(scope="module")
def checkpoint(make_bert: Callable[..., Path]) -> Path:
    """Give a tiny checkpoint."""
    return make_bert()


@pytest.fixture
def copied(tiny_artifact: Path, tmp_path: Path) -> Path:
    """Give a copy of the tiny artifact, to be changed."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "copied"))


def quiet(checkpoint: Path, output: Path) -> Path:
    return export(str(checkpoint), output, report=lambda _line: None)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read_description(folder: Path) -> dict[str, object]:
    return json.loads((folder / "artifact.json").read_text("utf-8"))


# ---------------------------------------------------------------- what is in it


def test_the_documented_files_and_no_other(tiny_artifact: Path, minilm_artifact: Path):
    """An artifact holds the six files, whoever may read them, and nothing is left beside it."""
    for folder in (tiny_artifact, minilm_artifact):
        assert names_in(folder) == FILES
        assert names_in(folder.parent) == {folder.name}
        assert folder.stat().st_mode & 0o777 == 0o755


def test_description_of_minilm(minilm: Path, minilm_artifact: Path):
    """artifact.json says what the service must know of the model, and how exact the graphs are."""
    described = read_description(minilm_artifact)
    difference = described.pop("parity")["float32_max_difference"]
    assert 0 < difference <= MAX_DIFFERENCE
    assert described.pop("exported_by")["torch"] == torch.__version__
    assert set(described.pop("files")) == FILES - {"artifact.json"}
    assert len(described.pop("attention_weights")) == 6
    assert described == {
        "format_version": 5,
        "model_id": minilm.name,
        "revision": None,
        "family": "bert",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "head_dim": 32,
        "vocab_size": 30522,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "num_parameters": 22565376,
        "max_tokens": 256,
        "pooling": "mean",
        "normalize": True,
        "prompts": {},
        "default_prompt_name": None,
        "pool_prompt": True,
        "inputs": ["input_ids", "attention_mask", "token_type_ids", "state_rows"],
        "poolings": ["cls", "mean", "max", "last"],
        "sentence_size": 384,
        "decoder": None,
    }


def test_digests(tiny_artifact: Path):
    """Each file's size and sha256 are in artifact.json, and the service opens the artifact."""
    files = read_description(tiny_artifact)["files"]
    for name in FILES - {"artifact.json"}:
        content = (tiny_artifact / name).read_bytes()
        assert files[name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    artifact = open_artifact(tiny_artifact)
    assert artifact.digest == hashlib.sha256((tiny_artifact / "artifact.json").read_bytes()).hexdigest()
    assert (artifact.hidden_size, artifact.max_tokens, artifact.poolings) == (24, 40, ("cls", "mean", "max", "last"))


def test_report(checkpoint: Path, tmp_path: Path):
    """The steps are reported: what was loaded, the largest difference to torch, what was written."""
    lines: list[str] = []
    output = export(str(checkpoint), tmp_path / "a", model_id="org/tiny", report=lines.append)
    assert output == tmp_path / "a"
    described = read_description(output)
    assert described["model_id"] == "org/tiny"
    difference = described["parity"]["float32_max_difference"]
    assert lines == [
        "loaded org/tiny: bert, 2 layers, 3 heads, hidden 24",
        f"checked against torch: largest difference {difference:.1e} (at most 1e-04)",
        f"wrote {output}",
    ]


# ---------------------------------------------------------------- what is noticed


@pytest.mark.parametrize("name", sorted(FILES - {"artifact.json"}))
def test_a_changed_file_is_noticed(copied: Path, name: str):
    """One bit changed after the export, in whichever file, and the service refuses the artifact by that name."""
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} was changed or damaged after the export"):
        open_artifact(copied)


def test_other_numbers_are_noticed(copied: Path, checkpoint: Path):
    """Graphs that do not compute what torch computes fail the check that an export ends with."""
    encoder = load_encoder(checkpoint)
    plain = EncoderGraph(encoder, SentenceHead(["mean"]))
    places = read_description(copied)["attention_weights"]
    assert check(copied, plain, places) <= MAX_DIFFERENCE
    weights = onnx.load(copied / "encode.onnx", load_external_data=False).graph.initializer
    changed = next(one for one in weights if one.name == "encoder.layers.1.feed_forward_norm.bias")
    offset = next(int(entry.value) for entry in changed.external_data if entry.key == "offset")
    with (copied / "weights.bin").open("r+b") as file:
        file.seek(offset)
        file.write(torch.tensor([3.0]).numpy().tobytes())
    with pytest.raises(ExportError, match=r"graphs differ from torch by .* at most 1e-04 is allowed"):
        check(copied, plain, places)


# ---------------------------------------------------------------- whole or absent


def test_an_older_artifact_is_replaced(copied: Path, checkpoint: Path):
    """An artifact, or an empty folder, gives way to the new artifact, with nothing of it left."""
    (copied / "stale").touch()
    empty = copied.parent / "empty"
    empty.mkdir()
    for output in (copied, empty):
        quiet(checkpoint, output)
        assert names_in(output) == FILES
        open_artifact(output)
    assert names_in(copied.parent) == {"copied", "empty"}


def test_a_link_stays_a_link(copied: Path, checkpoint: Path):
    """Where the name is a link to an artifact, what it leads to is replaced and nothing else appears."""
    link = copied.parent / "link"
    link.symlink_to(copied)
    (copied / "stale").touch()
    quiet(checkpoint, link)
    assert link.is_symlink()
    assert names_in(copied) == FILES
    assert names_in(copied.parent) == {"copied", "link"}


def test_leftovers_of_an_odd_name(checkpoint: Path, tmp_path: Path):
    """What killed exports left, an artifact on its way out too, is removed whatever the artifact is called."""
    for name in (".m[1]*.partial-x", ".m[1]*.partial-y.old", ".m[1]*.partial-x.old", ".m1.partial-z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("artifact.json" if name.endswith(".old") else ".lock")).touch()
    quiet(checkpoint, tmp_path / "m[1]*")
    assert names_in(tmp_path) == {"m[1]*", ".m1.partial-z"}


def test_something_else_is_not_replaced(checkpoint: Path, tmp_path: Path):
    """A folder that is no artifact, and a file, are refused by name and left as they are."""
    folder, file, dangling = tmp_path / "folder", tmp_path / "file", tmp_path / "dangling"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work", "utf-8")
    file.write_text("years of work", "utf-8")
    dangling.symlink_to(tmp_path / "absent")
    for output in (folder, file, dangling):
        with pytest.raises(ExportError, match=f"{output} exists and is not an artifact"):
            quiet(checkpoint, output)
    assert names_in(tmp_path) == {"folder", "file", "dangling"}
    assert (folder / "thesis.txt").read_text("utf-8") == file.read_text("utf-8") == "years of work"


@pytest.mark.parametrize("older", [False, True])
def test_an_exception_leaves_nothing_behind(checkpoint: Path, tiny_artifact: Path, tmp_path: Path, older: bool):
    """An export that fails in the middle leaves neither artifact nor folder, and an older artifact whole."""
    output = tmp_path / "artifact"
    if older:
        shutil.copytree(tiny_artifact, output)
    during: set[str] = set()

    def fail(line: str) -> None:
        if line.startswith("checked"):
            during.update(names_in(tmp_path))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(str(checkpoint), output, report=fail)
    assert any(name.startswith(".artifact.partial-") for name in during)
    assert names_in(tmp_path) == ({"artifact"} if older else set())
    if older:
        open_artifact(output)


def test_a_checkpoint_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path):
    """An export that fails before it writes does not even make the folder above."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        quiet(tmp_path / "empty", tmp_path / "above" / "artifact")
    assert names_in(tmp_path) == {"empty"}


def start_and_kill(checkpoint: Path, output: Path) -> Path:
    """Start an export in a process of its own, kill it while it writes, and give the folder that it leaves."""
    command = [sys.executable, "-m", "service", "export", str(checkpoint), "-o", str(output)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (left := list(output.parent.glob(f".{output.name}.partial-*/weights.bin"))):
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    return left[0].parent


@pytest.mark.parametrize("older", [False, True])
def test_killed_in_the_middle(minilm: Path, checkpoint: Path, tiny_artifact: Path, tmp_path: Path, older: bool):
    """A killed export leaves no artifact under the name, or the older one whole; the next export tidies up."""
    output = tmp_path / "artifact"
    if older:
        shutil.copytree(tiny_artifact, output)
    left = start_and_kill(minilm, output)
    assert names_in(tmp_path) == {left.name} | ({"artifact"} if older else set())
    assert not (left / "artifact.json").exists()
    if older:
        assert open_artifact(output).hidden_size == 24
    quiet(checkpoint, output)
    assert names_in(tmp_path) == {"artifact"}
    assert names_in(output) == FILES
    open_artifact(output)


def test_an_export_that_still_runs_is_left_alone(minilm: Path, checkpoint: Path, tmp_path: Path):
    """Of two exports to one name at the same time each ends with a whole artifact, and the last one stays."""
    output = tmp_path / "artifact"
    lines: list[str] = []

    def meanwhile(line: str) -> None:
        lines.append(line)
        if line.startswith("checked"):
            quiet(checkpoint, output)
            assert open_artifact(output).hidden_size == 24

    export(str(minilm), output, report=meanwhile)
    assert lines[-1] == f"wrote {output}"
    assert open_artifact(output).hidden_size == 384
    assert names_in(tmp_path) == {"artifact"}
    assert names_in(output) == FILES
