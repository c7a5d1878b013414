"""Closed loops over grpc.aio: a fixed number of requests in flight, each answer sends the next one.

They find out what a server can do at most; what callers wait for beyond that is `open_loop.py`'s.
Messages are prepared bytes, so that the client encodes and decodes next to nothing.
May import: wire, service's pb, grpc.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from itertools import cycle, islice
from typing import Any

import grpc

from service.pb import encoder_pb2 as pb
from wire import CHANNEL_OPTIONS, ENCODE, ENCODE_STREAM, stream_item

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop


class Channels:
    """Some channels to one server, used in turn; an async context manager that gives their Encode methods."""

    def __init__(self, address: str, count: int) -> None:
        """Store where to."""
        self._address, self._count = address, count
        self._channels: list[grpc.aio.Channel] = []

    async def __aenter__(self) -> list[Any]:
        """Open the channels and wait until each is connected.

        Raises:
            ConnectionError: No server answers there.
        """
        self._channels = [grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) for _ in range(self._count)]
        try:
            await asyncio.wait_for(asyncio.gather(*(channel.channel_ready() for channel in self._channels)), 10)
        except TimeoutError:
            await self.__aexit__()
            raise ConnectionError(
                f"no server answers at {self._address}; expected HOST:PORT of one that runs"
            ) from None
        return [channel.unary_unary(ENCODE) for channel in self._channels]

    async def __aexit__(self, *_exception: object) -> None:
        """Close them."""
        await asyncio.gather(*(channel.close() for channel in self._channels))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the fastest event loop that is there."""
    return run_loop(work)


async def saturation(address: str, bodies: list[bytes], *, in_flight: int, seconds: float, channels: int = 4) -> float:
    """Measure requests a second with so many in flight.

    Raises:
        grpc.aio.AioRpcError: A request failed: more are in flight than the server takes.
    """
    supply = cycle(bodies)
    finished = 0

    async def caller(encode: Any, until_s: float) -> None:
        nonlocal finished
        while time.perf_counter() < until_s:
            await encode(next(supply), timeout=60.0)
            finished += 1

    async with Channels(address, channels) as methods:
        started = time.perf_counter()
        calls = (caller(encode, started + seconds) for encode in islice(cycle(methods), in_flight))
        await asyncio.gather(*calls)
        return finished / (time.perf_counter() - started)


async def stream(address: str, bodies: list[bytes], *, in_flight: int, requests: int) -> float:
    """Measure requests a second on one EncodeStream with so many in flight.

    Raises:
        RuntimeError: An item was answered by an error.
    """
    free = asyncio.Semaphore(in_flight)
    messages = [stream_item(number, body) for number, body in enumerate(islice(cycle(bodies), requests))]

    async def items() -> AsyncIterator[bytes]:
        for message in messages:
            await free.acquire()
            yield message

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        started = time.perf_counter()
        async for answer in channel.stream_stream(ENCODE_STREAM)(items()):
            message = pb.EncodeStreamResponse.FromString(answer)
            if message.HasField("error"):
                raise RuntimeError(f"item {message.id} failed: {message.error.message}")
            free.release()
        return requests / (time.perf_counter() - started)
