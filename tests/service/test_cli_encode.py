"""How a run over a file ends, goes on and begins: signals, full disks, another server, a finished output."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from service import cli_encode
from service.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(serve_for_module: Callable[..., str], tiny_artifact: Path) -> str:
    """Give the address of a server of the tiny BERT."""
    return serve_for_module(tiny_artifact)


def words(address: str, source: Path | str, output: Path | str, *flags: str) -> list[str]:
    return ["encode", "--input", str(source), "--output", str(output), "--address", address, *flags]


def numbered(path: Path, count: int) -> Path:
    path.write_text("".join(f"word number {number}\n" for number in range(count)))
    return path


@pytest.fixture
def stopped(address: str, tmp_path: Path) -> tuple[Path, Path]:
    """Give the input and output of a run that stopped at a bad line which has been corrected."""
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("good\n" * 40 + "\n")
    assert main(words(address, source, output)) == 1
    source.write_text("good\n" * 41)
    return source, output


def test_another_precision_is_noticed(
    address: str, stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of another provider or precision are not gone on with: which it was, which it is, and what to do."""
    journal = stopped[1].with_name("out.npy.partial.json")
    kept = journal.read_text()
    facts = json.loads(kept)
    assert (facts["provider"], facts["precision"]) == ("cpu", "float32")
    journal.write_text(json.dumps({**facts, "provider": "openvino", "precision": "bfloat16"}))
    assert main(words(address, *stopped, "--resume")) == 1
    told = capsys.readouterr().err
    for part in (
        "provider is 'cpu', but was 'openvino'",
        "precision is 'float32', but was 'bfloat16'",
        "serve it with --provider openvino again, serve it with --precision bfloat16 again, or remove",
    ):
        assert part in told
    journal.write_text(json.dumps({**facts, "version": 1}))
    assert main(words(address, *stopped, "--resume")) == 1
    assert "is of another version of attencode; remove" in capsys.readouterr().err
    journal.write_text(kept)
    assert main(words(address, *stopped, "--resume")) == 0


@pytest.mark.skipif(not importlib.util.find_spec("onnxruntime_ep_openvino"), reason="needs attencode[openvino]")
def test_a_server_that_comes_back_otherwise(
    spawn_local: Callable[..., object], tiny_artifact: Path, tmp_path: Path
) -> None:
    """A server that is started anew with another provider ends the run; only its predecessor's rows count."""
    server = spawn_local(tiny_artifact, "--provider", "cpu", "--precision", "float32")
    port = server.address.split(":")[1]
    source, output = numbered(tmp_path / "in.txt", 20_000), tmp_path / "out.npy"
    command = [sys.executable, "-m", "service", *words(server.address, source, output)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_for_rows(process, output, 1000)
        server.process.kill()
        server.process.wait()
        other = spawn_local(tiny_artifact, "--provider", "openvino", "--precision", "float32", "--port", port)
        _out, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "has begun to answer in float32 on openvino, after float32 on cpu" in told
    assert "--provider cpu --precision float32 again and go on with --resume" in told
    facts = json.loads(output.with_name("out.npy.partial.json").read_text())
    assert facts["provider"] == "cpu"
    assert 0 < facts["rows"] < 20_000
    other.process.kill()


def wait_for_rows(process: subprocess.Popen[str], output: Path, rows: int) -> None:
    """Wait until the journal of a run counts so many."""
    journal = output.with_name(output.name + ".partial.json")
    while process.poll() is None and not (journal.exists() and json.loads(journal.read_text())["rows"] >= rows):
        pass


def test_the_first_contact_is_waited_for(
    spawn_local: Callable[..., object], tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is not there yet is asked again until it is; one line says that the run waits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    late = threading.Timer(1.5, spawn_local, (tiny_artifact, "--port", str(port)))
    late.start()
    source, output = numbered(tmp_path / "in.txt", 10), tmp_path / "out.npy"
    assert main(words(f"127.0.0.1:{port}", source, output, "--retry-for", "90")) == 0
    late.join()
    waiting, done = capsys.readouterr().err.splitlines()
    assert re.search("no server answers at .*; asking again for up to 90 s$", waiting)
    assert done == "attencode: 10 rows"


def test_the_first_contact_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no server comes, the run says once that it waits, and at the end that there is none."""
    source = numbered(tmp_path / "in.txt", 10)
    assert main(words("127.0.0.1:1", source, tmp_path / "out.npy", "--retry-for", "4")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert ["asking again for up to 4 s" in line for line in lines] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder.npy", "folder.npy is a folder; give the name of a file"),
        ("new.npy/", "new.npy/ names a folder"),
        ("x" * 245 + ".npy", "is too long, "),
        ("in.txt/new.npy", "in.txt is no folder"),
    ],
)
def test_a_bad_output_is_told_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    """What is wrong with the output is one line before any server is asked, and nothing is left."""
    source = numbered(tmp_path / "in.txt", 10)
    (tmp_path / "folder.npy").mkdir()
    assert main(words("127.0.0.1:1", source, f"{tmp_path}/{name}")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "folder.npy"}


def test_resume_of_what_is_complete(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a finished run --resume says that there is nothing to do, asks no server and touches nothing."""
    source, output = numbered(tmp_path / "in.txt", 10), tmp_path / "out.npy"
    assert main(words(address, source, output)) == 0
    before = output.stat()
    capsys.readouterr()
    assert main(words("127.0.0.1:1", source, output, "--resume")) == 0
    told = capsys.readouterr().err
    assert f"{output} is complete, and there is no unfinished run to resume; leave --resume out to encode anew" in told
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    output.with_name("out.npy.partial").write_bytes(b"rows")  # what a kill at the very end leaves
    for flags in (["--resume"], []):
        assert main(words(address, source, output, *flags)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.npy"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_in_order(address: str, tmp_path: Path, number: int, status: int) -> None:
    """A signal says that the rows are kept, and --resume goes on."""
    source, output = numbered(tmp_path / "in.txt", 20_000), tmp_path / "out.npy"
    flags = ["--in-flight", "1", "--batch-size", "16"]  # slow, so that it is not over before
    command = [sys.executable, "-m", "service", *words(address, source, output, *flags)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_for_rows(process, output, 1)
        process.send_signal(number)
        _out, told = process.communicate(timeout=60)
    assert told == "attencode: what is done so far is kept; go on with --resume\n"
    assert process.returncode == status
    assert main(words(address, source, output, *flags, "--resume")) == 0
    assert len(np.load(output)) == 20_000


@pytest.mark.parametrize("end", [SystemExit(143), KeyboardInterrupt()])
def test_a_signal_within_a_wait_is_still_one(end: BaseException) -> None:
    """Where it interrupts the wait on a condition, the error about the lost lock does not stand for it."""
    condition = threading.Condition()

    def wait() -> None:
        with condition:
            condition.release()
            raise end

    with pytest.raises(RuntimeError, match="un-acquired") as caught:
        wait()
    assert cli_encode.signal_behind(caught.value) is end
    assert cli_encode.signal_behind(RuntimeError("of its own")) is None


@pytest.mark.parametrize("form", ["txt", "parquet"])
def test_problems_name_lines_or_rows(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A text has lines, a parquet file has rows."""
    source = tmp_path / f"in.{form}"
    if form == "txt":
        source.write_text("one\n\n")
    else:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": ["one", ""]}), source)
    noun = "line" if form == "txt" else "row"
    assert main(words(address, source, tmp_path / "out.npy")) == 1
    assert f"attencode: {noun} 2: the text is empty; correct it" in capsys.readouterr().err
    assert main(words(address, source, tmp_path / "out.npy", "--on-error", "skip", "--resume")) == 0
    assert f"attencode: {noun} 2: the text is empty; skipped" in capsys.readouterr().err


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Give a function that makes or resizes a file system of so many kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("only root may mount a small file system")

    def resize(size_kb: int) -> Path:
        subprocess.run(["mount", "-o", f"remount,size={size_kb}k", folder], check=True)
        return folder

    yield resize
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("form", "size_kb"), [("npy", 100), ("npy", 280), ("safetensors", 280), ("jsonl", 280), ("parquet", 280)]
)
def test_a_full_disk(
    address: str,
    small_disk: Callable[[int], Path],
    *,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    size_kb: int,
) -> None:
    """In the middle, and at the last step: the file, the room, what is kept; and with room --resume goes on."""
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
    source, folder = numbered(tmp_path / "in.txt", 2000), small_disk(size_kb)  # 192 kB of rows
    output, flags = folder / f"out.{form}", ["--batch-size", "40"]
    assert main(words(address, source, output, *flags)) == 1
    (told,) = capsys.readouterr().err.splitlines()
    where, kept = (".partial", r"[\d,]+") if size_kb < 192 else ("", "2,000")
    assert re.search(
        rf"attencode: {output}{where} cannot be written: no room is left on its disk .*free\); "
        rf"{kept} of 2,000 rows are kept; what is missing takes about [\d.]+ [kM]B in all; make room and go on "
        r"with --resume$",
        told,
    )
    assert {path.name for path in folder.iterdir()} == {output.name + ".partial", output.name + ".partial.json"}
    small_disk(4000)
    assert main(words(address, source, output, *flags, "--resume")) == 0
    assert "by an earlier run" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [output.name]
    assert main(words(address, source, tmp_path / output.name, *flags)) == 0
    assert output.stat().st_size == (tmp_path / output.name).stat().st_size


def test_a_disk_that_is_full_already(
    address: str, small_disk: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where not even the journal fits, nothing is left, and the line says so."""
    folder = small_disk(64)
    with pytest.raises(OSError, match="No space left"):
        (folder / "other").write_bytes(b"x" * 2**17)
    before = sorted(folder.iterdir())
    assert main(words(address, numbered(tmp_path / "in.txt", 2000), folder / "out.npy")) == 1
    told = capsys.readouterr().err
    assert "no room is left on its disk" in told
    assert "no row is kept; what is missing takes about 384 kB in all; make room and begin anew" in told
    assert sorted(folder.iterdir()) == before


def test_a_file_that_may_not_grow(address: str, tmp_path: Path) -> None:
    """Where files may not be as large, the line says by what they are held."""
    source, output = numbered(tmp_path / "in.txt", 2000), tmp_path / "out.npy"
    command = " ".join([sys.executable, "-m", "service", *words(address, source, output, "--batch-size", "40")])
    limited = ["bash", "-c", f"ulimit -f 100; exec {command}"]
    run = subprocess.run(limited, cwd=ROOT, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert "out.npy.partial cannot be written: it is larger than a file may be here, see `ulimit -f`" in run.stderr
    assert main(words(address, source, output, "--batch-size", "40", "--resume")) == 0
    assert len(np.load(output)) == 2000
