"""Stream: many items of one stream in work at once, answers in the items' order, their bytes bounded.

May import: errors.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from service.errors import QueueFull

_NO_LIMIT = 2**62

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ByteBudget:
    """Bytes that may be held at once; who asks first gets them first.

    Entering it waits for one's turn, and `take` is for whoever has it. A single amount above the capacity passes
    when nothing else is held.
    """

    def __init__(self, capacity: int, patience_s: float | None = None) -> None:
        """Start with nothing held.

        Args:
            capacity: Bytes.
            patience_s: How long nothing may move while someone waits; None for as long as it takes.
        """
        self.held = 0
        self._capacity = capacity
        self._patience_s = patience_s
        self._moved_s = 0.0
        self._turn = asyncio.Lock()  # wakes those who wait in the order in which they came
        self._freed = asyncio.Event()

    async def __aenter__(self) -> None:
        await self._turn.acquire()

    async def __aexit__(self, *_exception: object) -> None:
        self._turn.release()

    async def take(self, amount: int) -> None:
        """Hold bytes once there is room.

        Raises:
            TimeoutError: Nothing moved for too long.
        """
        while not self.has_room(amount):
            self._freed.clear()
            async with asyncio.timeout_at(None if self._patience_s is None else self._moved_s + self._patience_s):
                await self._freed.wait()
        self.hold(amount)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody has the turn, or waits for it."""
        return self._turn.locked()

    def has_room(self, amount: int) -> bool:
        """Tell whether so many bytes can be held at once."""
        return not self.held or self.held + amount <= self._capacity

    def hold(self, amount: int) -> None:
        """Hold bytes at once, room or not."""
        self.held += amount
        self._moved_s = asyncio.get_running_loop().time()

    def give_back(self, amount: int) -> None:
        """Give bytes back."""
        self.held -= amount
        self._moved_s = asyncio.get_running_loop().time()
        self._freed.set()


class ServerBudget:
    """Bytes of unsent answers that a server may hold together.

    Small answers have half as much for themselves, so that who asks for vectors never waits for a reader of attention.
    Tiny ones wait for nobody: how many there may be is bounded with the requests in work.
    """

    def __init__(self, capacity: int, small_bytes: int, patience_s: float = 60.0, *, tiny_bytes: int = 0) -> None:
        """Start with nothing held.

        Args:
            capacity: Bytes of all large answers together.
            small_bytes: Answers up to this size are small.
            patience_s: With answers that nobody reads, before who waits for their bytes is sent away.
            tiny_bytes: Answers up to this size are tiny.
        """
        self.patience_s = patience_s
        self._small_bytes = small_bytes
        self._tiny_bytes = tiny_bytes
        self._tiny = ByteBudget(_NO_LIMIT, patience_s)
        self._small = ByteBudget(capacity // 2, patience_s)
        self._large = ByteBudget(capacity, patience_s)

    @property
    def held(self) -> int:
        """Bytes that are held."""
        return self._tiny.held + self._small.held + self._large.held

    def of(self, amount: int) -> ByteBudget:
        """Give the budget that an answer of this size counts for."""
        if amount <= self._tiny_bytes:
            return self._tiny
        return self._small if amount <= self._small_bytes else self._large


class Share:
    """The bytes of one answer: counted, until they are sent, for its stream and for the server.

    Items enter in their order, and who has entered waits for bytes before the next one does. Since answers leave
    in the same order, whoever holds bytes can always send them, and waiting for some never blocks for good.
    """

    def __init__(self, stream: ByteBudget, server: ServerBudget, *, copies: int = 1) -> None:
        """Hold nothing yet; each byte of the answer counts as many times as there are `copies` of it."""
        self._copies = copies
        self._stream = stream
        self._server = server
        self._budgets: tuple[ByteBudget, ...] = ()
        self._held = 0
        self._anew = False

    def begin_anew(self) -> None:
        """Note that the item begins anew: those behind it may be before it now, so that it must not wait for them."""
        self._anew = True

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the item's turn."""
        if self._anew:
            yield
        else:
            async with self._stream:
                yield

    async def take(self, amount: int, until_s: float | None = None) -> None:
        """Hold the answer's bytes once there is room for them; an item that begins anew keeps what it has.

        Raises:
            QueueFull: The server's are held by streams whose readers do not read.
            TimeoutError: There is no room by `until_s`, on the loop's clock.
        """
        if self._budgets:
            return
        server, amount = self._server.of(amount), amount * self._copies
        at_once = self._stream.has_room(amount) and server.has_room(amount) and not server.is_awaited
        if at_once or self._anew:
            self._stream.hold(amount)
            server.hold(amount)
            self._budgets, self._held = (self._stream, server), amount
            return
        async with asyncio.timeout_at(until_s):
            await self._wait(server, amount)

    async def _wait(self, server: ByteBudget, amount: int) -> None:
        await self._stream.take(amount)
        self._budgets, self._held = (self._stream,), amount
        try:
            async with server:
                await server.take(amount)
        except TimeoutError as error:
            self.give_back()
            raise QueueFull(
                f"{server.held:,} bytes are held for unsent answers, and their readers have read nothing for "
                f"{self._server.patience_s:.0f} s; try again later, or ask for less at once",
                retry_delay_s=self._server.patience_s / 2,
                reason="unsent_answers",
            ) from error
        self._budgets = (self._stream, server)

    def give_back(self, amount: int | None = None) -> None:
        """Release bytes, at most what is held; all if not said."""
        released = self._held if amount is None else min(amount, self._held)
        self._held -= released
        for budget in self._budgets:
            budget.give_back(released)

    def keep(self, amount: int) -> None:
        """Release all but so many bytes."""
        self.give_back(max(0, self._held - amount))


async def in_order(
    source: AsyncIterator[Item],
    work: Callable[[Item], Coroutine[None, None, Answer]],
    *,
    most: int,
    stopping: asyncio.Event,
) -> AsyncGenerator[Answer, None]:
    """Work on many items of a stream at once and yield the answers in the items' order.

    Args:
        source: The items; the next one is read only while fewer than `most` are unanswered.
        work: Answers one item; must not raise.
        most: Items in work, or answered and not yet taken.
        stopping: Once set, no more items are read; those that were read are still answered.
    """
    pending: deque[asyncio.Task[Answer]] = deque()
    stop = asyncio.ensure_future(stopping.wait())
    reader: asyncio.Task[Item] | None = None
    reading = True
    try:
        while pending or reading:
            if reading and reader is None and len(pending) < most:
                reader = asyncio.ensure_future(_next(source))
            waited = {task for task in (reader, pending[0] if pending else None, stop if reading else None) if task}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reader is not None and reader.done():
                try:
                    pending.append(asyncio.ensure_future(work(reader.result())))
                except StopAsyncIteration:
                    reading = False
                reader = None
            reading = reading and not stop.done()
            while pending and pending[0].done():
                yield pending.popleft().result()
    finally:
        for task in (*pending, reader, stop):
            if task is not None:
                task.cancel()


async def _next(source: AsyncIterator[Item]) -> Item:
    return await anext(source)
