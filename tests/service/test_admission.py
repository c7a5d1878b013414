"""Admission: what is refused, for which reason, and with which delay; in numbers, without a clock."""

import random

import pytest

from service.admission import Door, FastestPace, QueueAdmission, QueueLimits, WorkLimits
from service.batching import BatchLimits, BatchPlan, Waiting, WaitingList, plan
from service.callers import NOBODY, Caller
from service.errors import QueueFull, Unavailable


def queue(*lengths: int, max_inputs: int = 100, max_tokens: int = 1000) -> QueueAdmission:
    """Give an engine's admission with sequences of one caller waiting, 100 tokens a second leaving."""
    waiting = WaitingList()
    for number, length in enumerate(lengths):
        waiting.add(Waiting(number, length, 0.0, Caller("bulk")))
    admission = QueueAdmission(waiting, QueueLimits(max_inputs, max_tokens), ahead=10)
    admission.accepting = True
    admission.drain.begin(0.0)
    admission.drain.end(100, 1.0, idle=True)
    return admission


def refused(admission: QueueAdmission, size: int, deadline_s: float | None, tokens: int) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        admission.check_room(size, deadline_s, Caller("bulk"), tokens, 0.0)
    return caught.value


def test_too_many_inputs_wait() -> None:
    """Inputs beyond the queue's are refused, and told when all that waits will have run."""
    error = refused(queue(*[10] * 9, max_inputs=10), 2, None, 2)
    assert (error.reason, error.retry_delay_s) == ("queue_full", pytest.approx(0.9))
    assert str(error) == "9 inputs wait already, at most 10 may; try again in 0.9 s"
    queue(*[10] * 9, max_inputs=10).check_room(1, None, NOBODY, 1, 0.0)


def test_too_many_tokens_wait() -> None:
    """Tokens beyond the queue's are refused likewise, however few inputs they are."""
    error = refused(queue(900), 1, None, 101)
    assert (error.reason, error.retry_delay_s) == ("queue_tokens", pytest.approx(9.0))
    assert str(error) == "900 tokens wait already, at most 1,000 may; try again in 9.0 s"
    queue(900).check_room(1, None, NOBODY, 100, 0.0)


def test_an_empty_queue_takes_any_request() -> None:
    """A request that is larger by itself than the queue may be is not refused for ever."""
    queue().check_room(10_000, 0.001, NOBODY, 10**6, 0.0)


def test_a_deadline_that_the_queue_outlasts() -> None:
    """Who has less time than what is before it takes is refused; who has enough is not."""
    error = refused(queue(500), 1, 5.0, 1)
    assert (error.reason, error.retry_delay_s) == ("deadline", pytest.approx(5.0))
    queue(500).check_room(1, 18.0, Caller("bulk"), 1, 0.0)
    queue(500).check_room(1, None, Caller("bulk"), 1, 0.0)
    queue(500).check_room(1, 1.0, Caller("small"), 1, 0.0)


def test_a_request_needs_time_of_its_own() -> None:
    """What it takes itself counts too: 5 s of waiting and 14 s of work are not done within 18 s."""
    assert refused(queue(500, max_tokens=2000), 1, 18.0, 1400).reason == "deadline"
    queue(500).check_room(1, 18.0, Caller("bulk"), 100, 0.0)


def overloaded(callers: int, times: float, slower_after_s: float) -> tuple[list[float], int]:
    """Let callers send rows of 10 tokens to a device of 10,000 a second, `times` as many as it computes in 8 s.

    After so many seconds it computes half as many. Each allows 2 s. Gives the seconds that those took which were taken
    in, and how many were refused.
    """
    draw, limits, waiting = random.Random(0), BatchLimits(max_batch_tokens=256), WaitingList()
    admission = QueueAdmission(waiting, QueueLimits(10**6, 10**7), ahead=limits.max_batch_tokens)
    admission.accepting = True
    took: list[float] = []
    due = free_s = 0.0
    refusals = 0
    for number in range(int(8 * 1000 * times)):
        due += draw.expovariate(1000 * times)
        while len(waiting) and free_s <= due:
            admission.drain.begin(free_s)
            planned = plan(waiting, limits, free_s)
            assert isinstance(planned, BatchPlan)
            rows = waiting.take(planned, limits)
            free_s += 1e-3 * len(rows) * (2 if free_s > slower_after_s else 1)
            admission.drain.end(10 * len(rows), free_s, idle=False, queue=len(waiting) > 0)
            took += [free_s - row.arrived_s for row in rows]
        caller = Caller(str(draw.randrange(callers)))
        try:
            admission.check_room(1, due + 2.0, caller, 10, due)
        except QueueFull:
            refusals += 1
        else:
            free_s = free_s if len(waiting) else max(free_s, due)
            waiting.add(Waiting(number, 10, due, caller))
    return took, refusals


@pytest.mark.parametrize("callers", [1, 20, 500])
def test_who_is_taken_in_has_its_turn_in_time(callers: int) -> None:
    """With five times too much none that is taken in waits beyond its deadline, and the device is never idle."""
    took, refusals = overloaded(callers, 5.0, slower_after_s=100.0)
    assert max(took) < 2.0
    assert len(took) > 0.95 * 8 * 1000
    assert refusals > 30_000


def test_a_pace_that_halves_leaves_time_enough() -> None:
    """What was taken in at the old pace is done in time at half of it."""
    took, _ = overloaded(500, 5.0, slower_after_s=4.0)
    assert max(took) < 2.0


def test_nothing_is_taken_in_before_the_start() -> None:
    """An engine that is not started, or stops, says so."""
    admission = queue()
    admission.accepting = False
    with pytest.raises(Unavailable, match="starting or draining") as caught:
        admission.check_room(1, None, NOBODY, 1, 0.0)
    assert caught.value.reason == "not_accepting"


def test_the_fastest_batch_is_the_least_time() -> None:
    """The fastest of the last batches counts, slower ones do not change it, and old ones are forgotten."""
    pace = FastestPace()
    assert pace.seconds_for(1000) == 0.0
    pace.note(100, 1.0)
    pace.note(100, 0.1)
    pace.note(100, 5.0)
    assert pace.seconds_for(1000) == pytest.approx(1.0)
    for _ in range(128):
        pace.note(100, 0.2)
    assert pace.seconds_for(1000) == pytest.approx(2.0)


def door(**limits: int) -> Door:
    return Door(WorkLimits(**{"max_requests": 3, "max_bytes": 1000, "max_streams": 2, **limits}))


def test_requests_in_work() -> None:
    """As many as may be are let in, and the next once one has ended; the delay is what those in work took of late."""
    entrance = door()
    for now in (0.0, 0.5, 1.0):
        entrance.enter(now)
    entrance.leave(0, 2.0)
    entrance.enter(2.0)
    with pytest.raises(QueueFull, match="3 requests are in work already, at most 3 may be") as caught:
        entrance.enter(2.0)
    assert (caught.value.reason, caught.value.retry_delay_s) == ("requests", pytest.approx(6.0))
    entrance.leave(0, 3.0)
    entrance.enter(3.0)


def test_bytes_in_work() -> None:
    """Bytes beyond what may be are refused; one request that takes more by itself passes where there is no other."""
    entrance = door()
    entrance.enter(0.0)
    entrance.weigh(600, 0)
    with pytest.raises(QueueFull, match="requests of 600 bytes are in work already, at most 1,000") as caught:
        entrance.weigh(401, 0)
    assert caught.value.reason == "request_bytes"
    entrance.weigh(400, 0)
    entrance.leave(1000, 1.0)
    entrance.weigh(5000, 0)
    entrance.weigh(5000, 5000)
    with pytest.raises(QueueFull):
        entrance.weigh(1, 0)


def test_streams() -> None:
    """As many as may be are open, and one more once one has ended."""
    entrance = door()
    entrance.open_stream()
    entrance.open_stream()
    with pytest.raises(QueueFull, match="2 streams are open already, at most 2 may be") as caught:
        entrance.open_stream()
    assert caught.value.reason == "streams"
    entrance.close_stream()
    entrance.open_stream()
