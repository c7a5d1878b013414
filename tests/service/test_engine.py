"""Engine: rows come back to whom they belong, whatever fails, waits, leaves or stops."""

import asyncio
import logging
import time

import pytest

from service.admission import DrainRate, QueueLimits
from service.batching import BatchLimits
from service.callers import Caller
from service.engine import Engine
from service.errors import DeadlineExceeded, InternalFault, QueueFull, Unavailable
from tests.service.gate import OUTPUT, GateRunner, run, sequence, started


def test_a_large_request_is_split_and_joined() -> None:
    """A request larger than a batch gets its rows in its own order."""

    async def test() -> None:
        runner = GateRunner()
        runner.gate.set()
        engine = await started(runner)
        lengths = [3, 9, 1, 7, 16, 2, 5] * 10
        sequences = [sequence(number + 1, length) for number, length in enumerate(lengths)]
        encoded = await engine.submit(sequences, OUTPUT, None)
        assert [int(row["pooled_mean"][0]) for row in encoded.rows] == list(range(1, 71))
        assert len(runner.batches) > 1
        assert all(batch.input_ids.size <= 64 for batch in runner.batches)

    run(test)


def test_callers_share_a_batch() -> None:
    """Single sequences of many callers that wait together run together."""

    async def test() -> None:
        runner = GateRunner()
        runner.gate.set()
        engine = await started(runner)
        answers = await asyncio.gather(*(engine.submit([sequence(number)], OUTPUT, None) for number in range(1, 11)))
        assert [int(answer.rows[0]["pooled_mean"][0]) for answer in answers] == list(range(1, 11))
        assert [len(batch.lengths) for batch in runner.batches] == [10]

    run(test)


def test_each_caller_gets_its_own_outputs() -> None:
    """A batch fetches what any of its callers wants, and each gets only what it asked for."""

    async def test() -> None:
        runner = GateRunner()
        runner.gate.set()
        engine = await started(runner)
        mean, largest = await asyncio.gather(
            engine.submit([sequence(1)], frozenset({"pooled_mean"}), None),
            engine.submit([sequence(2)], frozenset({"pooled_max"}), None),
        )
        assert runner.batches[0].outputs == ("pooled_max", "pooled_mean")
        assert (set(mean.rows[0]), set(largest.rows[0])) == ({"pooled_mean"}, {"pooled_max"})

    run(test)


def test_a_failed_batch_fails_its_callers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A runner's exception becomes INTERNAL with an id that is in the log; the next batch runs."""

    async def test() -> None:
        runner = GateRunner()
        runner.gate.set()
        engine = await started(runner)
        runner.error = RuntimeError("device on fire")
        with caplog.at_level(logging.ERROR), pytest.raises(InternalFault) as caught:
            await engine.submit([sequence(1)], OUTPUT, None)
        assert "device on fire" not in str(caught.value)
        assert caught.value.id in str(caught.value)
        assert caught.value.id in caplog.text
        runner.error = None
        assert await engine.submit([sequence(2)], OUTPUT, None)

    run(test)


def test_one_failed_part_fails_the_request_once() -> None:
    """When one batch of a split request fails, the rest of it leaves the queue."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        task = asyncio.create_task(engine.submit([sequence(1, 16)] * 40, OUTPUT, None))
        await asyncio.sleep(0.01)
        runner.error = ValueError("no")
        runner.gate.set()
        with pytest.raises(InternalFault):
            await task
        await asyncio.sleep(0.01)
        assert len(runner.batches) == 2  # one ran, and one stood ready

    run(test)


def test_a_deadline_passes_in_the_queue() -> None:
    """A request whose deadline passes while it waits ends then, and never runs."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        first = asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await engine.submit([sequence(2)], OUTPUT, time.monotonic() + 0.05)
        runner.gate.set()
        await first
        await asyncio.sleep(0.01)
        assert [batch.input_ids[0, 0] for batch in runner.batches] == [1]

    run(test)


def test_a_cancelled_request_leaves_the_queue() -> None:
    """A caller that is gone costs no batch."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        first = asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(engine.submit([sequence(2)], OUTPUT, None))
        await asyncio.sleep(0.01)
        second.cancel()
        runner.gate.set()
        await first
        await asyncio.sleep(0.01)
        assert len(runner.batches) == 1

    run(test)


def test_a_full_queue_refuses_with_a_delay() -> None:
    """Beyond the queue's size requests are refused at once, and told when to try again."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner, max_inputs=4)
        tasks = [asyncio.create_task(engine.submit([sequence(n)], OUTPUT, None)) for n in range(1, 2)]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(engine.submit([sequence(n)], OUTPUT, None)) for n in range(2, 6)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match="4 inputs wait already, at most 4 may") as caught:
            await engine.submit([sequence(9)], OUTPUT, None)
        assert caught.value.retry_delay_s > 0
        runner.gate.set()
        await asyncio.gather(*tasks)
        assert await engine.submit([sequence(9)] * 5, OUTPUT, None), "an empty queue takes any request"

    run(test)


def test_stop_finishes_what_was_accepted() -> None:
    """Stopping refuses new requests and answers all that were taken in."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        tasks = [asyncio.create_task(engine.submit([sequence(n, 16)] * 4, OUTPUT, None)) for n in range(5)]
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(engine.finish(within_s=10))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await engine.submit([sequence(1)], OUTPUT, None)
        runner.gate.set()
        await stopping
        answers = await asyncio.gather(*tasks)
        assert all(len(answer.rows) == 4 for answer in answers)

    run(test)


def test_not_started() -> None:
    """Before the start requests are refused as UNAVAILABLE."""

    async def test() -> None:
        engine = Engine(
            GateRunner(), BatchLimits(max_batch_tokens=64), model="m", pad_token_id=0, queue=QueueLimits(10, 1000)
        )
        with pytest.raises(Unavailable, match="starting or draining"):
            await engine.submit([sequence(1)], OUTPUT, None)

    run(test)


def test_a_caller_does_not_wait_for_another_ones_queue() -> None:
    """Behind a request of many batches a newcomer's is in the next one, and the queue goes on after it."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        large = asyncio.create_task(engine.submit([sequence(1, 30)] * 40, OUTPUT, None, caller=Caller("bulk")))
        await asyncio.sleep(0.01)
        new = asyncio.create_task(engine.submit([sequence(2, 3)], OUTPUT, None, caller=Caller("new")))
        await asyncio.sleep(0.01)
        runner.gate.set()
        await asyncio.gather(large, new)
        first_ids = [int(batch.input_ids[0, 0]) for batch in runner.batches[:4]]
        assert first_ids == [1, 1, 2, 1]  # one ran, and one stood ready

    run(test)


def test_several_streams_run_side_by_side() -> None:
    """A runner with room for two gets two batches at once."""

    async def test() -> None:
        runner = GateRunner(capacity=2)
        engine = await started(runner)
        tasks = [asyncio.create_task(engine.submit([sequence(n, 40)], OUTPUT, None)) for n in range(3)]
        await asyncio.sleep(0.01)
        assert [len(batch.lengths) for batch in runner.batches] == [1, 1]
        runner.gate.set()
        answers = await asyncio.gather(*tasks)
        assert [int(answer.rows[0]["pooled_mean"][0]) for answer in answers] == [0, 1, 2]
        assert len(runner.batches) == 3

    run(test)


def test_a_busy_gateway_sends_no_small_batches_beside_others() -> None:
    """While batches are under way and its core is busy, few rows wait for company, or for a short while."""

    async def test() -> None:
        runner = GateRunner(capacity=8)
        runner.eager = False
        engine = await started(runner, limits=BatchLimits(max_batch_tokens=4096))
        tasks = [asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None))]
        await asyncio.sleep(0)
        for _ in range(3):  # in turns of the loop of their own
            tasks += [asyncio.create_task(engine.submit([sequence(2)] * 2, OUTPUT, None))]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [len(batch.lengths) for batch in runner.batches] == [1], "the first goes at once, the others wait"
        tasks += [asyncio.create_task(engine.submit([sequence(3)] * 32, OUTPUT, None))]
        await asyncio.sleep(0.001)
        assert [len(batch.lengths) for batch in runner.batches] == [1, 38], "enough of them go together"
        tasks += [asyncio.create_task(engine.submit([sequence(4)], OUTPUT, None))]
        await asyncio.sleep(0.05)
        assert [len(batch.lengths) for batch in runner.batches] == [1, 38, 1], "and none waits for long"
        runner.gate.set()
        await asyncio.gather(*tasks)

    run(test)


def test_the_drain_is_measured_while_there_is_work() -> None:
    """Tokens a second count from when work began, not while nothing ran, and soon follow a change."""
    rate = DrainRate()
    assert rate.seconds_for(1000) == 0
    now = 100.0
    for _ in range(20):
        rate.begin(now)
        rate.end(500, now + 0.1, idle=True)
        now += 5.0
    assert rate.seconds_for(1000) == pytest.approx(0.2)
    rate.begin(now)
    for _ in range(100):
        now += 0.1
        rate.end(250, now, idle=False)
    assert rate.seconds_for(1000) == pytest.approx(0.4, rel=0.02)
    rate.end(250, now + 60, idle=False)  # a replica hung: that says little of the next ones
    assert rate.seconds_for(1000) < 5


def test_who_cannot_be_served_in_time_is_refused_at_once() -> None:
    """A deadline that the queue will outlast is told so, with the time after which to try again; others wait."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        runner.gate.set()
        for _ in range(3):
            await engine.submit([sequence(1, 30)], OUTPUT, None)
        engine._admission.drain = DrainRate()
        engine._admission.drain.begin(0.0)
        engine._admission.drain.end(100, 1.0, idle=True)  # 100 tokens a second
        runner.gate.clear()
        held = [asyncio.create_task(engine.submit([sequence(1, 50)] * 4, OUTPUT, None)) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match=r"will take about \d\.\d s, and the deadline is in 1\.0 s") as caught:
            await engine.submit([sequence(1, 5)], OUTPUT, time.monotonic() + 1)
        assert caught.value.retry_delay_s > 1
        late = asyncio.create_task(engine.submit([sequence(1, 5)], OUTPUT, time.monotonic() + 60))
        runner.gate.set()
        await asyncio.gather(late, *held)

    run(test)


def test_another_callers_queue_is_no_reason_to_refuse() -> None:
    """A caller's deadline is held against what runs before its turn: another's long queue is refused more, not it."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        engine._admission.drain.begin(0.0)
        engine._admission.drain.end(100, 1.0, idle=True)  # 100 tokens a second
        bulk = asyncio.create_task(engine.submit([sequence(1, 50)] * 20, OUTPUT, None, caller=Caller("bulk")))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match="comes before it"):
            await engine.submit([sequence(1, 5)], OUTPUT, time.monotonic() + 2, caller=Caller("bulk"))
        engine.check_room(1, time.monotonic() + 3, Caller("small"))
        small = asyncio.create_task(
            engine.submit([sequence(2, 5)], OUTPUT, time.monotonic() + 3, caller=Caller("small"))
        )
        with pytest.raises(QueueFull, match="comes before it"):  # so many of its own take their time beside bulk's
            await engine.submit([sequence(3, 50)] * 4, OUTPUT, time.monotonic() + 2, caller=Caller("third"))
        runner.gate.set()
        await asyncio.gather(small, bulk)

    run(test)


def test_a_short_deadline_is_no_reason_to_refuse() -> None:
    """Behind next to nothing a request with little time is taken in."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        engine._admission.drain.begin(0.0)
        engine._admission.drain.end(100_000, 1.0, idle=True)
        tasks = [asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None)) for _ in range(2)]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(engine.submit([sequence(2)], OUTPUT, time.monotonic() + 0.04)))
        await asyncio.sleep(0.005)
        runner.gate.set()
        answers = await asyncio.gather(*tasks)
        assert [int(answer.rows[0]["pooled_mean"][0]) for answer in answers] == [1, 1, 2]

    run(test)


def test_small_batches_say_nothing_of_the_rate() -> None:
    """A batch that leaves no queue behind is not counted; one that does is, from the moment it began."""
    rate = DrainRate()
    rate.begin(0.0)
    rate.end(13, 1.0, idle=True, queue=False)
    assert rate.seconds_for(1000) == 0.0
    rate.begin(5.0)
    rate.end(100, 5.5, idle=False)
    rate.end(1, 6.0, idle=False, queue=False)
    assert rate.seconds_for(1000) == pytest.approx(5.0)
