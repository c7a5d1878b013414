"""Deadlines: the server's own for whoever sets none, and work that leaves with its caller."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from service import encoding
from service.pb import encoder_pb2 as pb
from tests.service.local import ENCODE, STREAM, served

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
            door, texts = server._servicer._intake.door, server._servicer._encoding._texts
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
