"""Scrape: the port for Prometheus answers, whatever others do to it."""

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from service import scrape
from service.scrape import Scrape


@pytest.fixture
def port() -> Iterator[int]:
    """Give the port of a scrape that runs."""
    served = Scrape("127.0.0.1", 0)
    yield served.port
    served.close()


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_it_answers(port: int) -> None:
    """It gives all metrics as text."""
    assert "# TYPE attencode_requests_in_flight gauge" in page(port) or "python_info" in page(port)


def test_an_address_of_ipv6() -> None:
    """It listens where it is told to."""
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        served = Scrape("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with urllib.request.urlopen(f"http://[::1]:{served.port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    served.close()


def test_hundreds_that_say_nothing(port: int) -> None:
    """Of connections that say nothing only some are held, and who asks is answered."""
    silent = []
    try:
        for _ in range(300):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            silent[-1].send(b"GET /metrics HTTP/1.1\r\nx: ")
        assert "python_info" in page(port)
        assert threads() <= scrape._MOST_CONNECTIONS + 4
    finally:
        for connection in silent:
            connection.close()


def test_who_gives_way_costs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was ended in the middle of its request is not answered: only who asks is."""
    asked = []

    def app(_environ: object, start: Callable[..., object]) -> list[bytes]:
        asked.append(time.monotonic())
        start("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    monkeypatch.setattr(scrape, "make_wsgi_app", lambda: app)
    served = Scrape("127.0.0.1", 0)
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(100)]
    try:
        for connection in silent:
            connection.send(b"GET /metrics HTTP/1.1\r\nx: ")
        assert page(served.port) == "ok"
        for connection in silent[: 100 - scrape._MOST_CONNECTIONS]:
            assert connection.recv(100) == b""
        assert len(asked) == 1
    finally:
        for connection in silent:
            connection.close()
        served.close()


def test_a_connection_has_its_time(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that speaks, but slowly, is closed, without a traceback."""
    monkeypatch.setattr(scrape, "_WHOLE_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        end_s = time.monotonic() + 20
        with pytest.raises(OSError):  # noqa: PT012 - a reset or a broken pipe, as it comes
            while time.monotonic() < end_s:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < end_s
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_reader_that_leaves(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """One that closes before its answer has come leaves no traceback and no thread."""
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as hasty:
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            hasty.send(b"GET /metrics HTTP/1.1\r\n\r\n")
    end_s = time.monotonic() + 20
    while threads() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not threads()
    assert "Traceback" not in "".join(capfd.readouterr())
