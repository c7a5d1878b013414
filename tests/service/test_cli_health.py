"""`attencode health`: an exit status and one line, for health checks of containers."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli import main


@pytest.mark.parametrize("name", ["", "liveness", "attencode.v1.Encoder"])
def test_a_server_that_serves(minilm_address: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is SERVING gives 0 and one line that says so."""
    assert main(["health", "--address", minilm_address, "--service", name]) == 0
    printed = capsys.readouterr()
    asked = f"{name} at {minilm_address}" if name else minilm_address
    assert (printed.out, printed.err) == (f"{asked}: SERVING\n", "")


def test_a_name_that_is_not_known(minilm_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is not served is not healthy: 1, and the status in one line on stderr."""
    assert main(["health", "--address", minilm_address, "--service", "attencode.v1.Encoder/other"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"attencode.v1.Encoder/other at {minilm_address}: NOT_FOUND")
    assert printed.err.count("\n") == 1


def test_a_server_that_drains(spawn_local: Callable, tiny_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From SIGTERM on the server is not ready, and still alive."""
    server = spawn_local(tiny_artifact, "--drain-delay-s", "20", "--provider", "cpu")
    server.process.terminate()
    for _ in range(100):  # the signal is on its way
        ready = main(["health", "--address", server.address, "--service", "attencode.v1.Encoder"])
        if ready:
            break
    assert ready == 1
    assert "attencode.v1.Encoder at" in (line := capsys.readouterr().err)
    assert line.endswith("NOT_SERVING\n")
    assert main(["health", "--address", server.address, "--service", "liveness"]) == 0


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a server it is 1 and one line, within the deadline."""
    with socket.socket() as bound:  # bound and not listening: whoever connects is refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert main(["health", "--address", address, "--timeout", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith((f"{address}: UNAVAILABLE", f"{address}: DEADLINE_EXCEEDED"))
    assert printed.err.count("\n") == 1


def test_an_address_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty address is refused as the other commands refuse it."""
    assert main(["health", "--address", ""]) == 1
    assert "give host and port" in capsys.readouterr().err
