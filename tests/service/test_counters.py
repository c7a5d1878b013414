"""Counters: every request is counted once, by its status, and every refused one by its reason."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from service import metrics
from service.admission import DrainRate
from service.pb import encoder_pb2 as pb
from tests.service.local import ENCODE, STREAM, served

SETTINGS = {
    "max_queue_delay_ms": 500,  # so long everything waits
    "max_batch_tokens": 4096,
    "max_queue_size": 20,
    "max_queue_tokens": 400,
    "max_pending_requests": 12,
    "max_pending_bytes": 200_000,
    "max_streams": 1,
    "max_request_tokens": 1000,
    "max_request_bytes": 2**26,  # so that two messages are read at once
}
REASONS = {"queue_full", "queue_tokens", "deadline", "requests", "request_bytes", "slow_message", "no_message"} | {
    "streams"
}


def request(*texts: str) -> bytes:
    return pb.EncodeRequest(inputs=[pb.Input(text=text) for text in texts]).SerializeToString()


def counted() -> tuple[Counter[str], Counter[str]]:
    """Give the requests so far by status, and the refused ones by reason."""
    codes, reasons = Counter[str](), Counter[str]()
    for sample in next(iter(metrics.REQUESTS.collect())).samples:
        codes[sample.labels["code"]] += int(sample.value) * sample.name.endswith("_total")
    for sample in next(iter(metrics.REFUSED.collect())).samples:
        reasons[sample.labels["reason"]] += int(sample.value) * sample.name.endswith("_total")
    return codes, reasons


class Load:
    """Calls of one client, and what it saw of each."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.encode = channel.unary_unary(ENCODE)
        self.slow = channel.stream_unary(ENCODE)
        self.stream = channel.stream_stream(STREAM, response_deserializer=pb.EncodeStreamResponse.FromString)
        self.seen = Counter[str]()

    async def outcome(self, call: Awaitable[Any]) -> None:
        try:
            await call
            self.seen["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.seen[error.code().name] += 1
        except asyncio.CancelledError:
            self.seen["CANCELLED"] += 1

    async def all(self, *calls: Awaitable[Any], apart_s: float = 0.05) -> None:
        tasks = []
        for call in calls:
            tasks.append(asyncio.create_task(self.outcome(call)))
            await asyncio.sleep(apart_s)
        await asyncio.gather(*tasks)

    async def items(self, *items: bytes) -> None:
        """Send items over a stream, and stay for a while."""

        async def sent() -> AsyncIterator[bytes]:
            for item in items:
                yield item
            await asyncio.sleep(0.5)

        try:
            async for answer in self.stream(sent()):
                error = answer.error.code if answer.HasField("error") else 0
                self.seen[next(code.name for code in grpc.StatusCode if code.value[0] == error)] += 1
        except grpc.aio.AioRpcError as error:
            self.seen[error.code().name] += 1


async def refused_calls(load: Load, drain: DrainRate) -> None:
    """Have calls refused for each reason."""
    await load.all(load.encode(request(*["a"] * 18)), load.encode(request(*["a"] * 5)))
    await load.all(load.encode(request(*["a " * 38] * 8)), load.encode(request(*["a " * 38] * 3)))
    drain.begin(0.0)
    drain.end(1, 1.0, idle=True)  # a token a second
    await load.all(load.encode(request("a")), load.encode(request("a"), timeout=2))
    drain.__init__()  # type: ignore[misc]
    await load.all(*(load.encode(request("a")) for _ in range(20)), apart_s=0.0)
    await load.all(load.encode(request("a" * 60_000)), load.encode(request("b" * 60_000)))
    item = pb.EncodeStreamRequest(id=1, request=pb.EncodeRequest.FromString(request("a"))).SerializeToString()
    nothing = pb.EncodeStreamRequest(id=2, request=pb.EncodeRequest()).SerializeToString()
    await asyncio.gather(load.items(item, nothing, b"\xff"), load.items(item))
    calls = [load.slow() for _ in range(5)]  # two places, two aside, and one too many
    await asyncio.sleep(0.5)
    left = [call for call in calls if not call.done()]
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    load.seen["RESOURCE_EXHAUSTED"] += len(left)  # which gRPC does not tell from messages that are too large
    await load.all(*(call for call in calls if call not in left))


async def other_calls(load: Load) -> None:
    """Have calls end in every other way that a caller can bring about."""
    await load.all(*(load.encode(request(f"text {number}")) for number in range(10)), apart_s=0.0)
    await load.all(load.encode(request()), load.encode(b"\xff"), load.encode(request(*["a " * 38] * 30)))
    gone = [load.encode(request("a")) for _ in range(2)]
    await asyncio.sleep(0.1)
    for call in gone:
        call.cancel()
    await load.all(*gone, *(load.encode(request("a"), timeout=0.2) for _ in range(2)))


def test_the_counters_add_up(tiny_artifact: Path) -> None:
    """Over a mixed load each status was counted as often as clients saw it, each refusal once by a reason."""

    async def test() -> None:
        async with served(tiny_artifact, **SETTINGS) as (server, channel):
            before, load = counted(), Load(channel)
            await refused_calls(load, server._models.find("").engine._admission.drain)
            await other_calls(load)
            server._models.refuse()
            await load.all(load.encode(request("a")), load.encode(request("a")))
            for _ in range(200):
                await asyncio.sleep(0.05 if metrics.REQUESTS_IN_FLIGHT._value.get() else 0)
            codes, reasons = (now - was for now, was in zip(counted(), before, strict=True))
        assert codes == load.seen
        assert set(reasons) == REASONS | {"not_accepting"}
        assert sum(reasons.values()) == codes["RESOURCE_EXHAUSTED"] + codes["UNAVAILABLE"]
        assert set(codes) == {
            *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
        }

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("reason", [*sorted(REASONS), "not_accepting", "unsent_answers"])
def test_each_reason_begins_at_0(reason: str) -> None:
    """Prometheus sees the first refusal as an increase."""
    metrics.prepare_requests(["Encode"])
    assert reason in {sample.labels["reason"] for sample in next(iter(metrics.REFUSED.collect())).samples}


def test_a_message_that_is_too_large_counts(tiny_artifact: Path) -> None:
    """GRPC refuses it with the status that is counted."""

    async def test() -> None:
        async with served(tiny_artifact, max_request_bytes=1024) as (_, channel):
            before, load = counted(), Load(channel)
            await load.all(load.encode(request("a" * 2000)), load.encode(request("a")))
            await asyncio.sleep(0.2)
            codes, reasons = (now - was for now, was in zip(counted(), before, strict=True))
        assert codes == load.seen == {"RESOURCE_EXHAUSTED": 1, "OK": 1}
        assert reasons == {"no_message": 1}

    asyncio.run(asyncio.wait_for(test(), 30))
