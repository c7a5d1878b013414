"""Raw sockets: what no client sends. Other callers get their answers, and nothing of it stays behind."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import raw
from raw import Connection, frame, headers, message

from attencode import Client
from service.pb import encoder_pb2 as pb

SANE_S = 10.0  # for any answer to another caller meanwhile; it is a bound for hangs
MIB = 2**20
GOOD = pb.EncodeRequest(inputs=[pb.Input(text="abc")]).SerializeToString()
STATUS = {code.value[0]: code.name for code in grpc.StatusCode}


@pytest.fixture(scope="module")
def server(spawn_for_all: Callable[..., Any], tiny_artifact: Path) -> Any:
    """Give a server process of the tiny BERT."""
    return spawn_for_all(tiny_artifact, "--provider", "cpu", "--precision", "float32", "--health-port", "0")


@contextmanager
def unharmed(server: Any, *, memory: int = 96 * MIB) -> Iterator[None]:
    """Keep another caller busy meanwhile; then the server must be as it was, its descriptors and its memory too."""
    process = psutil.Process(server.process.pid)
    with Client(server.address, timeout_s=SANE_S) as client:
        expected = client.encode("abc").pooled
        descriptors, resident = process.num_fds(), process.memory_info().rss
        faults: list[BaseException] = []
        done, most = threading.Event(), resident

        def work() -> None:
            nonlocal most
            try:
                while not done.wait(0.01):
                    np.testing.assert_allclose(client.encode("abc").pooled, expected, atol=1e-5)
                    most = max(most, process.memory_info().rss)
            except BaseException as error:  # noqa: BLE001 - told to the test below
                faults.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        assert not faults
        end_s = time.monotonic() + 20
        while process.num_fds() > descriptors + 2 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert process.num_fds() <= descriptors + 2, "connections that are closed stay open on the server"
        assert server.process.poll() is None
        assert most - resident < memory
        np.testing.assert_allclose(client.encode("abc").pooled, expected, atol=1e-5)


def ended(server: Any, body: bytes, **others: Any) -> str:
    """Send one call with these bytes and give what becomes of it."""
    with unharmed(server), Connection(server.address) as connection:
        connection.call(1, body, **others)
        seen = connection.read(until=1)
        if 1 in seen.statuses:
            return STATUS[seen.statuses[1]]
        return f"reset {seen.reset[1]}" if 1 in seen.reset else f"goaway {seen.goaway}" if seen.closed else "nothing"


def test_bytes_that_are_no_http2(server: Any) -> None:
    """Garbage, HTTP/1.1 and a wrong beginning end their own connection."""
    nonsense = random.Random(1).randbytes(20_000)
    with unharmed(server):
        for data in (nonsense, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", raw.PREFACE.replace(b"2.0", b"3.0")):
            with Connection(server.address, preface=False) as connection:
                connection.send(data)
                assert connection.read().closed
        with Connection(server.address) as connection:
            connection.send(nonsense)
            assert connection.read().closed


def test_connections_that_go_no_further(server: Any) -> None:
    """Hundreds that were opened and say nothing, or no more than the beginning, keep nobody out, and leave nothing."""
    with unharmed(server), ExitStack() as held:
        for number in range(300):
            held.enter_context(Connection(server.address, preface=number % 2 == 0))
        with Client(server.address, timeout_s=SANE_S) as another:
            assert another.encode("abc").pooled is not None


def repeated(data: Callable[[int], bytes], count: int) -> bytes:
    return b"".join(data(number) for number in range(count))


def begun(number: int) -> bytes:
    return frame(raw.HEADERS, raw.END_HEADERS, 2 * number + 1, raw.block(headers()))


def reset(number: int) -> bytes:
    return frame(raw.RST_STREAM, 0, 2 * number + 1, b"\0\0\0\x08")


def asked(number: int) -> bytes:
    return begun(number) + frame(raw.DATA, raw.END_STREAM, 2 * number + 1, message(GOOD))


FLOODS: dict[str, Callable[[], bytes]] = {
    "settings": lambda: raw.settings() * 50_000,
    "pings": lambda: frame(raw.PING, 0, 0, b"12345678") * 50_000,
    "begun and reset": lambda: repeated(lambda number: begun(number) + reset(number), 10_000),
    "asked and reset": lambda: repeated(lambda number: asked(number) + reset(number), 5_000),
    "headers without an end": lambda: (
        frame(raw.HEADERS, 0, 1, raw.block(headers()))
        + frame(raw.CONTINUATION, 0, 1, raw.block([("x", "y" * 16_000)])) * 2_000
    ),
    "a header that is meant thousands of times": lambda: frame(
        raw.HEADERS,
        raw.END_HEADERS,
        1,
        raw.block(headers()) + b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4_000 + b"\xbe" * 12_000,
    ),
    "a number without an end": lambda: frame(raw.HEADERS, raw.END_HEADERS, 1, b"\xff" * 5_000),
    "windows": lambda: frame(raw.WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 50_000,
    "empty data": lambda: begun(0) + frame(raw.DATA, 0, 1) * 50_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood(server: Any, name: str) -> None:
    """Frames by the ten thousand cost others nothing, and the server no memory that stays."""
    with unharmed(server), Connection(server.address) as connection:
        connection.send(FLOODS[name]())
        connection.read(for_s=2)
