"""Intake: messages are read a few at a time, in their order, and who sends slowly holds up nobody."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from service.admission import Door, WorkLimits
from service.errors import InvalidRequest, QueueFull
from service.intake import Intake, Readers


class Sender:
    """A call whose message comes when it is sent."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_read = False

    async def read(self) -> Any:
        self.is_read = True
        return await self.message


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_messages_are_read_a_few_at_a_time() -> None:
    """A call beyond the places is not read before one is free, and those that wait are read in their order."""

    async def test() -> None:
        readers = Readers(2, 60.0, grace_s=60.0)
        senders = [Sender() for _ in range(5)]
        tasks = [asyncio.create_task(readers.read(sender)) for sender in senders]  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert [sender.is_read for sender in senders] == [True, True, False, False, False]
        senders[1].message.set_result(b"1")
        await asyncio.sleep(0.01)
        assert [sender.is_read for sender in senders] == [True, True, True, False, False]
        tasks[3].cancel()
        for sender in (senders[0], senders[2], senders[4]):
            sender.message.set_result(b"x")
        await asyncio.wait(tasks)
        assert [task.result() for place, task in enumerate(tasks) if place != 3] == [b"x", b"1", b"x", b"x"]
        assert not senders[3].is_read, "who left while it waited is not read"

    run(test)


def test_a_slow_sender_makes_room() -> None:
    """Who does not send at once keeps its place while nobody waits for it, and reads on aside where somebody does."""

    async def test() -> None:
        readers = Readers(2, 60.0, patience_s=60.0, grace_s=0.01)
        slow = [Sender() for _ in range(5)]
        reading = [asyncio.create_task(readers.read(sender)) for sender in slow[:2]]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert await quick(readers) == b"quick"
        reading += [asyncio.create_task(readers.read(sender)) for sender in slow[2:]]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (reading[0], reading[1])), "those that are aside have time"
        with pytest.raises(QueueFull, match="message was not there within") as caught:
            await reading[2]  # for which no place is left aside
        assert (caught.value.reason, caught.value.retry_delay_s) == ("slow_message", 60.0)
        for place in (0, 1, 3, 4):
            slow[place].message.set_result(b"late")
            assert await reading[place] == b"late"

    run(test)


def test_who_is_aside_for_long_makes_room() -> None:
    """Of those that are aside the one that has been slow for longest gives up, once it has had its time."""

    async def test() -> None:
        readers = Readers(1, 60.0, patience_s=0.05, grace_s=0.01)
        reading = [asyncio.create_task(readers.read(Sender())) for _ in range(2)]  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert await quick(readers) == b"quick"
        await asyncio.sleep(0.01)
        assert [task.done() for task in reading] == [True, False]
        with pytest.raises(QueueFull, match="message was not there within"):
            await reading[0]
        reading[1].cancel()

    run(test)


def test_many_slow_senders_hold_up_nobody() -> None:
    """Beside ever more of those that send nothing, each that does is read, and soon."""

    async def test() -> None:
        readers = Readers(4, 60.0, patience_s=60.0, grace_s=0.01)
        reading = [asyncio.create_task(readers.read(Sender())) for _ in range(400)]  # type: ignore[arg-type]
        async with asyncio.timeout(10):  # 400 / 4 * 0.01 s; with 60 s for each it would be 100 minutes
            assert await asyncio.gather(*(quick(readers) for _ in range(40))) == [b"quick"] * 40
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)

    run(test)


async def quick(readers: Readers) -> bytes:
    """Read a message that is there."""
    sender = Sender()
    sender.message.set_result(b"quick")
    return await readers.read(sender)  # type: ignore[arg-type]


def test_a_message_that_never_comes_ends() -> None:
    """A call is not kept open for ever for a message that does not come."""

    async def test() -> None:
        with pytest.raises(QueueFull, match="message was not there"):
            await Readers(2, 0.05).read(Sender())  # type: ignore[arg-type]

    run(test)


def test_a_call_without_a_message() -> None:
    """A call that ends without one is the caller's error."""

    async def test() -> None:
        sender = Sender()
        sender.message.set_result(grpc.aio.EOF)
        with pytest.raises(InvalidRequest, match="ended without a message"):
            await Readers(2, 60.0).read(sender)  # type: ignore[arg-type]

    run(test)


def test_a_request_gives_all_back() -> None:
    """What a request holds, twice its message and what was weighed besides, is free when it ends, however it does."""

    async def test() -> None:
        intake = Intake(Door(WorkLimits(max_requests=1, max_bytes=1000, max_streams=1)), 100, 60.0)
        sender = Sender()
        sender.message.set_result(b"x" * 300)

        async def fail() -> None:
            with intake.request() as place:
                assert await place.receive(sender) == b"x" * 300  # type: ignore[arg-type]
                place.weigh(100)
                with pytest.raises(QueueFull, match="1 requests are in work"), intake.request():
                    pass
                with pytest.raises(QueueFull, match="requests of 700 bytes are in work already, at most 1,000"):
                    intake.door.weigh(301, 0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        with intake.request() as place:
            place.weigh(1000)

    run(test)
