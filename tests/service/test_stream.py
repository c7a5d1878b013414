"""Stream: answers in the items' order, no more read than is worked on, no more bytes than there is room for."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.errors import QueueFull
from service.stream import ByteBudget, ServerBudget, Share, in_order


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


async def enter(share: Share, amount: int) -> None:
    async with share.turn():
        await share.take(amount)


def test_shares_wait_in_their_order() -> None:
    """Who came first gets bytes first, even where a later one would fit; one above the capacity passes alone."""

    async def test() -> None:
        stream, server = ByteBudget(100), ServerBudget(1000, small_bytes=0)
        shares = [Share(stream, server) for _ in range(4)]
        tasks = [asyncio.create_task(enter(*item)) for item in zip(shares, (60, 70, 10, 500), strict=True)]
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, False, False, False]
        shares[0].give_back(40)
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, True, True, False]
        for share in shares[:3]:
            share.give_back()
            share.give_back()
        await asyncio.sleep(0.01)
        assert tasks[3].done()
        assert (stream.held, server.held) == (500, 500)
        shares[3].give_back(10_000)
        assert (stream.held, server.held) == (0, 0)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_streams_share_the_servers_room() -> None:
    """Large answers of all streams have one room, small ones another; a cancelled wait holds nothing."""

    async def test() -> None:
        server = ServerBudget(100, small_bytes=10)
        first, second, small = (Share(ByteBudget(1000), server) for _ in range(3))
        await enter(first, 80)
        waiting = asyncio.create_task(enter(second, 30))
        await enter(small, 10)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.sleep(0.01)
        second.give_back()
        assert server.held == 90
        third = asyncio.create_task(enter(Share(ByteBudget(1000), server), 30))
        await asyncio.sleep(0.01)
        first.give_back(40)
        await third
        assert server.held == 80

    asyncio.run(asyncio.wait_for(test(), 30))


def test_tiny_answers_wait_for_nobody() -> None:
    """Answers of a few vectors pass while small and large ones that nobody reads fill the room, and are counted."""

    async def test() -> None:
        server = ServerBudget(100, small_bytes=50, tiny_bytes=5)
        await enter(Share(ByteBudget(1000), server), 50)
        await enter(Share(ByteBudget(1000), server), 100)
        tiny = Share(ByteBudget(1000), server)
        async with asyncio.timeout(5):
            await enter(tiny, 5)
        assert server.held == 155
        tiny.give_back()
        assert server.held == 150

    asyncio.run(asyncio.wait_for(test(), 30))


def test_nobody_waits_for_ever_for_a_reader() -> None:
    """Where no byte moves for too long, those who wait are sent away with a delay and hold nothing."""

    async def test() -> None:
        server, stream = ServerBudget(100, small_bytes=0, patience_s=0.05), ByteBudget(1000)
        unread = Share(ByteBudget(1000), server)
        await enter(unread, 80)
        for _ in range(3):
            with pytest.raises(QueueFull, match="80 bytes are held for unsent answers") as caught:
                await enter(Share(stream, server), 30)
            assert caught.value.retry_delay_s > 0
            assert (stream.held, server.held) == (0, 80)
        unread.give_back()
        await enter(Share(stream, server), 30)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_who_begins_anew_waits_for_nobody() -> None:
    """An item of a replaced model neither waits behind its successors nor counts twice."""

    async def test() -> None:
        stream, server = ByteBudget(100), ServerBudget(100, small_bytes=0)
        first, second = Share(stream, server), Share(stream, server)
        await enter(second, 90)
        first.begin_anew()
        await enter(first, 50)
        second.begin_anew()
        await enter(second, 95)
        assert (stream.held, server.held) == (140, 140)

    asyncio.run(asyncio.wait_for(test(), 30))
