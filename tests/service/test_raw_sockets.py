"""Raw sockets: what no client sends. Other callers get their answers, and nothing of it stays behind."""

import gzip
import random
import socket
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
from authority import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw import Connection, frame, headers, message

from attencode import Client, Tls
from service.config import ServiceConfig
from service.pb import encoder_pb2 as pb
from tests.service.faults.load import wait_until
from tests.service.streams import STREAM, metric

SANE_S = 10.0  # for any answer to another caller meanwhile; it is a bound for hangs
MIB = 2**20
GOOD = pb.EncodeRequest(inputs=[pb.Input(text="abc")]).SerializeToString()
STATUS = {code.value[0]: code.name for code in grpc.StatusCode}


@pytest.fixture(scope="module")
def server(spawn_for_all: Callable[..., Any], tiny_artifact: Path) -> Any:
    """Give a server process of the tiny BERT."""
    started = spawn_for_all(tiny_artifact, "--provider", "cpu", "--precision", "float32", "--health-port", "0")
    with Client(started.address) as client:
        client.encode("abc", attention=True)  # opens what is opened when attention is first asked for
    return started


@contextmanager
def unharmed(server: Any, *, memory: int = 96 * MIB) -> Iterator[list[float]]:
    """Keep another caller busy meanwhile; then the server must be as it was, its descriptors and its memory too.

    Gives a list that grows by the seconds of each of that caller's answers, all of them right.
    """
    process = psutil.Process(server.process.pid)
    with Client(server.address, timeout_s=SANE_S) as client:
        expected = client.encode("abc").pooled
        descriptors, resident = process.num_fds(), process.memory_info().rss
        faults: list[BaseException] = []
        done, most = threading.Event(), resident
        answers: list[float] = []

        def work() -> None:
            nonlocal most
            try:
                while not done.wait(0.001):
                    began = time.monotonic()
                    np.testing.assert_allclose(client.encode("abc").pooled, expected, atol=1e-5)
                    answers.append(time.monotonic() - began)
                    most = max(most, process.memory_info().rss)
            except BaseException as error:  # noqa: BLE001 - told to the test below
                faults.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield answers
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
    "begun and reset": lambda: repeated(lambda number: begun(number) + reset(number), 20_000),
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
    with unharmed(server) as answers, Connection(server.address) as connection:
        connection.send(FLOODS[name]())
        connection.read(for_s=2)
        before = len(answers)
        wait_until(lambda: len(answers) >= before + 3)
    assert max(answers) < SANE_S


def squeezed(count: int) -> bytes:
    """Give zeros that were compressed: a thousand times as many as there are bytes."""
    return message(gzip.compress(b"\0" * count, mtime=0), compressed=1)


@pytest.mark.parametrize(
    ("body", "others", "expected"),
    [
        (message(GOOD), {}, "OK"),
        (message(GOOD) * 2, {}, "OK"),
        (message(gzip.compress(GOOD, mtime=0), compressed=1), {"grpc_encoding": "gzip"}, "OK"),
        (message(GOOD, length=3), {}, "INVALID_ARGUMENT"),
        (message(GOOD, compressed=7), {}, "INVALID_ARGUMENT"),
        (b"", {}, "INVALID_ARGUMENT"),
        (message(GOOD, length=1000), {}, "INVALID_ARGUMENT"),
        (message(GOOD, length=2**32 - 1), {}, "RESOURCE_EXHAUSTED"),
        (squeezed(50 * MIB), {"grpc_encoding": "gzip"}, "RESOURCE_EXHAUSTED"),
        (message(GOOD), {"path": "/attencode.v1.Encoder/Nothing"}, "UNIMPLEMENTED"),
        (message(GOOD), {"path": "/some.Other/Encode"}, "UNIMPLEMENTED"),
        (message(GOOD), {"grpc_timeout": "0n"}, "DEADLINE_EXCEEDED"),
        (message(GOOD), {"grpc_timeout": "99999999H"}, "OK"),
        (message(GOOD), {"content_type": "text/plain"}, "OK"),
        (message(GOOD), {"x": "y" * 9_000}, "OK"),
        # Of these gRPC itself says INTERNAL, as its specification has it for what is no gRPC.
        (message(GOOD, compressed=1), {}, "INTERNAL"),
        (message(b"garbage", compressed=1), {"grpc_encoding": "gzip"}, "INTERNAL"),
        (message(GOOD, compressed=1), {"grpc_encoding": "snappy"}, "INTERNAL"),
        (message(GOOD), {"grpc_timeout": "soon"}, "INTERNAL"),
        (message(GOOD), {"grpc_timeout": "-1S"}, "INTERNAL"),
        (message(GOOD), {"x_bin": "%%%"}, "INTERNAL"),
        (message(GOOD), {"X": "y"}, "INTERNAL"),
        (message(GOOD), {"path": None}, "reset 2"),
        (message(GOOD), {"te": None}, "reset 2"),
        (message(GOOD), {":method": "GET"}, "reset 2"),
    ],
)
def test_a_call_as_nobody_makes_it(server: Any, body: bytes, others: dict[str, Any], expected: str) -> None:
    """It ends with the status that says whose fault it is; what is compressed is not inflated beyond the limit."""
    assert ended(server, body, **others) == expected


@pytest.mark.parametrize(("size", "expected"), [(20, 0), (40, 3), (1_000, 3)])
def test_metadata_that_grpc_does_not_count(server: Any, size: int, expected: int) -> None:
    """Headers that shall never be indexed pass gRPC's limit, and not ours, on a stream neither."""
    data = raw.block([*headers(), *((f"x{number}", "y" * 1_000) for number in range(size))])
    stream = raw.block([*headers(STREAM), *((f"x{number}", "y" * 1_000) for number in range(size))])
    for block in (data, stream):
        parts = [block[start : start + 16_384] for start in range(0, len(block), 16_384)]
        kinds = [raw.HEADERS, *[raw.CONTINUATION] * (len(parts) - 1)]
        flags = [0] * (len(parts) - 1) + [raw.END_HEADERS]
        with unharmed(server), Connection(server.address) as connection:
            connection.send(*(frame(kind, flag, 1, part) for kind, flag, part in zip(kinds, flags, parts, strict=True)))
            connection.send(frame(raw.DATA, raw.END_STREAM, 1, message(GOOD) if block is data else b""))
            told = connection.read(until=1).statuses[1]
            assert told == expected or (expected and told == 8)  # gRPC's own, where it does notice


def test_many_that_inflate_at_once(server: Any) -> None:
    """Compressed messages that would be 800 MB together take no memory to speak of."""
    with unharmed(server), ExitStack() as held:
        connections = [held.enter_context(Connection(server.address)) for _ in range(16)]
        body = squeezed(50 * MIB)
        for connection in connections:
            connection.call(1, body, grpc_encoding="gzip")
        for connection in connections:
            assert connection.read(until=1, for_s=20).statuses == {1: 8}


def test_a_header_that_is_no_text(spawn_local: Callable[..., Any], tiny_artifact: Path) -> None:
    """It is in no log line: it may be a key, and a call may have thousands of them."""
    server = spawn_local(tiny_artifact, "--provider", "cpu", "--precision", "float32")
    with Connection(server.address) as connection:
        secret = raw.block(headers()) + b"\x00\x0dauthorization\x0fBearer OPEN\xff\xfe\xfd\xfc"
        connection.send(frame(raw.HEADERS, raw.END_HEADERS, 1, secret), frame(raw.DATA, 1, 1, message(GOOD)))
        assert connection.read(until=1).statuses == {1: 0}
    server.terminate()
    told = server.process.stderr.read()
    assert "OPEN" not in told
    assert "Traceback" not in told


def test_data_beyond_the_window(server: Any) -> None:
    """Who sends more than was allowed loses the call or the connection, not the server its memory."""
    with unharmed(server), Connection(server.address) as connection:
        first = frame(raw.HEADERS, raw.END_HEADERS, 1, raw.block(headers()))
        connection.send(first, frame(raw.DATA, 0, 1, message(b"a" * 16_000, length=4 * 10**6)))
        connection.send(frame(raw.DATA, 0, 1, b"a" * 16_384) * 4_000)
        seen = connection.read(until=1)
        assert 1 in seen.reset or seen.closed


def test_readers_without_a_window(server: Any) -> None:
    """Answers for which their reader makes no room wait without harm; when it leaves they are gone."""
    large = pb.EncodeRequest(
        inputs=[pb.Input(text="a " * 38)] * 20, attention=pb.AttentionOptions()
    ).SerializeToString()
    # 60 MB of answers, each held in some copies
    with unharmed(server, memory=384 * MIB) as answers, ExitStack() as held:
        for _ in range(10):
            connection = held.enter_context(Connection(server.address, preface=False))
            connection.send(raw.PREFACE, raw.settings(window=0))
            for number in range(20):
                connection.call(2 * number + 1, message(large))
        time.sleep(1)
    assert answers
    assert max(answers) < SANE_S


def test_connections_cut_within_a_message(server: Any) -> None:
    """Half a message whose sender is gone, or says nothing more, leaves nothing behind."""
    with unharmed(server) as answers:
        for number in range(100):
            with Connection(server.address) as connection:
                connection.call(1, message(GOOD, length=5_000), end=False)
                if number % 2:
                    connection.socket.shutdown(socket.SHUT_WR)
                else:  # a reset instead of an end
                    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: len(answers) >= 3)
    assert max(answers) < SANE_S


def test_a_half_closed_connection(server: Any) -> None:
    """A call whose sender closes its side behind the request ends, with or without its answer."""
    with unharmed(server), Connection(server.address) as connection:
        connection.call(1, message(GOOD))
        connection.socket.shutdown(socket.SHUT_WR)
        seen = connection.read(for_s=20)
        assert seen.closed or 1 in seen.statuses


def test_the_other_ports(server: Any) -> None:
    """Silence and garbage on the ports of health and metrics harm neither, nor the calls."""
    host, health_port = server.address.partition(":")[0], int(server.line.split("health on port ")[1].split(";")[0])
    with unharmed(server), ExitStack() as held:
        for port in (health_port, server.metrics_port):
            for number in range(200):
                connection = held.enter_context(Connection(f"{host}:{port}", preface=False))
                connection.send(random.Random(number).randbytes(50) if number % 2 else b"P")
        with grpc.insecure_channel(f"{host}:{health_port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SANE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert metric(server, "attencode_requests_in_flight") >= 0


def test_tls_that_does_not_come_about(spawn_local: Callable[..., Any], tiny_artifact: Path, tmp_path: Path) -> None:
    """On a port of TLS, garbage ends its connection, and hundreds that say nothing keep nobody out."""
    files = Authority(tmp_path).sign("server")
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    server = spawn_local(tiny_artifact, "--provider", "cpu", "--precision", "float32", *flags)
    with ExitStack() as held:
        silent = [held.enter_context(Connection(server.address, preface=False)) for _ in range(200)]
        for connection in silent[:20]:
            connection.send(b"\x16\x03\x01\x02\x00" + random.Random(1).randbytes(600))
            assert connection.read().closed
        plain = held.enter_context(Connection(server.address))
        assert plain.read().closed
        with Client(server.address, timeout_s=SANE_S, tls=Tls(ca=str(tmp_path / "ca.pem"))) as client:
            assert client.encode("abc").pooled is not None
    process = psutil.Process(server.process.pid)
    end_s = time.monotonic() + 20
    while (connections := len(process.net_connections())) > 4 and time.monotonic() < end_s:
        time.sleep(0.1)
    assert connections <= 4


@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "TLS"])
def test_silence_at_the_beginning(
    spawn_local: Callable[..., Any], tiny_artifact: Path, tmp_path: Path, tls: bool
) -> None:
    """A connection that does not say what it is, or says half of it, is closed by the server."""
    if "handshake_timeout_s" not in ServiceConfig.model_fields:
        pytest.skip("this server leaves the time of a handshake to gRPC, which is two minutes")
    flags = ["--provider", "cpu", "--precision", "float32", "--handshake-timeout-s", "1"]
    if tls:
        files = Authority(tmp_path).sign("server")
        flags += ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    server = spawn_local(tiny_artifact, *flags)
    with ExitStack() as held:
        silent = [held.enter_context(Connection(server.address, preface=False)) for _ in range(20)]
        for connection in silent[:10]:
            connection.send(b"\x16\x03\x01" if tls else raw.PREFACE[:10])
        assert all(connection.read(for_s=15).closed for connection in silent)
