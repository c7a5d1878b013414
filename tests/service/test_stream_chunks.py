"""Streams of large answers on a real server: the same answers as Encode's, bounded memory, and streams that go on."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import attencode
from attencode import Client
from service.chunks import CHUNK_BYTES
from service.pb import encoder_pb2 as pb
from tests.service.streams import LONG, LONGER, item, open_stream

SELECTIONS: list[dict[str, Any]] = [
    {"attention": True},
    {"attention": True, "data_type": "float16"},
    {"attention": [0], "heads": [3]},
    {"attention": True, "token_embeddings": True, "hidden_states": True, "pooled": True},
    {"hidden_states": True},
    {"hidden_states": [-1, 0], "data_type": "float16"},
    {"token_embeddings": True},
]


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


@pytest.fixture(scope="module")
def small(serve_for_module: Callable[..., str], minilm_artifact: Path) -> str:
    """Give a server of small messages, and of streams' answers that are not much larger."""
    return serve_for_module(minilm_artifact, max_message_bytes=2**20, max_answer_bytes=6_000_000)


def test_too_large_for_encode_and_for_a_stream(small: str) -> None:
    """Encode says that EncodeStream takes more; a stream says what would fit, and goes on."""
    with Client(small) as client:
        assert client.get_model().max_answer_bytes == 6_000_000
        with pytest.raises(
            grpc.RpcError, match=r"more than .* 1,048,576 for one message; .*, or use EncodeStream"
        ) as caught:
            client._stub.Encode(item(0, LONG).request)
        assert ("attencode-fits-stream", "1") in caught.value.trailing_metadata()  # type: ignore[attr-defined]
        limit = r"more than this server's 6,000,000 for any answer \(--max-answer-bytes\); ask for "
        with pytest.raises(attencode.InvalidRequest, match=limit + ".*or shorter inputs$"):
            client.encode(LONGER, attention=True)
        assert client.attend(LONG).attention is not None
        with pytest.raises(
            attencode.InvalidRequest, match=limit + "fewer attention layers or heads .*or shorter inputs$"
        ):
            client.attend(LONGER)
        requests = [attencode.encode_request(text, attention=True) for text in ("a", LONGER, LONG)]
        answers = [type(answer).__name__ for answer in client.encode_stream(requests)]
        assert answers == ["EncodeResult", "InvalidRequest", "EncodeResult"]
        many = [attencode.encode_request(["a time"] * 500, token_embeddings=True)]
        (answer,) = client.encode_stream(many)
        assert isinstance(answer, attencode.EncodeResult), "small tensors above the limit on messages, together"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_encode_takes_the_stream_by_itself(small: str, minilm_client: Client, kind: str) -> None:
    """What does not fit a message comes over a stream: by its tensors, or by what is said of its tokens."""

    def encode(inputs: list[str], **options: Any) -> attencode.EncodeResult:
        async def ask() -> attencode.EncodeResult:
            async with attencode.AsyncClient(small, timeout_s=10) as client:
                return await client.encode(iter(inputs), **options)

        if kind == "async":
            return asyncio.run(ask())
        with Client(small, timeout_s=10) as client:
            return client.encode(iter(inputs), **options)

    large = encode([LONG, "a"], attention=True)
    for got, expected in zip(large.results, minilm_client.encode([LONG, "a"], attention=True).results, strict=True):
        np.testing.assert_allclose(got.attention, expected.attention, atol=1e-5)
    texts = ["a time flies"] * 136  # 1,044,480 bytes of tensors, just below the limit
    assert len(encode(texts, token_embeddings=True).results) == len(texts)
    with pytest.raises(attencode.InvalidRequest, match=r"or shorter inputs$"):
        encode([LONGER], attention=True)
    with pytest.raises(attencode.InvalidRequest, match="at least one"):
        encode([])


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
