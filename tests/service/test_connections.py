"""What one connection may have open and unanswered, and what becomes of connections that are of no use."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import Authority

import attencode
from attencode import Client, QueueFull
from service.pb import encoder_pb2 as pb
from service.server import Server
from tests.service.keyed import APART, ENCODE, REQUEST, STREAM, Keys, address, refused, retry_delay_s, serving

# Frames of HTTP/2, RFC 9113: 3.4, 6.5 and 6.7.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, SETTINGS_ACK, PING = (
    bytes((0, 0, size, kind, flags, 0, 0, 0, 0)) for size, kind, flags in ((0, 4, 0), (0, 4, 1), (8, 6, 0))
)


@pytest.fixture(scope="module")
def open_server(tiny_artifact: Path) -> Iterator[Server]:
    """Serve without keys, and with few streams and requests for one connection."""
    with serving(tiny_artifact, max_connection_requests=4, max_connection_streams=2, max_queue_delay_ms=300) as started:
        yield started


def test_a_call_without_a_message(open_server: Server) -> None:
    """A call that ends before it says anything is told so; nobody waits for a request that cannot come."""
    with grpc.insecure_channel(address(open_server)) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(ENCODE)(iter(()), timeout=20)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "send one request" in caught.value.details()


def open_streams(target: str, count: int, **options: Any) -> tuple[grpc.Channel, list[Any], threading.Event]:
    """Open streams over one connection, each of which has one item answered and stays open."""
    channel = grpc.insecure_channel(target, options=APART)
    done, calls = threading.Event(), []

    def items() -> Iterator[bytes]:
        yield pb.EncodeStreamRequest(id=0, request=REQUEST).SerializeToString()
        done.wait(60)

    for _ in range(count):
        call = channel.stream_stream(STREAM)(items(), timeout=60, **options)
        next(call)
        calls.append(call)
    return channel, calls, done


def test_streams_of_one_connection(open_server: Server) -> None:
    """Beyond what a connection may have open, a stream is refused at once; another connection has its own."""
    before = refused("connection_streams")
    channel, calls, done = open_streams(address(open_server), 2)
    with channel:
        refusal = channel.stream_stream(STREAM)(iter(()), timeout=20)
        assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_delay_s(refusal) > 0
        assert "--max-connection-streams" in refusal.details()
        assert dict(refusal.trailing_metadata())["attencode-refused-reason"] == "connection_streams"
        assert refused("connection_streams") - before == 1
        other, more, other_done = open_streams(address(open_server), 2)
        with other:
            done.set()
            other_done.set()
            for call in (*calls, *more):
                assert not list(call)
                assert call.code() == grpc.StatusCode.OK
        again, calls, done = open_streams(address(open_server), 2)
        done.set()
        assert [call.code() for call in calls] == [grpc.StatusCode.OK] * 2
        again.close()


def test_requests_of_one_connection(open_server: Server) -> None:
    """Beyond what a connection may have unanswered, calls and items are refused; another connection has its own."""
    before = refused("connection_requests")

    async def many(client: attencode.AsyncClient) -> list[object]:
        calls = [client.encode("abc") for _ in range(4)]
        items = client.encode_stream([attencode.encode_request("abc")] * 3)
        running = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.1)  # they are in work for 0.3 s
        answers: list[object] = [answer async for answer in items]
        return [*answers, *await asyncio.gather(*running, return_exceptions=True)]

    async def both() -> tuple[list[object], object]:
        async with (
            attencode.AsyncClient(address(open_server), options=APART) as client,
            attencode.AsyncClient(address(open_server), options=APART) as other,
        ):
            answers, one = await asyncio.gather(many(client), other.encode("abc"))
            await client.encode("abc")
            return answers, one

    answers, _ = asyncio.run(both())
    full = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert len(full) == 3
    assert "--max-connection-requests" in str(full[0])
    assert full[0].retry_delay_s > 0
    assert refused("connection_requests") - before == 3


def test_connections_are_forgotten(tiny_artifact: Path, open_server: Server, tmp_path: Path) -> None:
    """Neither answered calls, nor cancelled ones, nor refused ones leave anything behind."""
    channel, calls, _ = open_streams(address(open_server), 2)
    assert len(open_server._access.connections) == 1
    for call in calls:
        call.cancel()
    with Client(address(open_server), options=APART, timeout_s=0.05) as client, pytest.raises(attencode.AttencodeError):
        client.encode("abc")
    channel.close()
    wait_until(lambda: not len(open_server._access.connections))
    made = Keys(tmp_path)
    rated = made.add("rated", requests_per_second=0.001, burst=1)
    with serving(tiny_artifact, api_keys=str(made.path)) as server:
        with Client(address(server), api_key=rated) as client:
            client.encode("abc")
            for _ in range(3):
                with pytest.raises(QueueFull):
                    client.encode("abc")
        assert not len(server._access.connections)
        (grant,) = server._keys._grants.values()
        assert not grant.in_work


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def spoken(sock: socket.socket, within_s: float = 20.0) -> bytes:
    """Give what a server says until it closes the connection."""
    sock.settimeout(within_s)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(65536):
            said += chunk
    return said


def dialled(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


@pytest.fixture(scope="module")
def hasty(tiny_artifact: Path) -> Iterator[Server]:
    """Serve with no patience for connections that do not answer."""
    with serving(tiny_artifact, keepalive_time_s=1) as started:
        yield started


def test_a_connection_that_says_nothing(tiny_artifact: Path) -> None:
    """It is closed when its time for the first words is up, and so is one that says half of them; others are served."""
    with (
        serving(tiny_artifact, handshake_timeout_s=1) as server,
        dialled(server) as silent,
        dialled(server) as half,
        Client(address(server)) as client,
    ):
        half.sendall(PREFACE[:10])
        before = client.encode("abc").pooled
        began = time.monotonic()
        for closed in (silent, half):
            spoken(closed)  # which fails if it is not closed
        assert time.monotonic() - began < 15
        assert (client.encode("abc").pooled == before).all()


def test_a_connection_that_says_nothing_of_tls(tiny_artifact: Path, tmp_path: Path) -> None:
    """With TLS it is closed as well."""
    files = Authority(tmp_path).sign("server")
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key), "handshake_timeout_s": 1}
    with serving(tiny_artifact, **settings) as server, dialled(server) as silent, dialled(server) as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")  # a handshake's first bytes, RFC 8446, section 5.1
        assert spoken(silent) == b""
        spoken(half)


def test_a_peer_that_is_gone(hasty: Server) -> None:
    """One that does not answer a ping, as a machine without power does not, is closed, though it began as it should."""
    with dialled(hasty) as sock:
        sock.sendall(PREFACE + SETTINGS + SETTINGS_ACK)
        began = time.monotonic()
        said = spoken(sock)
        assert PING in said
        assert time.monotonic() - began < 20


def test_a_peer_that_pings_without_end(hasty: Server) -> None:
    """It is told to be calm and closed."""
    with dialled(hasty) as sock:
        sock.sendall(PREFACE + SETTINGS + SETTINGS_ACK)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(20):
                sock.sendall(PING + bytes(8))
                time.sleep(0.02)
        assert b"too_many_pings" in spoken(sock)


def test_a_connection_without_calls(tiny_artifact: Path) -> None:
    """It is closed after its time, without a call that fails: the next one opens another."""
    states = []
    with (
        serving(tiny_artifact, max_connection_idle_s=1) as server,
        grpc.insecure_channel(address(server), options=APART) as channel,
    ):
        channel.subscribe(states.append)
        encode = channel.unary_unary(ENCODE)
        encode(REQUEST.SerializeToString(), timeout=20)
        wait_until(lambda: states[-1:] == [grpc.ChannelConnectivity.IDLE] and len(states) > 2)
        closed = len(states)
        assert pb.EncodeResponse.FromString(encode(REQUEST.SerializeToString(), timeout=20)).results
        wait_until(lambda: grpc.ChannelConnectivity.READY in states[closed:])
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states


def test_more_connections_than_there_may_be(tiny_artifact: Path) -> None:
    """Those beyond are closed at once, and those that are there are served; one that goes makes room."""
    with serving(tiny_artifact, max_connections=2) as server:
        one, two, three = (Client(address(server), options=APART) for _ in range(3))
        with two, three:
            with one:
                one.encode("abc")
                two.encode("abc")
                with pytest.raises(attencode.Unavailable, match="as many connections as it may"):
                    three.encode("abc")
                one.encode("abc")

            def served() -> bool:
                try:
                    three.encode("abc")
                except attencode.Unavailable:
                    return False
                return True

            wait_until(served)


def test_metadata_without_end(open_server: Server) -> None:
    """Metadata beyond 8 KiB are refused by gRPC itself, with a status; less is let through."""
    with grpc.insecure_channel(address(open_server)) as channel:
        encode = channel.unary_unary(ENCODE)
        encode(REQUEST.SerializeToString(), metadata=[("x", "a" * 6000)], timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            encode(REQUEST.SerializeToString(), metadata=[("x", "a" * 9000)], timeout=20)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
