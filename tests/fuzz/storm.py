"""Storm: messages of every kind sent to a real server, many at once, and each answer held against what may come.

Right is a documented status within its time; between the others a plain request must always get the same answer. What
fails is told with the bytes that were sent. May import: pb, source, messages, targets.
"""

import asyncio
import random
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from fuzz.messages import align_request, any_message, encode_request
from fuzz.source import PIECES, Source
from google.protobuf.message import DecodeError

from service.pb import encoder_pb2 as pb

SERVICE = "/attencode.v1.Encoder/"
KINDS = {
    "Encode": pb.EncodeRequest,
    "Align": pb.AlignRequest,
    "Tokenize": pb.TokenizeRequest,
    "GetModel": pb.GetModelRequest,
}
METHODS = ("Encode", "Encode", "Encode", "EncodeStream", "EncodeStream", "Align", "Tokenize", "GetModel")
"""How often each is called."""
LONGEST_S = 30.0  # for a call whose deadline is not short; beyond it, it hangs
DOCUMENTED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
HASTY_S = (0.001, 0.003, 0.01, 0.05)
_CANARY = pb.EncodeRequest(inputs=[pb.Input(text="abc")])
_CANARY_EVERY = 50
_ITEMS = 12  # of a stream, at most
_WRITE_FAILED = "Internal error from Core"  # this side's own word for a deadline that passed under a write


@dataclass
class Told:
    """What came of the messages so far.

    Attributes:
        sent: Messages, those on streams each for itself.
        statuses: How many ended how, by method and status.
        faults: What must not be.
        canaries: Plain requests that were answered right.
    """

    sent: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    canaries: int = 0


class Storm:
    """One run against one server."""

    def __init__(
        self,
        address: str,
        *,
        seed: int = 0,
        in_flight: int = 32,
        hasty: bool = False,
        methods: tuple[str, ...] = METHODS,
    ) -> None:
        """Prepare; `hasty` gives calls short deadlines, and breaks some off, so that counts are bounds alone."""
        self._methods = methods
        self.told = Told()
        self._address = address
        self._seed = seed
        self._in_flight = in_flight
        self._hasty = hasty
        self._expected: bytes | None = None

    async def run(self, messages: int) -> Told:
        """Send so many messages."""
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            await self._check_canary(channel)
            numbers = iter(range(messages * 2))
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._in_flight):
                    workers.create_task(self._worker(channel, numbers, messages))
            await self._check_canary(channel)
        return self.told

    async def _worker(self, channel: Any, numbers: Iterator[int], messages: int) -> None:
        for number in numbers:
            if self.told.sent >= messages or self.told.faults:
                return
            draw = random.Random((self._seed << 32) + number)
            source = Source(draw.randbytes(draw.choice((8, 64, 64, 256, 256, 256, 2000))))
            timeout_s = draw.choice(HASTY_S) if self._hasty and draw.random() < 0.5 else LONGEST_S
            method = draw.choice(self._methods)
            call = self._stream if method == "EncodeStream" else self._unary
            async with asyncio.timeout(LONGEST_S + 10):
                await call(channel, method, source, draw, timeout_s)
            if number % _CANARY_EVERY == 0:
                await self._check_canary(channel)

    async def _unary(self, channel: Any, method: str, source: Source, draw: random.Random, timeout_s: float) -> None:
        data = _bytes_of(KINDS[method], source)
        self.told.sent += 1
        call = channel.unary_unary(SERVICE + method)(data, timeout=timeout_s, metadata=_metadata(draw))
        if timeout_s < LONGEST_S and draw.random() < 0.2:
            await asyncio.sleep(draw.random() * 0.01)
            call.cancel()
        try:
            await call
            self._note(method, "OK", data, timeout_s)
        except grpc.RpcError as error:
            self._note(method, error.code().name, data, timeout_s, error.details())
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            self._note(method, "CANCELLED", data, timeout_s)

    async def _stream(self, channel: Any, method: str, source: Source, draw: random.Random, timeout_s: float) -> None:
        items = [_item(source, draw) for _ in range(draw.randint(0, _ITEMS))]
        self.told.sent += len(items)
        call = channel.stream_stream(SERVICE + method)(
            _sending(items, draw), timeout=timeout_s, metadata=_metadata(draw)
        )
        due = [(_number(item), item) for item in items]
        try:
            async for data in call:
                self._take(pb.EncodeStreamResponse.FromString(data), due, timeout_s)
                if timeout_s < LONGEST_S and draw.random() < 0.1:
                    call.cancel()
            if due:
                self._fault(method, b"".join(items), f"{len(due)} of {len(items)} items were not answered")
            self._note("stream", "OK", b"", timeout_s)
        except grpc.RpcError as error:
            self._note("stream", error.code().name, b"".join(items), timeout_s, error.details())
        except asyncio.CancelledError:
            if not call.cancelled():
                raise

    def _take(self, answer: pb.EncodeStreamResponse, due: list[tuple[int, bytes]], timeout_s: float) -> None:
        """Hold an answer of a stream against the items that are unanswered."""
        if answer.HasField("chunk"):
            return
        number, item = due.pop(0) if due else (-1, b"")
        if answer.id != number:
            self._fault("EncodeStream", item, f"an answer to {answer.id} where {number} was due")
        code = "OK" if answer.HasField("response") else _NAMES[answer.error.code]
        self._note("EncodeStream", code, item, timeout_s, answer.error.message)

    def _note(self, method: str, code: str, data: bytes, timeout_s: float, details: str | None = "") -> None:
        if code == "INTERNAL" and timeout_s < LONGEST_S and (details or "").startswith(_WRITE_FAILED):
            code = "DEADLINE_EXCEEDED"
        self.told.statuses[method, code] += 1
        allowed = DOCUMENTED | ({"DEADLINE_EXCEEDED", "CANCELLED"} if timeout_s < LONGEST_S else set())
        if code not in allowed:
            self._fault(method, data, f"{code}: {details}")

    def _fault(self, method: str, data: bytes, what: str) -> None:
        self.told.faults.append(f"{method}: {what}; sent: {data[:4000].hex()}")

    async def _check_canary(self, channel: Any) -> None:
        """Send a plain request; its answer is always the same."""
        answer = await channel.unary_unary(SERVICE + "Encode", pb.EncodeRequest.SerializeToString)(
            _CANARY, timeout=LONGEST_S
        )
        pooled = pb.EncodeResponse.FromString(answer).pooled.data
        self.told.statuses["Encode", "OK"] += 1
        self.told.canaries += 1
        self._expected = self._expected or pooled
        if not np.allclose(np.frombuffer(pooled, "<f4"), np.frombuffer(self._expected, "<f4"), atol=1e-5):
            self.told.faults.append("a plain request got another answer than at first")


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _bytes_of(kind: Any, source: Source) -> bytes:
    way = source.byte()
    if way < 30:
        return source.data(source.left)
    if way < 170 and kind is pb.AlignRequest:
        return align_request(source).SerializeToString()
    if way < 140 and kind is not pb.GetModelRequest:
        right = encode_request(source)
        whole = pb.TokenizeRequest(inputs=right.inputs, truncation=right.truncation)
        return (right if kind is pb.EncodeRequest else whole).SerializeToString()
    message = any_message(kind, source)
    if way < 220 and "model" in kind.DESCRIPTOR.fields_by_name:
        message.model = ""
    data = bytearray(message.SerializeToString())
    if way > 240 and data:
        data[source.below(len(data))] = source.byte()
    return bytes(data)


def _item(source: Source, draw: random.Random) -> bytes:
    own = Source(draw.randbytes(draw.choice((4, 60, 200))))
    if draw.random() < 0.1:
        return own.data(own.left)
    data = _bytes_of(pb.EncodeRequest, own)
    return pb.EncodeStreamRequest(id=source.unsigned(64)).SerializeToString() + b"\x12" + _varint(len(data)) + data


async def _sending(items: list[bytes], draw: random.Random) -> AsyncIterator[bytes]:
    for item in items:
        if draw.random() < 0.1:
            await asyncio.sleep(0.001)
        yield item


def _number(item: bytes) -> int:
    """Give the id that an item's answer has: 0 where it is no message."""
    try:
        return pb.EncodeStreamRequest.FromString(item).id
    except DecodeError:
        return 0


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*written, value))


def _metadata(draw: random.Random) -> list[tuple[str, str | bytes]]:
    """Make metadata as nobody needs it."""
    made: list[tuple[str, str | bytes]] = []
    for _ in range(draw.choice((0, 0, 1, 3))):
        name = draw.choice(("x", "traceparent", "tracestate", "baggage", "authorization", "x-forwarded-for", "a.b-c_d"))
        value = draw.choice(
            ("", "00-" + "f" * 32 + "-" + "0" * 16 + "-01", "Bearer ", "y" * draw.randint(0, 900), "=;,", *PIECES)
        )
        made.append((name, value if value.isascii() and value.isprintable() else "x"))
    if draw.random() < 0.2:
        made.append((draw.choice(("x-bin", "grpc-trace-bin", "grpc-tags-bin")), draw.randbytes(draw.randint(0, 200))))
    return made


def counted(metrics_port: int) -> Counter[tuple[str, str]]:
    """Read how many requests the server counts, by method and status."""
    page = page_of(metrics_port)
    found = re.findall(r'^attencode_requests_total\{code="(\w+)",method="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return Counter({(method, code): int(float(value)) for code, method, value in found if float(value)})


def page_of(metrics_port: int) -> str:
    """Read a server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def left_behind(metrics_port: int) -> dict[str, float]:
    """Tell what of a server's gauges is not back at 0, where nothing is on its way."""
    names = ("requests_in_flight", "open_streams", "unsent_bytes", "queue_inputs", "queue_tokens", "batches_in_flight")
    found = re.findall(rf"^attencode_({'|'.join(names)})(?:{{[^}}]*}})? (\S+)$", page_of(metrics_port), re.MULTILINE)
    assert found, "the gauges have other names now"
    return {name: float(value) for name, value in found if float(value)}


def in_excess(
    storm: Counter[tuple[str, str]], counts: Counter[tuple[str, str]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Give where a server's counts are not what was told to a client that let every call end: theirs and ours."""
    ours = Counter({key: value for key, value in storm.items() if key[0] != "stream"})
    return {key: (counts[key], ours[key]) for key in ours.keys() | counts.keys() if counts[key] != ours[key]}
