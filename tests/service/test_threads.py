"""Threads: so much is worked on at once, no more, and what has begun counts until it ends."""

import asyncio
import threading

import pytest

from service.threads import Threads


def test_so_much_at_once() -> None:
    """What does not fit beside others waits; a larger piece passes alone; little is done right here."""

    async def test() -> None:
        threads = Threads("test", 10)
        gate, began = threading.Event(), list[int]()

        def work(number: int) -> int:
            began.append(number)
            gate.wait(10)
            return number

        tasks = [asyncio.create_task(threads.run(lambda n=n: work(n), n, when=True)) for n in (4, 6, 1, 50)]
        await asyncio.sleep(0.1)
        assert sorted(began) == [4, 6]
        assert await threads.run(threading.get_ident, 100, when=False) == threading.get_ident()
        gate.set()
        assert await asyncio.gather(*tasks) == [4, 6, 1, 50]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_who_leaves() -> None:
    """Work of somebody who is gone counts until it ends where it had begun, and never begins where it had not."""

    async def test() -> None:
        threads = Threads("test", 10)
        gate, began = threading.Event(), list[str]()

        def work(name: str) -> None:
            began.append(name)
            gate.wait(10)

        running = asyncio.create_task(threads.run(lambda: work("running"), 10, when=True))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(threads.run(lambda: work("waiting"), 10, when=True))
        await asyncio.sleep(0.1)
        for task in (running, waiting):
            task.cancel()
        last = asyncio.create_task(threads.run(lambda: work("last"), 10, when=True))
        await asyncio.sleep(0.1)
        assert began == ["running"]
        gate.set()
        await last
        assert began == ["running", "last"]
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(test(), 30))
