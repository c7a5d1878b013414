"""Stream: many items of one stream in work at once, answers in the items' order, their bytes bounded.

What is too long for the event loop goes to a thread from here.
May import: nothing of the service.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def off_loop(work: Callable[[], Answer], *, when: bool) -> Answer:
    """Call `work`, on a thread of its own `when` it would hold the loop up for long."""
    return await asyncio.to_thread(work) if when else work()


class ByteBudget:
    """Bytes of a stream's answers that may be unsent at once; requests take their share in their order.

    Entering it waits for one's turn. Since answers leave in the same order, whoever holds bytes can always
    send them, so that waiting for some never blocks for good. A single answer above the capacity passes
    when nothing else is held.
    """

    def __init__(self, capacity: int) -> None:
        """Start with nothing held."""
        self._capacity = capacity
        self._held: dict[int, int] = {}
        self._turn = asyncio.Lock()  # wakes those who wait in the order in which they came
        self._freed = asyncio.Condition()

    async def __aenter__(self) -> None:
        await self._turn.acquire()

    async def __aexit__(self, *_exception: object) -> None:
        self._turn.release()

    async def take(self, holder: object, amount: int) -> None:
        """Hold bytes for a request once there is room."""
        async with self._freed:
            await self._freed.wait_for(lambda: not self._held or sum(self._held.values()) + amount <= self._capacity)
            self._held[id(holder)] = amount

    async def give_back(self, holder: object) -> None:
        """Release a request's bytes, if it holds any."""
        async with self._freed:
            self._held.pop(id(holder), None)
            self._freed.notify_all()


async def in_order(
    source: AsyncIterator[Item],
    work: Callable[[Item], Coroutine[None, None, Answer]],
    *,
    most: int,
    stopping: asyncio.Event,
) -> AsyncIterator[Answer]:
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
