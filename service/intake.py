"""Intake: how requests come in, so that what is in work, and what is on its way into it, stays within bounds.

gRPC itself would read the message of every call that is opened, and hold it. Here a call is let in first, and its
message is read when there is a place to read it to; only what has come and not yet been let in is gRPC's, up to a
stream's window (64 KiB) a call.
May import: admission, errors, grpc.
"""

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import grpc

from service.admission import Door
from service.errors import InvalidRequest, QueueFull

_PATIENCE_S = 2.0
_GRACE_S = 0.02  # a message of a few KiB comes with its call, or right behind it
_PLACES_BYTES = 64 * 2**20
_LAST_WORD_S = 0.05  # within which gRPC says so, after it has said that there is no message


class Readers:
    """Places to read messages to; each may take a whole one.

    Who comes when all are taken waits its turn. Whose message does not come at once is put aside for who waits, and
    where as many are aside already, whoever of them has had its time gives up, or else the one that came last: clients
    that send slowly, or not at all, hold up none that does.
    """

    def __init__(self, most: int, most_s: float, patience_s: float = _PATIENCE_S, *, grace_s: float = _GRACE_S) -> None:
        """Start with all places free.

        Args:
            most: Places, and as many aside.
            most_s: How long a message may take to come.
            patience_s: How long it may aside while others are to be put there.
            grace_s: How long it may while others wait to be read.
        """
        self._most = most
        self._most_s = most_s
        self._patience_s = patience_s
        self._grace_s = grace_s
        self._reading: dict[asyncio.Task[Any], float] = {}  # who reads -> since when; the first has for longest
        self._aside: dict[asyncio.Task[Any], float] = {}  # the same
        self._ended: set[asyncio.Task[Any]] = set()  # of those, who has been told to end
        self._turn = asyncio.Lock()  # wakes those who wait in the order in which they came
        self._freed = asyncio.Event()
        self._sweep: asyncio.TimerHandle | None = None

    async def read(self, context: grpc.aio.ServicerContext) -> bytes:
        """Read the one message of a call.

        Raises:
            InvalidRequest: It ended without one.
            QueueFull: It took too long to come.
        """
        if len(self._reading) >= self._most or self._turn.locked():
            async with self._turn:
                await self._free_a_place()
        reader = asyncio.current_task()
        assert reader is not None
        self._reading[reader] = started = time.monotonic()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._most_s, self._end_the_slowest)
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if reader not in self._ended or reader.uncancel():
                raise
            raise self._too_slow(time.monotonic() - started) from None
        finally:
            self._reading.pop(reader, None)
            self._aside.pop(reader, None)
            self._ended.discard(reader)
            self._freed.set()
        if data is grpc.aio.EOF:
            await _last_word()
            raise InvalidRequest("the call ended without a message; send one request")
        return bytes(data)

    def _too_slow(self, seconds: float) -> QueueFull:
        return QueueFull(
            f"the request's message was not there within {seconds:.1f} s; send it faster, or "
            "start the server with a smaller --max-request-bytes, so that more can be read at once",
            retry_delay_s=self._patience_s,
            reason="slow_message",
        )

    def _end(self, reader: asyncio.Task[Any]) -> None:
        if reader not in self._ended:
            self._ended.add(reader)
            reader.cancel()

    def _put_aside(self, reader: asyncio.Task[Any], now: float) -> None:
        """Free a reader's place; it reads on unless too many do so."""
        since = self._reading.pop(reader)
        if len(self._aside) >= self._most:
            slowest, began = next(iter(self._aside.items()))
            if began + self._patience_s > now:
                self._end(reader)
                return
            self._end(slowest)
            del self._aside[slowest]
        self._aside[reader] = since

    def _end_the_slowest(self) -> None:
        """End those whose time is up, and come again for the others: one timer for all costs no call anything."""
        self._sweep = None
        now = time.monotonic()
        left = []
        for reader, since in (*self._aside.items(), *self._reading.items()):
            if since + self._most_s > now:
                left.append(since)
            else:
                self._end(reader)
        if left:
            later_s = min(left) + self._most_s - now
            self._sweep = asyncio.get_running_loop().call_later(later_s, self._end_the_slowest)

    async def _free_a_place(self) -> None:
        """Wait until a place is free; whose message is not there in time is put aside."""
        while len(self._reading) >= self._most:
            first, since = next(iter(self._reading.items()))
            self._freed.clear()
            try:
                async with asyncio.timeout(since + self._grace_s - time.monotonic()):
                    await self._freed.wait()
            except TimeoutError:
                if first in self._reading:
                    self._put_aside(first, time.monotonic())


class Intake:
    """The server's door, and the places behind it."""

    def __init__(self, door: Door, max_request_bytes: int, max_deadline_s: float) -> None:
        """Store the parts; there are places for 64 MiB of messages, at least two."""
        self.door = door
        self._readers = Readers(max(2, _PLACES_BYTES // max_request_bytes), max_deadline_s)

    def request(self) -> "Place":
        """Give the place of one request; entering it lets the request in, leaving it ends it."""
        return Place(self.door, self._readers)


class Place:
    """One request in work."""

    __slots__ = ("_bytes", "_door", "_readers")

    def __init__(self, door: Door, readers: Readers) -> None:
        """Hold nothing yet."""
        self._door = door
        self._readers = readers
        self._bytes = 0

    def __enter__(self) -> Self:
        """Let the request in.

        Raises:
            QueueFull: As many as may be are in work.
        """
        self._door.enter(time.monotonic())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take it out of work."""
        self._door.leave(self._bytes, time.monotonic())

    async def receive(self, context: grpc.aio.ServicerContext) -> bytes:
        """Read the call's one message, and count it.

        Raises:
            InvalidRequest: It ended without one.
            QueueFull: It took too long to come, or there is no room for its bytes.
        """
        return self.hold(await self._readers.read(context))

    def hold(self, data: bytes, *, copies: int = 2) -> bytes:
        """Count a message until the request ends, as often as there are `copies`: as it came, parsed, and its texts.

        Raises:
            QueueFull: There is no room for it.
        """
        self.weigh(copies * len(data))
        return data

    def weigh(self, amount: int) -> None:
        """Count so many bytes more until the request ends.

        Raises:
            QueueFull: There is no room for them.
        """
        self._door.weigh(amount, self._bytes)
        self._bytes += amount


async def _last_word() -> None:
    """Wait for what gRPC has to say of a call whose message did not come: nothing, or that it is over.

    Raises:
        QueueFull: It is: the message was larger than may be, or the call was taken back, which cannot be told apart.
    """
    try:
        await asyncio.sleep(_LAST_WORD_S)
    except asyncio.CancelledError:
        raise QueueFull(
            "the call was over before its message was there: taken back, or larger than --max-request-bytes",
            retry_delay_s=_PATIENCE_S,
            reason="no_message",
        ) from None
