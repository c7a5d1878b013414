"""The command: what it prints, how it fails, and the cache behind `serve MODEL`."""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from service.cli import _parser, main

ROOT = Path(__file__).parents[2]


def test_encode_prints_vectors(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`encode` shows each text's token count and the beginning of its vector."""
    assert main(["encode", "hello world", "dog " * 300, "--address", minilm_address]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("'hello world': 4 tokens, 384 dimensions: -0.0345  0.0310")
    assert "256 tokens, cut from 302" in second


def test_encode_as_json(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`encode --json` prints one object with whole vectors."""
    words = ["encode", "hello", "--address", minilm_address, "--json", "--dimensions", "8", "--token-embeddings"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["pooled"][0]) == 8
    assert printed["results"][0]["tokens"] == ["[CLS]", "hello", "[SEP]"]
    assert len(printed["results"][0]["token_embeddings"][0]) == 384


def test_attend_prints_a_matrix(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`attend` prints one row and one column for each token, rows summing to 100 percent."""
    words = ["attend", "time flies like an arrow", "--layer", "0", "--head", "0", "--address", minilm_address]
    assert main(words) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("layer 0, head 0")
    tokens = ["[CLS]", "time", "flies", "like", "an", "arrow", "[SEP]"]
    assert header.split() == tokens
    assert [row.split()[0] for row in rows] == tokens
    assert all(96 <= sum(map(int, row.split()[1:])) <= 104 for row in rows)
    assert len({len(line) for line in (header, *rows)}) == 1


def test_attend_over_a_pair_as_json(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`attend TEXT TEXT_B --json` gives the mean over heads as numbers."""
    assert main(["attend", "a dog", "a cat", "--json", "--address", minilm_address]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokens"] == ["[CLS]", "a", "dog", "[SEP]", "a", "cat", "[SEP]"]
    assert all(abs(sum(row) - 1) < 1e-4 for row in printed["weights"])


def test_info(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` lists what GetModel says, as lines or as JSON."""
    assert main(["info", "--address", minilm_address]) == 0
    assert "num_hidden_layers    6" in capsys.readouterr().out
    assert main(["info", "--json", "--address", minilm_address]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["hidden_size"], printed["max_request_bytes"]) == (384, 4_194_304)


def test_a_deadline_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A deadline that passed, at a port that never answers, is told with its length and the flag that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for command in (["encode", "dog"], ["attend", "dog"], ["info"]):
            assert main([*command, "--timeout", "0.2", "--address", address]) == 1
            message = capsys.readouterr().err
            assert message.startswith(f"attencode: no answer came from '{address}' within the deadline of 0.2 s"), (
                message
            )
            assert "--timeout" in message


def test_a_text_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of another encoding are told as such, with what converts them."""
    with pytest.raises(SystemExit):
        main(["encode", "caf\udce9"])
    message = capsys.readouterr().err
    assert "argument TEXT: must be UTF-8, got the byte 0xe9 behind 3 characters" in message
    assert "iconv -f LATIN1 -t UTF-8" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encode", "", "--address", "{address}"], "input 0 is empty"),
        (["attend", "x", "--layer", "9", "--address", "{address}"], "attention layer 9 does not exist"),
        (["info", "--address", "127.0.0.1:1", "--timeout", "3"], "no server answers"),
        (["serve", "/nowhere/at/all"], "is not a folder"),
        (["serve", "{tmp}"], "holds neither an artifact (artifact.json) nor a checkpoint"),
        (["serve", "x", "--bogus", "1"], "unrecognized arguments: --bogus"),
        (["serve", "~nobodyatall/x"], "is not a folder"),
        (["export", "/nowhere/at/all", "-o", "{tmp}/out"], "is not a folder"),
    ],
)
def test_errors_are_one_line(
    minilm_address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """What goes wrong is one line on stderr and exit status 1."""
    filled = [word.format(address=minilm_address, tmp=tmp_path) for word in words]
    cache = ["--cache-dir", str(tmp_path)] if words[0] == "serve" else []
    assert main(filled + cache) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("attencode: ")
    assert message in last


def test_serve_exports_once(spawn: Callable[..., object], make_bert: Callable[..., Path], tmp_path: Path) -> None:
    """`serve CHECKPOINT` exports into the cache, and the second time does not."""
    checkpoint = make_bert(num_hidden_layers=1)
    for _ in range(2):
        assert spawn(checkpoint, "--cache-dir", str(tmp_path)).terminate() == 0
        artifacts = [path for path in tmp_path.iterdir() if (path / "artifact.json").is_file()]
        assert len(artifacts) == 1
        written = (artifacts[0] / "artifact.json").stat().st_mtime_ns
    assert (artifacts[0] / "artifact.json").stat().st_mtime_ns == written
    (checkpoint / "config.json").touch()
    assert spawn(checkpoint, "--cache-dir", str(tmp_path)).terminate() == 0
    assert len(list(tmp_path.iterdir())) == 2, "a changed checkpoint is exported anew"


def test_a_damaged_cache_is_made_again(
    spawn: Callable[..., object], make_bert: Callable[..., Path], tmp_path: Path
) -> None:
    """A cached artifact that is not whole any more is exported again."""
    checkpoint = make_bert(num_hidden_layers=1, hidden_size=12)
    assert spawn(checkpoint, "--cache-dir", str(tmp_path)).terminate() == 0
    (tokenizer,) = tmp_path.glob("*/tokenizer.json")
    tokenizer.write_text("{}")
    assert spawn(checkpoint, "--cache-dir", str(tmp_path)).terminate() == 0


def test_sigterm_ends_the_export_too(make_bert: Callable[..., Path], tmp_path: Path) -> None:
    """SIGTERM while `serve` still exports ends both processes with exit code 0 and leaves no artifact."""
    checkpoint = make_bert(num_hidden_layers=1, hidden_size=36)
    command = [sys.executable, "-m", "service", "serve", str(checkpoint), "--cache-dir", str(tmp_path / "cache")]
    command += ["--port", "0", "--metrics-port", "none"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"exporting" in process.stderr.readline()
        children: list[psutil.Process] = []
        while not children:
            children = psutil.Process(process.pid).children()
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert not any(child.is_running() for child in children)
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_any_script_on_any_terminal(minilm_address: str) -> None:
    """Text that the terminal's encoding lacks is escaped, in JSON validly."""
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "service", "attend", "中文 👍", "--address", minilm_address, *flags]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout
        assert "\\u4e2d" in printed
        if flags:
            assert json.loads(printed)["tokens"][1] == "中"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_deadlines_are_checked(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    """A deadline that is no positive number of seconds is refused before anything is sent."""
    with pytest.raises(SystemExit):
        main(["info", "--timeout", seconds])
    assert "must be seconds above 0" in capsys.readouterr().err


def test_python_m_service(tmp_path: Path) -> None:
    """`python -m service` is the same command and lists its subcommands."""
    command = [sys.executable, "-m", "service", "--help"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=os.environ).stdout
    for name in ("serve", "export", "encode", "attend", "info"):
        assert name in printed


@pytest.mark.parametrize("name", ["encode", "attend", "view", "info", "export", "undeploy"])
def test_every_argument_is_explained(name: str) -> None:
    """No argument of a command is without help, nor refers to the one above."""
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    for action in commands.choices[name]._actions:
        assert action.help, action.dest
        assert "likewise" not in action.help
