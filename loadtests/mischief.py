"""Mischief: a client process whose calls do at random all that clients do to a server; its ledger says how each ended.

    python loadtests/mischief.py --address HOST:PORT --known FILE --ledger FILE --seed 3 --seconds 20 --callers 16

Calls with right answers are held against what was learned before. `chaos.py` starts several of these processes, and
kills some. May import: ledger, wire, service's pb and statuses, grpc, numpy.
"""

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ledger import ANSWERS, GONE, WRONG, Ledger
from service.pb import encoder_pb2 as pb
from service.statuses import STATUS_LOST
from wire import CHANNEL_OPTIONS, ENCODE, ENCODE_STREAM, request_bytes, stream_item

TOLERANCE = 0.02  # of a vector's length, by which it may differ from the learned one; bfloat16 needs the most
SLACK_S = 15.0  # by which a call may overrun its deadline before it counts as hung
_SERVICE = ENCODE.rpartition("/")[0]
_UNHURRIED = (("grpc.http2.bdp_probe", 0),)  # reads no further ahead than 64 KiB
_OTHERS = ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE")


@dataclass(frozen=True)
class Known:
    """Texts with their right vectors.

    Attributes:
        texts: What is asked for.
        vectors: (texts, dim) float32.
        long: A text as long as the model reads.
        copies: How many of it have attention of some MB.
        most_bytes: Largest request that the server takes.
    """

    texts: list[str]
    vectors: NDArray[np.float32]
    long: str
    copies: int
    most_bytes: int

    def save(self, path: Path) -> None:
        """Write it for client processes."""
        np.savez(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def load(cls, path: Path) -> "Known":
        """Read it."""
        with np.load(path) as file:
            texts, sizes = list(map(str, file["texts"])), (int(file["copies"]), int(file["most_bytes"]))
            return cls(texts, file["vectors"], str(file["long"]), *sizes)

    def verdict(self, places: list[int], response: pb.EncodeResponse) -> str:
        """Hold an answer against what was learned; gives OK, or how it is wrong."""
        vectors = np.frombuffer(response.pooled.data, np.float32)
        right = self.vectors[places]
        if vectors.size != right.size:
            return f"{WRONG}{vectors.size} numbers where {right.size} are right"
        if not np.isfinite(vectors).all():
            return f"{WRONG}NaN or infinity"
        apart = np.linalg.norm(vectors.reshape(right.shape) - right, axis=1) / np.linalg.norm(right, axis=1)
        return "OK" if (apart < TOLERANCE).all() else f"{WRONG}a vector that is not its text's"


def outcome_of(error: grpc.RpcError) -> tuple[str, str]:
    """Say how a call ended that gave no answer, and what belongs to it."""
    code, details = error.code().name, error.details() or ""
    trailing = dict(error.trailing_metadata() or ())
    if code == "RESOURCE_EXHAUSTED" and "attencode-retry-delay-seconds" not in trailing:
        return f"{GONE}too large" if "larger than max" in details else f"{WRONG}{code} without a delay", details
    return told(code, details)


def told(code: str, details: str) -> tuple[str, str]:
    """Say what a status means, of a call or of a stream's item."""
    if code == "INTERNAL":
        found, _, rest = details.partition("internal error ")
        return (code, rest.partition(";")[0]) if not found and rest else (f"{WRONG}{code}", details)
    if code in ANSWERS:
        return code, ""
    return (f"{GONE}{code}", "") if code in _OTHERS else (f"{WRONG}{code}", details)


class Stream:
    """One EncodeStream with the ledger of its items."""

    def __init__(self, call: Any, ledger: Ledger, known: Known, kind: str) -> None:
        """Store the call, already begun."""
        self._call = call
        self._ledger = ledger
        self._known = known
        self._kind = kind
        self._waiting: deque[tuple[int, int, list[int]]] = deque()  # id, ledger's number, places
        self._chunked = 0
        self._sent_all = False
        self._writing: asyncio.Task[None] | None = None

    def write(self, items: Iterable[tuple[list[int], bytes]], *, half: int | None = None) -> None:
        """Send items from now on, each given as the places of its texts and its request; never end it if `half`."""
        self._writing = asyncio.get_running_loop().create_task(self._write(items, half))

    async def _write(self, items: Iterable[tuple[list[int], bytes]], half: int | None) -> None:
        try:
            for number, (places, request) in enumerate(items):
                if number == half:
                    return
                self._waiting.append((number, self._ledger.begin("EncodeStream", self._kind), places))
                await self._call.write(stream_item(number, request))
            await self._call.done_writing()
            self._sent_all = True
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the stream's status says it

    async def read(self, *, most: int | None = None, pause_s: float = 0.0) -> None:
        """Read messages, all or so many."""
        try:
            number = 0
            while most is None or number < most:
                data = await self._call.read()
                if data is grpc.aio.EOF:
                    return
                self._take(pb.EncodeStreamResponse.FromString(data))
                number += 1
                await asyncio.sleep(pause_s)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass

    def _take(self, message: pb.EncodeStreamResponse) -> None:
        if message.WhichOneof("outcome") == "chunk":
            self._chunked -= len(message.chunk.data)
            return
        number, entry, places = self._waiting.popleft() if self._waiting else (None, None, [])
        if entry is None:
            entry = self._ledger.begin("EncodeStream", self._kind)
        if number != message.id:
            self._ledger.end(entry, f"{WRONG}item {message.id} where item {number} was next")
        elif self._chunked:
            self._ledger.end(entry, f"{WRONG}{self._chunked} bytes of the item before are missing")
        elif message.HasField("error"):
            code = next(code for code in grpc.StatusCode if code.value[0] == message.error.code)
            self._ledger.end(entry, *told(code.name, message.error.message))
        else:
            self._chunked = _chunked(message.response)
            self._ledger.end(entry, self._known.verdict(places, message.response))

    async def close(self) -> None:
        """Note the items without an answer; a stream that ended well must have none."""
        code = (await self._call.code()).name
        if self._writing is not None:  # gRPC's client lets it wait for ever if a call is cancelled at its beginning
            self._writing.cancel()
            await self._writing
        details = await self._call.details()
        if details == STATUS_LOST:
            outcome = f"{GONE}status lost"
        elif code not in ("OK", "RESOURCE_EXHAUSTED", *_OTHERS):
            outcome = f"{WRONG}the stream ended with {code}: {details}"
        elif code == "OK" and (self._sent_all or self._chunked):
            outcome = f"{WRONG}no answer on a stream that ended well"
        else:
            outcome = f"{GONE}{code}"
        if not self._waiting and outcome.startswith(WRONG) and code != "OK":
            self._waiting.append((0, self._ledger.begin("EncodeStream", self._kind), []))
        while self._waiting:
            self._ledger.end(self._waiting.popleft()[1], outcome)


def _chunked(response: pb.EncodeResponse) -> int:
    """Give the bytes of an answer's tensors that follow in chunks."""
    tensors = [response.pooled]
    for result in response.results:
        tensors += [getattr(result, field.name) for field, _ in result.ListFields() if field.message_type is not None]
    return sum(tensor.chunked_bytes for tensor in tensors if isinstance(tensor, pb.Tensor))


class Caller:
    """One client that does something else again and again."""

    def __init__(self, address: str, known: Known, ledger: Ledger, draw: random.Random) -> None:
        """Store where and how."""
        self._address = address
        self._known = known
        self._ledger = ledger
        self._draw = draw
        self._channel = self._open()
        self._deeds: dict[Callable[[str], Awaitable[None]], int] = {
            self.plain: 30,
            self.hurried: 8,
            self.cancelled: 10,
            self.left: 4,
            self.invalid: 6,
            self.others: 3,
            self.attention: 3,
            self.streamed: 8,
            self.stream_cancelled: 5,
            self.stream_half: 3,
            self.slow: 2,
            self.too_large: 1,
        }

    async def live(self, until_s: float) -> None:
        """Do one thing after another."""
        deeds, weights = list(self._deeds), list(self._deeds.values())
        while time.monotonic() < until_s:
            deed = self._draw.choices(deeds, weights)[0]
            await deed(deed.__name__)
            if self._draw.random() < 0.05:
                await asyncio.sleep(self._draw.uniform(0, 0.2))
        await self._channel.close()

    def _open(self, *options: tuple[str, int]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=[*CHANNEL_OPTIONS, *options])

    def _some(self, most: int = 4) -> tuple[list[int], bytes]:
        """Draw texts; gives their places and the request."""
        places = [self._draw.randrange(len(self._known.texts)) for _ in range(self._draw.randint(1, most))]
        return places, request_bytes([self._known.texts[place] for place in places])

    def _large(self, inputs: int) -> bytes:
        return request_bytes([self._known.long] * (inputs * self._known.copies), attention=True, pooled=False)

    async def _ask(
        self,
        kind: str,
        body: bytes,
        *,
        timeout_s: float = 20.0,
        places: list[int] | None = None,
        method: str = "Encode",
        cancel_after_s: float | None = None,
        channel: grpc.aio.Channel | None = None,
        expected: str = "OK",
        patient: bool = False,
    ) -> None:
        """Make one unary call and note how it ended; who is `patient` has time enough, and must not wait in vain."""
        number = self._ledger.begin(method, kind)
        call = (channel or self._channel).unary_unary(f"{_SERVICE}/{method}")(body, timeout=timeout_s)
        if cancel_after_s is not None:
            asyncio.get_running_loop().call_later(cancel_after_s, call.cancel)
        try:
            async with asyncio.timeout(timeout_s + SLACK_S):
                data = await call
        except grpc.RpcError as error:
            outcome, note = outcome_of(error)
        except TimeoutError:
            outcome, note = f"{WRONG}hung", ""
        except (asyncio.CancelledError, grpc.aio.UsageError):
            outcome, note = f"{GONE}CANCELLED", ""
        else:
            note = ""
            outcome = "OK" if places is None else self._known.verdict(places, pb.EncodeResponse.FromString(data))
        if outcome in ("OK", "INVALID_ARGUMENT") and outcome != expected:
            outcome = f"{WRONG}{outcome} where {expected} was due"
        if patient and outcome == f"{GONE}DEADLINE_EXCEEDED":
            outcome = f"{WRONG}no answer for {timeout_s:g} s"
        self._ledger.end(number, outcome, note)

    async def plain(self, kind: str) -> None:
        """Ask for a few texts, with time enough."""
        places, body = self._some()
        await self._ask(kind, body, places=places, patient=True)

    async def hurried(self, kind: str) -> None:
        """Allow less time than there may be need of."""
        places, body = self._some()
        await self._ask(kind, body, places=places, timeout_s=self._draw.choice((0.001, 0.01, 0.05, 0.3)))

    async def cancelled(self, kind: str) -> None:
        """Take the call back, at any stage of it."""
        places, body = self._some(16)
        await self._ask(kind, body, places=places, cancel_after_s=self._draw.choice((0.0, 0.003, 0.01, 0.05)))

    async def left(self, kind: str) -> None:
        """Close a connection under its calls."""
        channel = self._open()
        calls = [self._some(8) for _ in range(self._draw.randint(1, 8))]
        tasks = [asyncio.ensure_future(self._ask(kind, body, places=places, channel=channel)) for places, body in calls]
        await asyncio.sleep(self._draw.choice((0.0, 0.01, 0.05)))
        await channel.close()
        await asyncio.gather(*tasks)

    async def invalid(self, kind: str) -> None:
        """Ask for what cannot be."""
        body = self._draw.choice(
            (
                b"\xff\xff",
                pb.EncodeRequest().SerializeToString(),
                pb.EncodeRequest(model="nobody", inputs=[pb.Input(text="a")]).SerializeToString(),
                pb.EncodeRequest(inputs=[pb.Input()]).SerializeToString(),
                pb.EncodeRequest(inputs=[pb.Input(text="a")] * 5000).SerializeToString(),
                request_bytes(["a"], attention=[999]),
            )
        )
        await self._ask(kind, body, expected="INVALID_ARGUMENT", patient=True)

    async def too_large(self, kind: str) -> None:
        """Send more than the server takes."""
        await self._ask(kind, request_bytes(["a" * (self._known.most_bytes + 1)]), expected="nothing")

    async def others(self, kind: str) -> None:
        """Call the other methods."""
        if self._draw.random() < 0.5:
            await self._ask(kind, b"", method="GetModel", patient=True)
        else:
            body = pb.TokenizeRequest(inputs=[pb.Input(text=self._known.texts[0])]).SerializeToString()
            await self._ask(kind, body, method="Tokenize", patient=True)

    async def attention(self, kind: str) -> None:
        """Ask for a large answer in one message."""
        await self._ask(kind, self._large(self._draw.randint(1, 3)))

    async def streamed(self, kind: str) -> None:
        """Have a stream answered to its end, damaged items and all."""
        items: list[tuple[list[int], bytes]] = [self._some() for _ in range(self._draw.randint(1, 40))]
        async with asyncio.timeout(60 + SLACK_S):
            stream = self._stream(self._channel, kind, 60.0)
            stream.write(items)
            await stream.read()
            await stream.close()

    async def stream_cancelled(self, kind: str) -> None:
        """Take a stream back in the middle of it."""
        items = [self._some() for _ in range(self._draw.randint(5, 80))]
        call = self._begin_stream(self._channel, 30.0)
        stream = Stream(call, self._ledger, self._known, kind)
        asyncio.get_running_loop().call_later(self._draw.uniform(0, 0.2), call.cancel)
        stream.write(items)
        await stream.read()
        await stream.close()

    async def stream_half(self, kind: str) -> None:
        """Never end the sending; a deadline, or closing the connection, ends the stream."""
        channel = self._open()
        items = [self._some() for _ in range(20)]
        stream = self._stream(channel, kind, self._draw.choice((0.3, 1.0)))
        stream.write(items, half=self._draw.randint(1, 19))
        if self._draw.random() < 0.5:
            asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(channel.close()))
        await stream.read()
        await stream.close()
        await channel.close()

    async def slow(self, kind: str) -> None:
        """Read large answers slowly, or stop reading; some of it with no deadline but the server's patience."""
        channel = self._open(*_UNHURRIED)
        items: list[tuple[list[int], bytes]] = [([], self._large(8)) for _ in range(4)]
        stream = self._stream(channel, kind, self._draw.choice((2.0, 10.0, None)))
        stream.write(items)
        await stream.read(most=self._draw.randint(1, 6), pause_s=self._draw.uniform(0, 0.3))
        if self._draw.random() < 0.5:
            await asyncio.sleep(self._draw.uniform(0, 4))
            await channel.close()
        else:
            await stream.read()
        await stream.close()
        await channel.close()

    def _begin_stream(self, channel: grpc.aio.Channel, timeout_s: float | None) -> Any:
        return channel.stream_stream(ENCODE_STREAM)(timeout=timeout_s)

    def _stream(self, channel: grpc.aio.Channel, kind: str, timeout_s: float | None) -> Stream:
        return Stream(self._begin_stream(channel, timeout_s), self._ledger, self._known, kind)


async def crowd(arguments: argparse.Namespace) -> None:
    """Let callers live side by side."""
    known, ledger = Known.load(arguments.known), Ledger(arguments.ledger)
    until_s = time.monotonic() + arguments.seconds
    draws = [random.Random(arguments.seed * 1000 + number) for number in range(arguments.callers)]
    await asyncio.gather(*(Caller(arguments.address, known, ledger, draw).live(until_s) for draw in draws))


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--known", type=Path, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=16)
    asyncio.run(crowd(parser.parse_args()))


if __name__ == "__main__":
    main()
