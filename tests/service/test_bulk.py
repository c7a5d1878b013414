"""Bulk: files in, files out, in order; what is wrong with a line; a killed run goes on to the same bytes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attencode import Client
from service.cli import main

ROOT = Path(__file__).parents[2]
TEXTS = ["hello world", "a", "the dog did not attack", "naïve 中文 text", "time flies like an arrow"] * 30


@pytest.fixture(scope="module")
def address(serve_for_module: Callable[..., str], tiny_artifact: Path) -> str:
    """Give the address of a server of the tiny BERT that takes requests of a few KiB."""
    return serve_for_module(tiny_artifact, max_request_bytes=4096, max_inputs=16)


@pytest.fixture(scope="module")
def vectors(address: str) -> np.ndarray:
    """Give what `Client.encode` has for the texts, (texts, dim)."""
    with Client(address) as client:
        return np.concatenate([client.encode(TEXTS[start : start + 10]).pooled for start in range(0, len(TEXTS), 10)])


def write_texts(path: Path, texts: list[str]) -> Path:
    """Write texts in the format that a path's ending names."""
    if path.suffix == ".txt":
        path.write_text("".join(text + "\n" for text in texts))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    else:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=40)
    return path


def read_vectors(path: Path) -> np.ndarray:
    """Read what was written, (rows, dim), NaN where there is no vector."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)["embeddings"]
    if path.suffix == ".jsonl":
        rows = [json.loads(line)["embedding"] for line in path.read_text().splitlines()]
    else:
        import pyarrow.parquet as pq

        rows = pq.read_table(path)["embedding"].to_pylist()
    width = next(len(row) for row in rows if row is not None)
    return np.array([[np.nan] * width if row is None else row for row in rows])


def encode(address: str, source: Path | str, output: Path, *flags: str) -> int:
    return main(["encode", "--input", str(source), "--output", str(output), "--address", address, *flags])


@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.parquet"])
@pytest.mark.parametrize("output", ["out.npy", "out.safetensors", "out.jsonl", "out.parquet"])
def test_every_format(address: str, vectors: np.ndarray, tmp_path: Path, source: str, output: str) -> None:
    """Each format gives the vectors of `Client.encode` in the order of its texts, and leaves nothing else behind."""
    if "parquet" in source + output:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
    assert encode(address, write_texts(tmp_path / source, TEXTS), tmp_path / output, "--batch-size", "7") == 0
    np.testing.assert_allclose(read_vectors(tmp_path / output), vectors, atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {source, output}


@pytest.mark.parametrize("output", ["out.npy", "out.safetensors", "out.jsonl", "out.parquet"])
def test_float16_and_options(address: str, tmp_path: Path, output: str) -> None:
    """The data type and the options of pooling reach the output; a skipped line has its gap in every format."""
    if "parquet" in output:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
    source = write_texts(tmp_path / "in.txt", ["hello", "", "world"])
    flags = ["--data-type", "float16", "--pooling", "max", "--dimensions", "5", "--no-normalize", "--on-error", "skip"]
    assert encode(address, source, tmp_path / output, *flags) == 0
    with Client(address) as client:
        expected = client.encode(["hello", "world"], pooling="max", dimensions=5, normalize=False).pooled
    found = read_vectors(tmp_path / output)
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], expected, atol=2e-3)
    if output in ("out.npy", "out.safetensors"):
        assert found.dtype == np.float16


BAD_JSONL = (
    b'{"text": "one"}\n{"text": \n{"other": 1}\n{"text": 5}\n{"text": ""}\n[]\n\xff\n{"text": "\\ud800"}\n'
    b'{"text": "   "}\n{"text": "' + b"long " * 2000 + b'"}\n\n{"text": "two"}'
)


def test_bad_lines_are_skipped(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bad line is named with its reason, those that only the server refuses too, and has a row of NaN."""
    (tmp_path / "in.jsonl").write_bytes(BAD_JSONL)
    assert encode(address, tmp_path / "in.jsonl", tmp_path / "out.npy", "--on-error", "skip") == 0
    lines = capsys.readouterr().err.splitlines()
    reasons = [
        *("invalid JSON", "'text' is missing", "must be a string", "is empty", "no JSON object", "invalid UTF-8"),
        *("lone surrogate", "refused: the text has no token"),
        *("refused: the request has 10,0", "invalid JSON"),
    ]
    assert len(lines) == len(reasons) + 1
    for number, (line, reason) in enumerate(zip(lines, reasons, strict=False), 2):
        assert line.startswith(f"attencode: line {number}: ")
        assert reason in line
    assert lines[-1] == "attencode: 12 rows, 10 of them skipped"
    found = np.load(tmp_path / "out.npy")
    with Client(address) as client:
        np.testing.assert_allclose(found[[0, 11]], client.encode(["one", "two"]).pooled, atol=1e-5)
    assert np.isnan(found[1:11]).all()


def test_a_file_of_bad_lines_alone(address: str, tmp_path: Path) -> None:
    """More bad lines than a chunk holds give as many rows of NaN."""
    (tmp_path / "in.txt").write_text("\n" * 10_000)
    assert encode(address, tmp_path / "in.txt", tmp_path / "out.npy", "--on-error", "skip") == 0
    found = np.load(tmp_path / "out.npy")
    assert len(found) == 10_000
    assert np.isnan(found).all()


@pytest.mark.parametrize("bad", ["", "   ", "long " * 2000])
def test_a_bad_line_stops(
    address: str, vectors: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    """A bad line ends the run with its number; once it is corrected, or may be skipped, the run goes on."""
    source, output = write_texts(tmp_path / "in.txt", [*TEXTS[:50], bad, *TEXTS[51:]]), tmp_path / "out.npy"
    assert encode(address, source, output) == 1
    assert "attencode: line 51: " in capsys.readouterr().err
    assert not output.exists()
    assert encode(address, source, output) == 1
    assert "--resume" in capsys.readouterr().err
    write_texts(source, TEXTS)
    assert encode(address, source, output, "--resume") == 0
    assert "by an earlier run" in capsys.readouterr().err
    np.testing.assert_allclose(np.load(output), vectors, atol=1e-5)


@pytest.mark.parametrize("output", ["out.npy", "out.safetensors", "out.jsonl", "out.parquet"])
def test_an_empty_file(address: str, tmp_path: Path, output: str) -> None:
    """No lines give no rows, in a file that is whole."""
    if "parquet" in output:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; install attencode[files]")
    assert encode(address, write_texts(tmp_path / "in.txt", []), tmp_path / output) == 0
    if output == "out.jsonl":
        assert (tmp_path / output).read_bytes() == b""
    elif output == "out.parquet":
        import pyarrow.parquet as pq

        assert pq.read_table(tmp_path / output).num_rows == 0
    else:
        assert read_vectors(tmp_path / output).shape[0] == 0


def test_stdin(address: str, vectors: np.ndarray, tmp_path: Path) -> None:
    """`--input -` reads a text a line, or JSON where that is said."""
    for form in ("txt", "jsonl"):
        source = write_texts(tmp_path / f"in.{form}", TEXTS)
        command = command_for(address, "-", tmp_path / "out.npy", "--input-format", form)
        subprocess.run(command, cwd=ROOT, check=True, input=source.read_bytes(), capture_output=True)
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), vectors, atol=1e-5)


def command_for(address: str, source: Path | str, output: Path, *flags: str) -> list[str]:
    words = ["encode", "--input", str(source), "--output", str(output), "--address", address, *flags]
    return [sys.executable, "-m", "service", *words]


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on(address: str, tmp_path: Path, seed: int) -> None:
    """SIGKILL at random points, a row torn in the middle, and --resume: the bytes of a run without."""
    rng = random.Random(seed)
    source = tmp_path / "in.txt"
    source.write_text("".join(f"word number {number}\n" if number % 97 else "\n" for number in range(1, 6001)))
    flags = ["--on-error", "skip", "--in-flight", "1", "--batch-size", "16"]
    assert encode(address, source, tmp_path / "whole.npy", *flags) == 0
    output, partial = tmp_path / "out.npy", tmp_path / "out.npy.partial"
    whole_bytes = (tmp_path / "whole.npy").stat().st_size
    for share in sorted(rng.random() for _ in range(3)):
        command = [*command_for(address, source, output, *flags), "--resume"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (
                partial.exists() and partial.stat().st_size >= share * 0.9 * whole_bytes
            ):
                pass
            process.kill()
        if partial.exists() and rng.random() < 0.5:
            with partial.open("ab") as file:
                file.write(b"torn")
    assert encode(address, source, output, *flags, "--resume") == 0
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "whole.npy", "out.npy"}


@pytest.fixture
def stopped(address: str, tmp_path: Path) -> tuple[Path, Path]:
    """Give the input and the output of a run that stopped at line 101, and whose last line has been corrected."""
    source, output = write_texts(tmp_path / "in.txt", [*TEXTS[:100], ""]), tmp_path / "out.npy"
    assert encode(address, source, output) == 1
    write_texts(source, TEXTS)
    return source, output


def test_a_changed_input_is_noticed(
    address: str, stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was read before must be the same when a run goes on."""
    source, output = stopped
    for texts in (["changed", *TEXTS[1:]], TEXTS[:20]):
        write_texts(source, texts)
        assert encode(address, source, output, "--resume") == 1
        assert "are not those that the earlier run encoded" in capsys.readouterr().err
    write_texts(source, TEXTS)
    assert encode(address, source, output, "--resume") == 0


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--dimensions", "4"], "dimensions"),
        (["--data-type", "float16"], "data_type"),
        (["--pooling", "max"], "pooling"),
    ],
)
def test_changed_options_are_noticed(
    address: str, stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str], flags: list[str], name: str
) -> None:
    """Another option than the earlier run's is refused by its name, and what that run made is left alone."""
    source, output = stopped
    assert encode(address, source, output, "--resume", *flags) == 1
    assert f"{name} is " in capsys.readouterr().err
    assert encode(address, source, output, "--resume") == 0


def test_another_model_is_noticed(
    serve: Callable[..., str],
    make_bert: Callable[..., Path],
    export_artifact: Callable[[Path], Path],
    stopped: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run does not go on with the vectors of another artifact."""
    other = serve(export_artifact(make_bert(num_hidden_layers=1)))
    assert encode(other, *stopped, "--resume") == 1
    assert "model_digest is " in capsys.readouterr().err


AWAY = ("--address", "127.0.0.1:1", "--retry-for", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "{tmp}/in.txt", "--output", "{tmp}/out.npy", *AWAY], "no server answers"),
        (["--input", "{tmp}/none.txt", "--output", "{tmp}/out.npy"], "is not a file"),
        (["--input", "{tmp}/in.txt", "--output", "{tmp}/out.csv"], "must end in .npy"),
        (["--input", "{tmp}/in.csv", "--output", "{tmp}/out.npy"], "must end in .txt"),
        (["--input", "-", "--input-format", "parquet", "--output", "{tmp}/out.npy"], "from the standard input"),
        (["--input", "{tmp}/in.txt", "--output", "{tmp}/none/out.npy"], "folder"),
        (["--input", "{tmp}/in.txt"], "go together"),
        (["--resume", "text"], "goes with --input"),
        ([], "wants texts"),
        (["--input", "{tmp}/in.txt", "--output", "{tmp}/out.npy", "--dimensions", "9999"], "dimensions"),
    ],
)
def test_refusals_leave_nothing(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """What cannot work is said before any work, and leaves no file."""
    write_texts(tmp_path / "in.txt", TEXTS[:3])
    assert main(["encode", "--address", address, *(flag.format(tmp=tmp_path) for flag in flags)]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_without_pyarrow(address: str, tmp_path: Path) -> None:
    """Parquet without pyarrow names the extra."""
    source = write_texts(tmp_path / "in.txt", TEXTS[:3])
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    command = command_for(address, source, tmp_path / "out.parquet")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "install attencode[files]" in run.stderr


def test_a_server_that_comes_back(spawn_local: Callable[..., object], tiny_artifact: Path, tmp_path: Path) -> None:
    """A server that is killed in the middle and started anew on its port costs no row."""
    server = spawn_local(tiny_artifact)
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("".join(f"word number {number}\n" for number in range(20_000)))
    with subprocess.Popen(command_for(server.address, source, output), cwd=ROOT, stderr=subprocess.PIPE) as process:
        partial = tmp_path / "out.npy.partial"
        while process.poll() is None and not (partial.exists() and partial.stat().st_size > 10_000):
            pass
        server.process.kill()
        server.process.wait()
        spawn_local(tiny_artifact, "--port", server.address.split(":")[1])
        _out, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert len(np.load(output)) == 20_000
    assert np.isfinite(np.load(output)).all()
