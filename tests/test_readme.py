"""The README's examples run as they stand."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli import main
from service.session import Session
from tests.service import translators
from tests.service.faulty import serving

README = (Path(__file__).parents[1] / "README.md").read_text()
ADDRESS = "127.0.0.1:50051"


@pytest.fixture(scope="module")
def default_port(minilm_artifact: Path) -> object:
    """Serve the default model on the default port, as `make serve` does."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 50051)) == 0:
            pytest.skip("another server listens on the default port")
    import subprocess
    import sys

    command = [sys.executable, "-m", "service", "serve", str(minilm_artifact), "--metrics-port", "none"]
    command += ["--provider", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        assert ADDRESS in process.stdout.readline()
        yield
        process.terminate()


def example(name: str) -> str:
    """Give the code block behind a marker in the README."""
    match = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert match, name
    return match[1]


def test_the_client_example(default_port: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example runs and prints the shapes in its comments."""
    exec(compile(example("client"), "README.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out
    assert printed.startswith("(2, 384)\n[CLS] 0 0 ")
    assert "(1, 1, 7, 7)" in printed


def test_the_context_example(default_port: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of context prints what the README says that it shows."""
    exec(compile(example("context"), "README.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    shown = README.split("<!-- test: context -->")[1].split("```text\n")[1].split("```")[0].splitlines()
    numbers = [[float(number) for number in re.findall(r"\d+\.\d*", line)] for line in printed]
    assert numbers == [
        pytest.approx([float(number) for number in re.findall(r"\d+\.\d*", line)], abs=0.11) for line in shown
    ]
    dog, man = zip(*numbers[:6], strict=True)
    assert [a > b for a, b in zip(dog, man, strict=True)] == [False, False, True, True, True, True]
    assert numbers[7][2] > numbers[6][1] > numbers[6][2]


def test_the_shell_example(default_port: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell example prints what the README shows."""
    command, shown = example("shell").split("\n", 1)
    words = re.findall(r'"([^"]*)"|(\S+)', command.removeprefix("$ attencode "))
    assert main([quoted or plain for quoted, plain in words]) == 0
    assert capsys.readouterr().out == shown


def test_the_align_example(
    export_artifact: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of word alignments prints a line for each word of the target."""
    translators.save("t5", tmp_path / "t5")
    with serving(export_artifact(tmp_path / "t5"), Session) as running:
        exec(compile(example("align").replace(ADDRESS, running.address), "README.md", "exec"), {})  # noqa: S102
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert words == ["der", "alte", "mann", "sass", "am", "fluss"]


def test_every_module_is_in_the_table() -> None:
    """A newcomer finds each module of both halves in the README."""
    root = Path(__file__).parents[1]
    for path in (*(root / "model").glob("*.py"), *(root / "service").glob("*.py")):
        if path.stem not in ("__init__", "__main__") and path.parent.name + "/errors.py" != "model/errors.py":
            assert f"{path.name}" in README, path


def test_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of families is what `attencode families` prints, one row for each that can be loaded."""
    from model.families import FAMILIES

    assert main(["families"]) == 0
    printed = capsys.readouterr().out
    assert README.split("<!-- families -->\n")[1].split("<!-- /families -->")[0] == printed
    assert [line.split(" | ")[0].removeprefix("| ") for line in printed.splitlines()[2:]] == list(FAMILIES)
    assert all(family.about.models for family in FAMILIES.values())
    assert main(["families", "--json"]) == 0
    assert [row["model_type"] for row in json.loads(capsys.readouterr().out)["families"]] == list(FAMILIES)
