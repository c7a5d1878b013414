"""Stream: answers in the items' order, no more read than is worked on."""

import asyncio
from collections.abc import AsyncIterator

from service.stream import in_order


async def numbers(count: int, read: list[int]) -> AsyncIterator[int]:
    for number in range(count):
        read.append(number)
        yield number


def test_in_order_keeps_the_order() -> None:
    """Answers come in the items' order however long each takes, and few items are read ahead."""

    async def test() -> None:
        read: list[int] = []

        async def work(number: int) -> int:
            await asyncio.sleep(0.001 * (10 - number % 10))
            return number

        got = []
        async for answer in in_order(numbers(50, read), work, most=4, stopping=asyncio.Event()):
            got.append(answer)
            assert len(read) <= len(got) + 5
        assert got == list(range(50))

    asyncio.run(asyncio.wait_for(test(), 30))


def test_in_order_stops_reading_when_told() -> None:
    """Once stopping is set no more items are read, and those that were read are answered."""

    async def test() -> None:
        stopping = asyncio.Event()

        async def endless() -> AsyncIterator[int]:
            yield 1
            yield 2
            await asyncio.sleep(3600)

        async def work(number: int) -> int:
            stopping.set()
            await asyncio.sleep(0.01)
            return number

        got = [answer async for answer in in_order(endless(), work, most=4, stopping=stopping)]
        assert got in ([1], [1, 2])

    asyncio.run(asyncio.wait_for(test(), 30))
