"""Deadlines and limits of the server's own: what leaves with its caller, what counts as long as it is there."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from service import encoding
from service.pb import encoder_pb2 as pb
from tests.service.local import ENCODE, STREAM, served
from tests.service.streams import private_bytes

SLOWLY = {"max_queue_delay_ms": 20_000, "max_batch_tokens": 4096}  # so long a request waits for company
REQUEST = pb.EncodeRequest(inputs=[pb.Input(text="a")])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_the_servers_longest_deadline(tiny_artifact: Path, timeout_s: float | None) -> None:
    """It ends a request whose caller set no deadline, or a longer one."""

    async def test() -> None:
        async with served(tiny_artifact, max_deadline_s=0.3, **SLOWLY) as (_, channel):
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(ENCODE)(REQUEST.SerializeToString(), timeout=timeout_s)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "deadline" in str(caught.value.details())
            assert time.monotonic() - started < 15

    run(test)


def test_the_servers_longest_deadline_on_a_stream(tiny_artifact: Path) -> None:
    """It is each item's own, and does not end the stream."""

    async def test() -> None:
        async def items() -> AsyncIterator[bytes]:
            for number in (1, 2):
                yield pb.EncodeStreamRequest(id=number, request=REQUEST).SerializeToString()
                await asyncio.sleep(0.6)

        async with served(tiny_artifact, max_deadline_s=0.3, **SLOWLY) as (_, channel):
            answers = channel.stream_stream(STREAM, response_deserializer=pb.EncodeStreamResponse.FromString)(items())
            told = [(answer.id, answer.error.code) async for answer in answers]
        assert told == [(1, 4), (2, 4)]

    run(test)


def test_who_leaves_while_it_waits_to_be_tokenized(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for its texts' turn and is cancelled, or out of time, is not tokenized, and holds nothing."""
    monkeypatch.setattr(encoding, "_CHARS_AT_ONCE", 100_000)

    async def test() -> None:
        async with served(tiny_artifact) as (server, channel):
            door, texts = server._servicer._intake.door, server._servicer._encoding.texts
            busy = asyncio.create_task(texts.run(lambda: time.sleep(1.0), 100_000, when=True))
            await asyncio.sleep(0.1)
            large = pb.EncodeRequest(inputs=[pb.Input(text="a " * 30_000)]).SerializeToString()
            gone, late = channel.unary_unary(ENCODE)(large), channel.unary_unary(ENCODE)(large, timeout=0.3)
            await asyncio.sleep(0.2)
            assert (door._requests, door._bytes) == (2, 4 * len(large))
            gone.cancel()
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await late
            await asyncio.sleep(0.1)
            assert not busy.done()
            assert (door._requests, door._bytes) == (0, 0)
            assert not texts._budget._turn.locked()
            await busy

    run(test)


def test_the_servers_deadline_while_texts_wait(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds before a request is in the queue, too."""
    monkeypatch.setattr(encoding, "_CHARS_AT_ONCE", 100_000)

    async def test() -> None:
        async with served(tiny_artifact, max_deadline_s=0.3) as (server, channel):
            texts = server._servicer._encoding.texts
            busy = asyncio.create_task(texts.run(lambda: time.sleep(1.5), 100_000, when=True))
            await asyncio.sleep(0.1)
            large = pb.EncodeRequest(inputs=[pb.Input(text="a " * 30_000)]).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError, match=r"this server gives a request 0\.3 s, and they have passed"):
                await channel.unary_unary(ENCODE)(large)
            assert not busy.done()
            await busy

    run(test)


def test_items_count(tiny_artifact: Path) -> None:
    """A stream's items are in work while they are, with their bytes and their described tokens, and then no more."""

    async def test() -> None:
        held = [0]

        async def items() -> AsyncIterator[bytes]:
            for number, tokens in enumerate((False, True), start=1):
                pooled = pb.PooledOptions()
                request = pb.EncodeRequest(inputs=[pb.Input(text="a" * 1000)] * 5, pooled=pooled, tokens=tokens)
                yield pb.EncodeStreamRequest(id=number, request=request).SerializeToString()
                for _ in range(100):
                    await asyncio.sleep(0.05)
                    if len(engine._jobs) == 5 * number:
                        break
                held.append(door._bytes)

        async with served(tiny_artifact, **SLOWLY | {"max_queue_delay_ms": 3000}) as (server, channel):
            door, engine = server._servicer._intake.door, server._models.find("").engine
            answers = [answer async for answer in channel.stream_stream(STREAM)(items())]
            assert (len(answers), door._requests, door._bytes) == (2, 0, 0)
        assert 15_000 < held[1] < 16_000
        assert held[2] - 2 * held[1] >= 5 * 500

    run(test)


def test_unread_tokens_count(tiny_artifact: Path) -> None:
    """An answer of Tokenize that nobody reads counts as unsent."""

    async def test() -> None:
        async with served(tiny_artifact) as (server, channel):
            data = pb.TokenizeRequest(inputs=[pb.Input(text="a " * 38)] * 1000).SerializeToString()
            unread = channel.unary_stream("/attencode.v1.Encoder/Tokenize")(data)
            for _ in range(100):
                await asyncio.sleep(0.05)
                if held := server._servicer._unsent.held:
                    break
            assert held > 500_000
            assert len([answer async for answer in unread]) == 1
            await asyncio.sleep(0.1)
            assert server._servicer._unsent.held == 0

    run(test)


def test_refusals_keep_nothing(tiny_artifact: Path) -> None:
    """A refused call says when to try again, and leaves nothing of its message behind, collected or not."""

    async def test() -> None:
        async with served(tiny_artifact, max_pending_bytes=10_000, **SLOWLY) as (_, channel):
            first = channel.unary_unary(ENCODE)(pb.EncodeRequest(inputs=[pb.Input(text="a")]).SerializeToString())
            await asyncio.sleep(0.2)
            large = pb.EncodeRequest(inputs=[pb.Input(text="a" * 3_000_000)]).SerializeToString()
            before = private_bytes(os.getpid())
            for _ in range(30):
                with pytest.raises(grpc.aio.AioRpcError, match="are in work already") as caught:
                    await channel.unary_unary(ENCODE)(large)
                assert caught.value.trailing_metadata()["attencode-retry-delay-seconds"]
                status = Status.FromString(caught.value.trailing_metadata()["grpc-status-details-bin"])
                assert status.details[0].Is(RetryInfo.DESCRIPTOR)
                del caught
            assert private_bytes(os.getpid()) - before < 45_000_000
            first.cancel()

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


def test_too_many_tokens(tiny_artifact: Path) -> None:
    """A request with more tokens than one may have can never succeed, and says so; one with as many can."""

    async def test() -> None:
        async with served(tiny_artifact, max_request_tokens=400) as (_, channel):
            encode = channel.unary_unary(ENCODE)
            assert await encode(pb.EncodeRequest(inputs=[pb.Input(text="a " * 38)] * 10).SerializeToString())
            with pytest.raises(grpc.aio.AioRpcError, match="has 440 tokens, more than this server's 400") as caught:
                await encode(pb.EncodeRequest(inputs=[pb.Input(text="a " * 38)] * 11).SerializeToString())
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(test)
