"""Disks: what is missing, damaged, cut, full, or changed under a running server."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attencode import InternalFault, Unavailable
from service import integrity
from service.artifact import open_artifact
from service.errors import ArtifactChanged, ArtifactError
from tests.service.conftest import ROOT
from tests.service.faulty import Faults, serving

FILES = ("encode.onnx", "attention.onnx", "weights.bin", "tokenizer.json")


@pytest.fixture
def folder(tiny_artifact: Path, tmp_path: Path) -> Path:
    """Give a copy of an artifact, to be spoilt."""
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


def refusal(folder: Path, before: tuple[str, ...] = ()) -> str:
    """Give the one line with which the start of a server is refused; its command may have another before it."""
    command = [*before, sys.executable, "-m", "service", "serve", str(folder), "--port", "0", "--metrics-port", "none"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", [*FILES, "artifact.json"])
@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "removed", "a folder"])
def test_a_damaged_file_is_refused(folder: Path, name: str, harm: str) -> None:
    """One bit, one byte less, nothing at all: the error names the file and what to do."""
    path = folder / name
    content = bytearray(path.read_bytes())
    if harm == "flipped":
        content[len(content) // 2] ^= 0x80
        path.write_bytes(content)
    elif harm in ("cut", "empty"):
        path.write_bytes(content[:-1] if harm == "cut" and name != "artifact.json" else content[: -3 if content else 0])
        if harm == "empty":
            path.write_bytes(b"")
    else:
        path.unlink()
        if harm == "a folder":
            path.mkdir()
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert str(folder) in str(caught.value)
    assert "export" in str(caught.value) or "cannot be read" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"version": "1.0", "model": null}', b"\xff"])
def test_a_tokenizer_of_garbage_is_refused(folder: Path, content: bytes) -> None:
    """Even where its digest is right: one line that names the artifact."""
    (folder / "tokenizer.json").write_bytes(content)
    described = json.loads((folder / "artifact.json").read_text("utf-8"))
    described["files"]["tokenizer.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "artifact.json").write_text(json.dumps(described), "utf-8")
    assert f"the tokenizer of {folder} cannot be loaded" in refusal(folder)


def test_files_that_may_not_be_read(folder: Path) -> None:
    """Without permission for a file of it, or for the folder, the start is refused with one line."""
    powerless: tuple[str, ...] = ()
    if os.geteuid() == 0:  # whom no permission stops, unless that power is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and setpriv is not installed")
        powerless = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    (folder / "weights.bin").chmod(0)
    line = refusal(folder, before=powerless)
    assert line == f"attencode: {folder / 'weights.bin'} cannot be read: Permission denied; export the model again"
    folder.chmod(0)
    line = refusal(folder, before=powerless)
    assert "Permission denied" in line
    assert str(folder) in line
    folder.chmod(0o755)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a file system of its own can be mounted by root alone")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("free", [0, 30_000, 110_000])
def test_a_full_disk_leaves_nothing_half_made(
    tmpfs: Path, tiny_artifact: Path, make_bert: object, capsys: pytest.CaptureFixture[str], free: int
) -> None:
    """An export that runs out of room is one line, and what it began is gone; with room it succeeds there."""
    from service.cli import main

    checkpoint = make_bert()  # type: ignore[operator]
    filler = tmpfs / "filler"
    filler.write_bytes(bytes(2 * 2**20 - 4096 - free))
    capsys.readouterr()
    status = main(["export", str(checkpoint), "-o", str(tmpfs / "artifact")])
    told = capsys.readouterr().err
    assert status == 1, told
    assert told.startswith(f"attencode: {tmpfs / 'artifact'} cannot be written: No space left on device")
    assert told.count("\n") == 1
    assert [path.name for path in tmpfs.iterdir()] == ["filler"]
    filler.unlink()
    assert main(["export", str(checkpoint), "-o", str(tmpfs / "artifact")]) == 0
    assert open_artifact(tmpfs / "artifact").hidden_size == open_artifact(tiny_artifact).hidden_size


def test_a_replaced_artifact_mixes_with_nothing(folder: Path, make_bert: object, tmp_path: Path) -> None:
    """Under a running server: what is loaded goes on, what would have to be loaded from the new one is refused."""
    from model.export import export

    with serving(folder, Faults().session) as running:
        before = running.client.encode("a b c").pooled
        export(str(make_bert(intermediate_size=44)), folder, report=lambda _line: None)  # type: ignore[operator]
        np.testing.assert_array_equal(running.client.encode("a b c").pooled, before)
        with pytest.raises(InternalFault):
            running.client.encode("a b c", attention=True)
        np.testing.assert_array_equal(running.client.encode("a b c").pooled, before)


def test_weights_of_a_replaced_artifact_are_not_mapped(folder: Path, make_bert: object) -> None:
    """A layer that was looked at before is looked at as ever; another one would come from other weights."""
    from model.export import export

    with serving(folder, Faults().session) as running:
        before = running.client.encode("a b c", attention=[0]).results[0].attention
        export(str(make_bert(intermediate_size=44)), folder, report=lambda _line: None)  # type: ignore[operator]
        with pytest.raises(InternalFault):
            running.client.encode("a b c", attention=[1])
        again = running.client.encode("a b c", attention=[0]).results[0].attention
        np.testing.assert_array_equal(again, before)


def test_a_removed_artifact_is_no_matter(folder: Path) -> None:
    """What a running server has loaded it keeps; what it would have to load is refused, and does not bring it down."""
    with serving(folder, Faults().session) as running:
        before = running.client.encode("a b c").pooled
        attended = running.client.encode("a b c", attention=[0]).results[0].attention
        shutil.rmtree(folder)
        np.testing.assert_array_equal(running.client.encode("a b c").pooled, before)
        again = running.client.encode("a b c", attention=[0]).results[0].attention
        np.testing.assert_array_equal(again, attended)
        with pytest.raises(InternalFault):
            running.client.encode("a b c", attention=[1])
        np.testing.assert_array_equal(running.client.encode("a b c").pooled, before)


def test_an_artifact_that_is_written_into_is_served_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other bytes in the file that is mapped end the server; a new time of the same bytes, or another file, do not."""
    monkeypatch.setattr(integrity, "_PERIOD_S", 0.05)
    content = bytearray((folder / "weights.bin").read_bytes())
    with serving(folder, Faults().session) as running:
        (folder / "weights.bin").touch()
        (folder / "encode.onnx").unlink()
        shutil.copy(folder / "attention.onnx", folder / "copy")
        (folder / "copy").replace(folder / "tokenizer.json")
        time.sleep(0.3)
        assert running.client.encode("a b c").pooled.shape == (1, 24)
        content[len(content) // 2] ^= 1
        with (folder / "weights.bin").open("r+b") as file:
            file.write(content)
        with pytest.raises(ArtifactChanged, match=r"weights\.bin was written into while it was served"):
            running.call(running.server.lost())
        with pytest.raises(Unavailable):
            running.client.encode("a b c")
    assert not caplog.text.count("failed")


def test_a_change_between_check_and_load_is_noticed(folder: Path) -> None:
    """An artifact that is changed after its digests were held against it is not served."""
    from service.placement import choose_placement
    from service.session import Session

    artifact = open_artifact(folder)
    content = bytearray((folder / "weights.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "weights.bin").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"weights\.bin was changed or replaced under the running server"):
        Session(artifact, choose_placement("cpu", "float32"), threads=1).load()
