"""Engine: what comes too late, and what was computed for nobody."""

import asyncio
import time

import pytest

from service import metrics
from service.errors import DeadlineExceeded
from tests.service.gate import OUTPUT, GateRunner, run, sequence, started


def test_late_rows_are_in_no_batch() -> None:
    """Who cannot be answered in time any more when a batch is made is told so then; the others run."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        first = asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None))
        await asyncio.sleep(0.01)
        engine._admission.fastest.note(1, 10.0)  # no token takes less than 10 s
        late = asyncio.create_task(engine.submit([sequence(2)] * 40, OUTPUT, time.monotonic() + 20))
        other = asyncio.create_task(engine.submit([sequence(3)], OUTPUT, None))
        await asyncio.sleep(0.01)
        runner.gate.set()
        with pytest.raises(DeadlineExceeded, match="would have passed"):
            await late
        await asyncio.gather(first, other)
        assert [sorted(set(batch.input_ids[:, 0])) for batch in runner.batches] == [[1], [3]]

    run(test)


def test_a_passed_deadline_is_seen_before_its_timer() -> None:
    """A row whose deadline passed while the loop was busy is in no batch, whichever of them comes first."""

    async def test() -> None:
        runner = GateRunner()
        runner.gate.set()
        engine = await started(runner)
        late = asyncio.create_task(engine.submit([sequence(1)], OUTPUT, time.monotonic() + 0.05))
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - as another caller's long work would
        with pytest.raises(DeadlineExceeded):
            await late
        assert not runner.batches

    run(test)


def test_what_was_computed_for_nobody_is_counted() -> None:
    """Inputs and tokens whose caller left while they ran are counted, those of others are not."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        counted = [metrics.WASTED_INPUTS.labels("m"), metrics.WASTED_TOKENS.labels("m")]
        before = [metric._value.get() for metric in counted]
        tasks = [asyncio.create_task(engine.submit([sequence(1, 5)] * 2, OUTPUT, None)) for _ in range(2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        runner.gate.set()
        await tasks[1]
        assert [metric._value.get() - was for metric, was in zip(counted, before, strict=True)] == [2, 10]

    run(test)


def test_the_runner_can_ask_who_still_waits() -> None:
    """Before a batch runs again it can be told which of its rows anybody still waits for."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        tasks = [asyncio.create_task(engine.submit([sequence(number)], OUTPUT, None)) for number in (1, 2)]
        await asyncio.sleep(0.01)
        assert [runner.wanted(row) for row in (0, 1)] == [True, True]
        gone = int(runner.batches[0].input_ids[0, 0]) - 1
        tasks[gone].cancel()
        await asyncio.sleep(0.01)
        assert [runner.wanted(row) for row in (0, 1)] == [False, True]
        runner.gate.set()
        await asyncio.wait(tasks)

    run(test)
