"""Threads: what is too long for the event loop is worked on beside it, and so much of it at once, no more.

May import: stream.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from service.stream import ByteBudget

Answer = TypeVar("Answer")


class Threads:
    """Threads for work whose memory is known: who comes when too much is held waits, first come first served.

    Work that has begun cannot be stopped, so its amount is held until it ends, whether its caller is there or not.
    Who leaves while it waits leaves nothing behind.
    """

    def __init__(self, name: str, capacity: int, most: int | None = None) -> None:
        """Start with nothing held.

        Args:
            name: Of the threads.
            capacity: What may be worked on at once; a larger piece of work passes alone.
            most: Threads; None for as many as Python finds right.
        """
        self._executor = ThreadPoolExecutor(most, thread_name_prefix=name)
        self._budget = ByteBudget(capacity)

    async def run(self, work: Callable[[], Answer], amount: int, *, when: bool, until_s: float | None = None) -> Answer:
        """Call `work`, on a thread `when` it would hold the loop up for long, once there is room for its amount.

        Raises:
            TimeoutError: It is not done by `until_s`, on the loop's clock.
        """
        if not when:
            return work()
        async with asyncio.timeout_at(until_s):
            return await self._run(work, amount)

    async def _run(self, work: Callable[[], Answer], amount: int) -> Answer:
        async with self._budget:
            await self._budget.take(amount)
        loop = asyncio.get_running_loop()
        future = self._executor.submit(contextvars.copy_context().run, work)

        def give_back(_future: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._budget.give_back, amount)

        future.add_done_callback(give_back)
        return await asyncio.wrap_future(future)
