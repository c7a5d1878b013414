"""The clients in other languages, as examples/README.md has them run, against a live server."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "examples/README.md").read_text()
JARS = Path("/usr/share/java")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(minilm_artifact: Path) -> Iterator[str]:
    """Give the address of a server with a short queue, as the README has it started."""
    flags = ["--port", "0", "--metrics-port", "none", "--max-queue-size", "32"]
    command = [sys.executable, "-m", "service", "serve", str(minilm_artifact), *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        found = re.search(r" at (\S+:\d+),", server.stdout.readline())
        assert found
        yield found[1]
        server.terminate()
        assert server.wait(60) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a copy of the examples beside the contract, to build in."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    ignored = shutil.ignore_patterns("node_modules", "build")
    return Path(shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=ignored))


def run(name: str, address: str, folder: Path) -> list[str]:
    """Run the README's commands for an example and give the lines that it prints."""
    found = re.search(rf"<!-- test: {name} -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert found
    commands = "set -e\n" + found[1].replace("127.0.0.1:50051", address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # buf-bin brings buf there
    result = subprocess.run(
        ["sh", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def shown(name: str) -> list[str]:
    """Give the lines that the README shows for an example."""
    return README.split(f"<!-- test: {name} -->")[1].split("```text\n")[1].split("```")[0].splitlines()


def without_numbers(lines: list[str]) -> list[str]:
    """Leave out how much was waiting, and for how long one should."""
    return [re.sub(r"\d+ inputs wait|[\d.]+ s$|[\d.]+$", "#", line) if "error: " in line else line for line in lines]


def test_node(address: str, folder: Path) -> None:
    """The Node client prints what the README shows."""
    modules = ROOT / "examples/node/node_modules"
    if not shutil.which("node") or not modules.is_dir():
        pytest.skip("node or its packages are not installed; `make examples` fetches them")
    (folder / "node/node_modules").symlink_to(modules)
    assert without_numbers(run("node", address, folder)) == without_numbers(shown("node"))


def test_java(address: str, folder: Path) -> None:
    """The Java client is built by the README's commands and prints what it shows."""
    tools = ("javac", "protoc", "grpc_java_plugin")
    if not all(map(shutil.which, tools)) or not (JARS / "grpc-netty.jar").exists():
        pytest.skip("a JDK, protoc or grpc-java is not installed; examples/README.md names the packages")
    assert without_numbers(run("java", address, folder)) == without_numbers(shown("java"))


def test_buf(address: str, folder: Path) -> None:
    """`buf curl` finds the contract by reflection, and shows answers, an item's error, details and a deadline."""
    if not shutil.which("buf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pytest.skip("buf is not installed; the package buf-bin brings it")
    said = {}
    for part in "\n".join(run("buf", address, folder)).split("== ")[1:]:
        name, rest = part.split("\n", 1)
        said[name] = [*documents(rest)]
    (unary,) = said["unary"]
    assert unary["pooled"]["shape"] == ["1", "4"]
    assert len(base64.b64decode(unary["pooled"]["data"])) == 16
    good, bad = said["stream"]
    assert (good["id"], good["response"]["pooled"]) == ("1", unary["pooled"])
    assert (bad["id"], bad["error"]["code"]) == ("2", 3)
    (full,) = said["error"]
    assert full["code"] == "resource_exhausted"
    assert [detail["type"] for detail in full["details"]] == ["google.rpc.RetryInfo"]
    late, code = said["deadline"]
    assert (late["code"], code) == ("deadline_exceeded", "exit code 32")


def documents(text: str) -> Iterator[Any]:
    """Read JSON objects one behind the other, and other lines as they are."""
    while text := text.strip():
        if text.startswith("{"):
            document, end = json.JSONDecoder().raw_decode(text)
            yield document
        else:
            end = len(text.partition("\n")[0])
            yield text[:end]
        text = text[end:]
