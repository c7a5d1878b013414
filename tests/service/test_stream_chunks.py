"""Streams of large answers on a real server: the same answers as Encode's, bounded memory, and streams that go on."""

import asyncio
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import attencode
from attencode import Client
from service.chunks import CHUNK_BYTES
from service.pb import encoder_pb2 as pb

STREAM = "/attencode.v1.Encoder/EncodeStream"
LONG = "time flies like an arrow and fruit flies like a banana " * 12  # 134 tokens, 5.2 MB of attention
LONGER = LONG * 2  # 256 tokens, 18.9 MB
UNHURRIED = [("grpc.http2.bdp_probe", 0)]  # gRPC itself reads no further ahead than 64 KiB
SELECTIONS: list[dict[str, Any]] = [
    {"attention": True},
    {"attention": True, "data_type": "float16"},
    {"attention": [0], "heads": [3]},
    {"attention": True, "token_embeddings": True, "hidden_states": True, "pooled": True},
    {"hidden_states": True},
    {"hidden_states": [-1, 0], "data_type": "float16"},
    {"token_embeddings": True},
]


@pytest.fixture(scope="module")
def narrow(serve: Callable[..., str], minilm_artifact: Path) -> str:
    """Give a server that has room for one large answer and a half."""
    return serve(minilm_artifact, max_message_bytes=2**22, max_answer_bytes=28_000_000)


@pytest.mark.parametrize("options", SELECTIONS, ids=str)
def test_streams_answer_as_encode_does(minilm_client: Client, options: dict[str, Any]) -> None:
    """Every tensor of a streamed answer is that of Encode, of one input and of several, chunked or not."""
    for inputs in ([LONG], [LONG, "a", LONG + "and so on", "time flies"]):
        (streamed,) = minilm_client.encode_stream([attencode.encode_request(inputs, **options)])
        whole = minilm_client.encode(inputs, **options)
        assert isinstance(streamed, attencode.EncodeResult)
        for got, expected in zip([streamed, *streamed.results], [whole, *whole.results], strict=True):
            for name in ("pooled", "token_embeddings", "hidden_states", "attention"):
                a, b = getattr(got, name, None), getattr(expected, name, None)
                assert (a is None) == (b is None)
                if a is not None:
                    assert (a.dtype, a.shape, a.flags.writeable) == (b.dtype, b.shape, b.flags.writeable)
                    np.testing.assert_allclose(a, b, atol=2e-3 if a.dtype == np.float16 else 1e-5)
        assert [item.tokens for item in streamed.results] == [item.tokens for item in whole.results]


def test_pooled_vectors_in_chunks(minilm_client: Client) -> None:
    """Pooled vectors of more than 1 MiB come in chunks like any tensor."""
    texts = [f"text {number}" for number in range(700)]
    (streamed,) = minilm_client.encode_stream([attencode.encode_request(texts)])
    assert isinstance(streamed, attencode.EncodeResult)
    assert streamed.pooled is not None
    assert streamed.pooled.nbytes > CHUNK_BYTES
    np.testing.assert_allclose(streamed.pooled, minilm_client.encode(texts).pooled, atol=1e-5)


def item(number: int, text: str, *, attention: bool = True) -> pb.EncodeStreamRequest:
    request = pb.EncodeRequest(inputs=[pb.Input(text=text)], attention=pb.AttentionOptions() if attention else None)
    return pb.EncodeStreamRequest(id=number, request=request)


def open_stream(client: Client, *items: pb.EncodeStreamRequest, timeout_s: float | None = 60.0) -> Any:
    """Begin a stream that is read by hand."""
    call = client._channel.stream_stream(
        STREAM,
        request_serializer=pb.EncodeStreamRequest.SerializeToString,
        response_deserializer=pb.EncodeStreamResponse.FromString,
    )
    return call(iter(items), timeout=timeout_s)


def test_nothing_comes_between_chunks(minilm_client: Client) -> None:
    """Small items before, between and after large ones keep their places, and no chunk is larger than 1 MiB."""
    items = [item(number, LONG if number % 3 == 1 else "small", attention=number % 3 == 1) for number in range(30)]
    received = list(open_stream(minilm_client, *items))
    assert [message.id for message in received] == sorted(message.id for message in received)
    assert {message.id for message in received} == set(range(30))
    for number in range(30):
        kinds = [message.WhichOneof("outcome") for message in received if message.id == number]
        assert kinds == ["response"] + ["chunk"] * (5 if number % 3 == 1 else 0)
    assert max(message.ByteSize() for message in received) < CHUNK_BYTES + 100


def test_too_large_for_encode_and_for_a_stream(serve: Callable[..., str], minilm_artifact: Path) -> None:
    """Encode says that EncodeStream takes more; a stream says what would fit, and goes on."""
    with Client(serve(minilm_artifact, max_message_bytes=2**20, max_answer_bytes=6_000_000)) as client:
        assert client.get_model().max_answer_bytes == 6_000_000
        with pytest.raises(attencode.InvalidRequest, match=r"more than .* 1,048,576; .*, or use EncodeStream"):
            client.encode(LONG, attention=True)
        with pytest.raises(attencode.InvalidRequest, match=r"more than .* 1,048,576; .*or shorter inputs$"):
            client.encode(LONGER, attention=True)
        assert client.attend(LONG).attention is not None
        with pytest.raises(
            attencode.InvalidRequest, match=r"6,000,000; ask for fewer attention layers or heads .*or shorter inputs$"
        ):
            client.attend(LONGER)
        requests = [attencode.encode_request(text, attention=True) for text in ("a", LONGER, LONG)]
        answers = [type(answer).__name__ for answer in client.encode_stream(requests)]
        assert answers == ["EncodeResult", "InvalidRequest", "EncodeResult"]
        many = [attencode.encode_request(["a time"] * 500, token_embeddings=True)]
        (answer,) = client.encode_stream(many)
        assert isinstance(answer, attencode.EncodeResult), "small tensors above the limit on messages, together"


def test_large_answers_wait_for_each_other(narrow: str) -> None:
    """While an unread answer fills the server's room, another stream's waits, small ones do not."""
    with Client(narrow, options=UNHURRIED) as slow, Client(narrow) as other:
        unread = open_stream(slow, item(0, LONGER))
        assert next(unread).WhichOneof("outcome") == "response"
        waiting = open_stream(other, item(0, LONGER), timeout_s=2.0)
        with pytest.raises(grpc.RpcError) as caught:
            next(waiting)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        assert len(list(other.encode_stream([attencode.encode_request("small", attention=True)] * 20))) == 20
        waiting = open_stream(other, item(0, LONGER))
        assert sum(len(message.chunk.data) for message in unread) > 18_000_000
        assert sum(len(message.chunk.data) for message in waiting) > 18_000_000


def test_left_streams_give_their_room_back(narrow: str) -> None:
    """A stream that is cancelled, or whose deadline passes, frees what it held, in part sent or not at all."""
    with Client(narrow, options=UNHURRIED) as slow, Client(narrow, timeout_s=20) as other:
        for number in range(4):
            unread = open_stream(slow, *(item(place, LONGER) for place in range(4)), timeout_s=60 if number % 2 else 2)
            next(unread)
            if number % 2:
                unread.cancel()
            else:
                time.sleep(2.5)
                with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                    list(unread)
            assert other.attend(LONGER).attention is not None


def private_bytes(pid: int) -> int:
    """Give the resident memory that is a process's own, without pages of Ray's object store."""
    info = psutil.Process(pid).memory_info()
    return int(info.rss - info.shared)


def test_a_slow_reader_of_one_large_answer(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """It costs its answers' bytes, others go on, and its deadline ends it and frees them."""
    server = spawn(minilm_artifact, "--provider", "cpu", "--max-message-bytes", str(2**23))
    inputs = [LONGER] * 4  # 75 MB
    with Client(server.address) as client, Client(server.address) as slow:
        list(client.encode_stream([attencode.encode_request(inputs, attention=True)] * 3))
        before = private_bytes(server.process.pid)
        request = attencode.encode_request(inputs, attention=True)
        answers = slow._streamed(iter([request] * 20), 4.0)
        next(answers)
        most = 0
        for _ in range(35):
            time.sleep(0.1)
            client.encode("hello")
            most = max(most, private_bytes(server.process.pid))
        assert most - before < 3 * 76_000_000
        with pytest.raises(attencode.DeadlineExceeded):
            list(answers)
        end_s = time.monotonic() + 10
        while private_bytes(server.process.pid) - before > 60_000_000 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert private_bytes(server.process.pid) - before <= 60_000_000


def metric(server: Any, name: str) -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5).read().decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(name + " "))


def test_a_reader_that_stalls_is_ended(spawn: Callable[..., Any], minilm_artifact: Path) -> None:
    """It needs no deadline for that: its memory is given back, and a status says why once it reads on."""
    server = spawn(minilm_artifact, "--provider", "cpu", "--stalled-after-s", "1.5")
    large = item(0, LONGER)
    large.request.inputs.extend([pb.Input(text=LONGER)] * 3)  # 75 MB
    with Client(server.address, options=UNHURRIED) as slow, Client(server.address) as other:
        for _ in range(2):
            list(open_stream(other, large, large))
        before = private_bytes(server.process.pid)
        unread = open_stream(slow, large, large, timeout_s=None)
        next(unread)
        end_s = time.monotonic() + 20
        while not metric(server, "attencode_stalled_streams_total") and time.monotonic() < end_s:
            assert other.encode("hello").pooled is not None
            time.sleep(0.1)
        assert metric(server, "attencode_stalled_streams_total") == 1
        while private_bytes(server.process.pid) - before > 40_000_000 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert private_bytes(server.process.pid) - before <= 40_000_000
        with pytest.raises(grpc.RpcError, match=r"RESOURCE_EXHAUSTED[^/]*nothing .* was read for 1.5 s"):
            list(unread)


def test_who_reads_now_and_then_is_not_ended(serve: Callable[..., str], minilm_artifact: Path) -> None:
    """A reader that takes a little within each time that is allowed keeps its stream."""
    with Client(serve(minilm_artifact, stalled_after_s=1.0), options=UNHURRIED) as client:
        received = []
        for message in open_stream(client, item(0, LONG), item(1, LONG)):
            received.append(message.id)
            time.sleep(0.3)
        assert received == [0] * 6 + [1] * 6


def test_a_stream_that_stalled_goes_on(serve: Callable[..., str], minilm_artifact: Path) -> None:
    """A caller that was busy for too long between two answers still gets all, over a stream begun anew."""
    with Client(serve(minilm_artifact, stalled_after_s=0.5), options=UNHURRIED) as client:
        requests = [attencode.encode_request("a " * number, attention=True) for number in range(100, 108)]
        tokens = []
        for answer in client.encode_stream(requests):
            assert isinstance(answer, attencode.EncodeResult), answer
            tokens.append(answer.results[0].num_tokens)
            time.sleep(2.0 if len(tokens) in (1, 4) else 0.0)
        assert tokens == list(range(102, 110))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("kind", ["sync", "async", "async source"])
def test_a_killed_server_is_not_noticed(spawn_local: Callable[..., Any], tiny_artifact: Path, kind: str) -> None:
    """A stream goes on with a server that is started anew on the port: every answer once, in order."""
    flags = ("--provider", "cpu", "--port", str(free_port()))
    servers = [spawn_local(tiny_artifact, *flags)]
    lengths = [1 + number % 30 for number in range(400)]
    requests = [attencode.encode_request("a " * length, attention=True, pooled=True) for length in lengths]
    got: list[int] = []

    def note(answer: object) -> None:
        assert isinstance(answer, attencode.EncodeResult), answer
        got.append(answer.results[0].num_tokens - 2)
        if len(got) in (50, 200):
            servers[-1].process.kill()
            servers[-1].process.wait()
            servers.append(spawn_local(tiny_artifact, *flags))

    async def source() -> AsyncIterator[attencode.EncodeRequest]:
        for request in requests:
            await asyncio.sleep(0)
            yield request

    async def read() -> None:
        async with attencode.AsyncClient(servers[0].address, wait_for_ready=True) as client:
            async for answer in client.encode_stream(source() if kind == "async source" else requests):
                note(answer)

    if kind == "sync":
        with Client(servers[0].address, wait_for_ready=True) as client:
            for answer in client.encode_stream(iter(requests)):
                note(answer)
    else:
        asyncio.run(read())
    assert got == lengths


class Scripted:
    """A server that answers each stream by a script: messages, then a status."""

    def __init__(self, *scripts: Callable[[list[pb.EncodeStreamRequest]], Iterator[Any]]) -> None:
        self.scripts = list(scripts)
        self.asked: list[list[int]] = []

    def __call__(self, requests: Iterator[pb.EncodeStreamRequest], context: grpc.ServicerContext) -> Iterator[Any]:
        items = [next(requests)]
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.asked.append([item.id for item in items])
        for sent in script(items):
            if isinstance(sent, grpc.StatusCode):
                context.abort(sent, "so it is scripted")
            yield sent


@pytest.fixture
def scripted() -> Iterator[Callable[..., tuple[Client, Scripted]]]:
    """Give a function that starts such a server and gives a client of it that does not retry by itself."""
    from concurrent.futures import ThreadPoolExecutor

    started: list[Any] = []

    def start(*scripts: Any) -> tuple[Client, Scripted]:
        script = Scripted(*scripts)
        server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(
            script, pb.EncodeStreamRequest.FromString, pb.EncodeStreamResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("attencode.v1.Encoder", {"EncodeStream": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        started.append(server)
        return Client(f"127.0.0.1:{port}", options=[("grpc.enable_retries", 0)]), script

    yield start
    for server in started:
        server.stop(None)


def part(items: list[pb.EncodeStreamRequest], value: bytes, chunks: int) -> Iterator[Any]:
    tensor = pb.Tensor(shape=[4], data_type=1, chunked_bytes=16)  # type: ignore[arg-type]
    yield pb.EncodeStreamResponse(
        id=items[0].id, response=pb.EncodeResponse(results=[pb.InputResult(attention=tensor)])
    )
    for place in range(chunks):
        piece = pb.TensorChunk(field=4, offset=4 * place, data=value)  # type: ignore[arg-type]
        yield pb.EncodeStreamResponse(id=items[0].id, chunk=piece)


def unavailable(items: list[pb.EncodeStreamRequest]) -> pb.EncodeStreamResponse:
    return pb.EncodeStreamResponse(id=items[0].id, error=pb.Error(code=14, message="draining"))


def test_what_came_in_part_is_asked_again(scripted: Callable[..., tuple[Client, Scripted]]) -> None:
    """Chunks of a stream that dies are thrown away, and none of them gets into the answer."""

    def dies(items: list[pb.EncodeStreamRequest]) -> Iterator[Any]:
        yield from part(items, b"\xff\xff\xff\xff", 3)
        yield grpc.StatusCode.UNAVAILABLE

    client, server = scripted(dies, lambda items: iter([unavailable(items)]), lambda items: part(items, bytes(4), 4))
    with client:
        (answer,) = client.encode_stream([attencode.encode_request("a")])
    assert isinstance(answer, attencode.EncodeResult)
    np.testing.assert_array_equal(answer.results[0].attention, np.zeros(4))
    assert server.asked == [[0]] * 3


def test_streams_are_not_begun_anew_for_ever(
    scripted: Callable[..., tuple[Client, Scripted]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After seven streams in a row that are UNAVAILABLE the client says so, of an item or of the stream."""
    monkeypatch.setattr("service.resumption._LONGEST_PAUSE_S", 0.01)
    client, server = scripted(lambda _items: iter([grpc.StatusCode.UNAVAILABLE]))
    with client, pytest.raises(attencode.Unavailable, match="scripted"):
        list(client.encode_stream([attencode.encode_request("a")]))
    assert len(server.asked) == 7
    client, server = scripted(lambda items: iter([unavailable(items)]))
    with client:
        (answer,) = client.encode_stream([attencode.encode_request("a")])
    assert isinstance(answer, attencode.Unavailable)
    assert len(server.asked) == 7


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_other_statuses_end_the_stream(scripted: Callable[..., tuple[Client, Scripted]], code: grpc.StatusCode) -> None:
    """A stream that ends for another reason is not begun anew."""
    client, server = scripted(lambda _items: iter([code]))
    with client, pytest.raises(attencode.AttencodeError, match="scripted"):
        list(client.encode_stream([attencode.encode_request("a")]))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda items: part(items, bytes(4), 3), "ended before item 0's answer"),
        (lambda _items: part([item(5, "a")], bytes(4), 4), "item 5 came where item 0 was due"),
        (lambda items: [*part(items, bytes(4), 2), unavailable(items)], "error of item 0 came where chunks"),
        (lambda items: [*part(items, bytes(4), 4), *part(items, bytes(4), 4)], "item 0 came where item 1"),
        (lambda items: list(part(items, bytes(4), 4))[1:], "where none was due"),
    ],
)
def test_servers_that_break_the_contract(
    scripted: Callable[..., tuple[Client, Scripted]], script: Any, message: str
) -> None:
    """Incomplete, misplaced and repeated answers are told as the server's fault, by either client."""
    client, _ = scripted(lambda items: iter(script(items)))
    with client, pytest.raises(attencode.InternalFault, match=message):
        list(client.encode_stream([attencode.encode_request("a")]))


def test_a_stream_to_nobody_ends_at_once() -> None:
    """Where there never was a server nothing is begun anew."""
    started = time.monotonic()
    with Client("127.0.0.1:1") as client, pytest.raises(attencode.Unavailable, match="no server answers"):
        client.attend("a")
    assert time.monotonic() - started < 5
