"""Engine: the queue, deadlines, futures and dispatch. The only owner of concurrency.

One event loop, no locks. `submit` puts a request's sequences into the waiting list and awaits their rows;
whenever the runner has room, `batching.plan` says what runs next. A request whose caller is gone, or whose
deadline passed, leaves the queue at once.
May import: admission, batching, callers, causes, cross, inference, reduce, runner, outputs, metrics, tracing, errors.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count

from service import metrics
from service.admission import QueueAdmission, QueueLimits
from service.batching import HIDDEN_STATES, Batch, BatchLimits, BatchPlan, Waiting, WaitingList, pad, plan, unpad
from service.callers import NOBODY, Caller
from service.causes import cause_of
from service.cross import Wanted, costs, padded_targets
from service.errors import DeadlineExceeded, InternalFault, Outdated, Unavailable, is_for_callers
from service.inference import BatchResult, NotFinite
from service.outputs import Row
from service.reduce import Look
from service.runner import Runner, StuckError
from service.tokenization import Sequence
from service.tracing import RequestTrace, batch_trace, enqueued

_LOG = logging.getLogger(__name__)

_COMPANY_ROWS = 32
_COMPANY_S = 0.01
# So many batches in a row must have met nobody else before one counts as alone. Under load, too, one may be the only
# one that has come so far: to run it on the event loop would keep the others from coming.
_ALONE_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request's rows, in its sequences' order, and its slowest row's times in seconds."""

    rows: list[Row]
    queue_s: float
    inference_s: float


@dataclass(eq=False, slots=True)
class _Job:
    """One request on its way through the queue."""

    sequences: SequenceOf[Sequence]
    outputs: frozenset[str]
    looks: SequenceOf[Wanted]
    costs: SequenceOf[int]
    deadline_s: float | None
    done: asyncio.Future[Encoded]
    trace: RequestTrace | None
    rows: dict[int, Row] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    queue_s: float = 0.0
    inference_s: float = 0.0

    @property
    def needs_states(self) -> bool:
        """Whether hidden states before the last are wanted or looked at."""
        looked = any(isinstance(look, Look) for look in self.looks)
        return looked or any(name.startswith(HIDDEN_STATES) for name in self.outputs)


class Engine:
    """Merges the sequences of all callers into batches and gives each caller its own rows back."""

    def __init__(
        self, runner: Runner, limits: BatchLimits, *, model: str, pad_token_id: int, queue: QueueLimits
    ) -> None:
        """Store the parts; `start` starts.

        Args:
            runner: Where batches run.
            limits: The batching policy.
            model: Name under which the metrics count.
            pad_token_id: Fills padded places.
            queue: What may wait, over all callers, before requests are refused.
        """
        self._runner = runner
        self._limits = limits
        self._model = model
        self._pad_token_id = pad_token_id
        self._waiting = WaitingList()
        self._admission = QueueAdmission(self._waiting, queue, ahead=limits.max_batch_tokens)
        self._jobs: dict[int, tuple[_Job, int]] = {}  # arrival number -> job, place in the job
        self._numbers = count()
        self._batches: set[asyncio.Task[None]] = set()
        self._running = 0  # batches that the runner holds
        self._submitted = 0  # requests that are not answered yet
        self._alone = 0  # batches in a row whose only request was the only one here
        self._pump_due: asyncio.Handle | None = None
        self._pump_soon = False  # it is due as soon as the loop comes round

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for a batch."""
        return self._waiting.tokens

    async def start(self) -> None:
        """Start the runner; after it, requests are taken in."""
        await self._runner.start(self._schedule_pump)
        self._admission.accepting = True

    def refuse(self) -> None:
        """Take no more requests in; the accepted ones go on."""
        self._admission.accepting = False

    def outdate(self) -> None:
        """Give all that waits, and all that comes from now on, back to its callers: the model was replaced.

        What runs already ends as it will.
        """
        self._admission.outdated = True
        self._give_back(Outdated)

    def give_up(self) -> None:
        """Take no more requests in, and give all that waits back to its callers: nothing will run any more."""
        self.refuse()
        self._give_back(lambda: Unavailable("this server cannot compute any more and is about to end; try another one"))

    def _give_back(self, error: Callable[[], Unavailable]) -> None:
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            self._forget(job)
            if not job.done.done():
                job.done.set_exception(error())

    async def finish(self, within_s: float) -> None:
        """Take no more requests in, and wait until the accepted ones are done or the time is up."""
        self.refuse()
        end_s = time.monotonic() + within_s
        while (self._batches or self._jobs) and (rest_s := end_s - time.monotonic()) > 0:
            await asyncio.wait(self._batches, timeout=rest_s) if self._batches else await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Refuse requests and stop the runner, which ends the batch that it is in."""
        self.refuse()
        await self._runner.stop()

    async def submit(
        self,
        sequences: SequenceOf[Sequence],
        outputs: frozenset[str],
        deadline_s: float | None,
        *,
        caller: Caller = NOBODY,
        looks: SequenceOf[Wanted] = (),
    ) -> Encoded:
        """Run a request's sequences and give their rows back.

        Args:
            sequences: At least one.
            outputs: Names of a batch's outputs.
            deadline_s: On the clock of `time.monotonic`; None for none.
            caller: Who asks; callers take turns.
            looks: What is wanted of each sequence's attention, or of a target's to it; empty for nothing.

        Raises:
            Unavailable: The engine is not started, or is stopping.
            QueueFull: Too much waits already.
            DeadlineExceeded: The deadline passed.
            InternalFault: A batch failed; the log says why.
            Outdated: The model was replaced meanwhile.
        """
        now = time.monotonic()
        tokens = costs([sequence.length for sequence in sequences], looks)
        self._admission.check_room(len(sequences), deadline_s, caller, sum(tokens), now)
        done: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        job = _Job(sequences, outputs, looks, tokens, deadline_s, done, enqueued())
        for place, cost in enumerate(tokens):
            number = next(self._numbers)
            job.numbers.append(number)
            self._jobs[number] = (job, place)
            self._waiting.add(Waiting(number, cost, now, caller))
        self._submitted += 1
        self._schedule_pump()
        try:
            async with asyncio.timeout(None if deadline_s is None else deadline_s - now):
                return await job.done
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the request waited or ran") from error
        finally:
            self._submitted -= 1
            self._forget(job)

    def check_accepting(self) -> None:
        """Do nothing while requests are taken in.

        Raises:
            Unavailable: The engine is not started, or is stopping.
        """
        self._admission.check_accepting()

    def check_room(self, size: int, deadline_s: float | None, caller: Caller = NOBODY) -> None:
        """Do nothing while so many more sequences may wait and could be run in time, however few their tokens.

        Raises:
            Unavailable: The engine is not started, or is stopping.
            QueueFull: Too much waits already.
            Outdated: The model was replaced meanwhile.
        """
        self._admission.check_room(size, deadline_s, caller, 0, time.monotonic())

    def _forget(self, job: _Job) -> None:
        """Take what is left of a job out of the queue."""
        if len(job.rows) == len(job.sequences):
            return  # all of it has run
        for number in job.numbers:
            self._waiting.remove(number)
            self._jobs.pop(number, None)
        metrics.record_queue(self._model, len(self._waiting), self._waiting.tokens)

    def _schedule_pump(self, delay_s: float = 0.0) -> None:
        """Look at the queue once the requests that arrived together are all in it; sooner than planned, not later."""
        if self._pump_soon:
            return
        if self._pump_due is not None:
            self._pump_due.cancel()
        loop = asyncio.get_running_loop()
        self._pump_soon = not delay_s
        self._pump_due = loop.call_later(delay_s, self._pump) if delay_s else loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start batches while the runner has room; where that fails, all that waits is failed: it would fail again."""
        self._pump_soon = False
        try:
            self._start_batches()
        except Exception as error:  # noqa: BLE001 - a fault of ours, of which callers must not wait for ever
            metrics.record_crash("batch")
            self._fail(list(self._jobs.values()), error)
        metrics.record_queue(self._model, len(self._waiting), self._waiting.tokens)

    def _start_batches(self) -> None:
        while self._running < self._runner.capacity or self._is_worth_queueing():
            if self._is_worth_waiting():
                self._schedule_pump(_COMPANY_S)
                break
            most = self._admission.longest(self._runner.capacity)
            planned = plan(self._waiting, self._limits, time.monotonic(), most)
            if not isinstance(planned, BatchPlan):
                if planned is not None:
                    self._schedule_pump(planned)
                break
            if self._drop_late(planned):
                continue
            task = asyncio.get_running_loop().create_task(self._run(*self._take(planned)))
            self._batches.add(task)
            task.add_done_callback(self._batch_done)

    def _drop_late(self, planned: BatchPlan) -> bool:
        """Fail those of a batch whose deadline will have passed before it can be back; tells whether there are some."""
        tokens = sum(self._waiting[number].length for number in planned.numbers)
        back_s = time.monotonic() + self._admission.fastest.seconds_for(tokens)
        jobs = {id(job): job for job in (self._jobs[number][0] for number in planned.numbers)}
        late = [job for job in jobs.values() if job.deadline_s is not None and job.deadline_s < back_s]
        for job in late:
            self._forget(job)
            if not job.done.done():
                job.done.set_exception(DeadlineExceeded("the deadline would have passed before the model had run"))
        return bool(late)

    def _is_worth_queueing(self) -> bool:
        """Tell whether one more batch should stand ready, so that the device does not wait for the event loop.

        Only a full one: to a smaller one company may still come. It brought 3 % more texts a second on two cores.
        """
        full = self._waiting.tokens >= self._limits.max_batch_tokens
        return full and 0 < self._running == self._runner.capacity

    def _is_worth_waiting(self) -> bool:
        """Tell whether a few rows should wait for company, for a batch to come back, or for a short while.

        With room for many batches every few arrivals would else make one of their own, and where a batch costs the
        gateway as much as several requests (1 ms against 0.26 ms a request, measured with Ray), the batches alone
        would fill its core. The rule is Nagle's (RFC 896): small ones wait while others are under way.
        """
        oldest = self._waiting.oldest()
        if oldest is None or not self._running or len(self._waiting) >= _COMPANY_ROWS or self._runner.eager:
            return False
        return time.monotonic() - oldest.arrived_s < _COMPANY_S

    def _take(self, planned: BatchPlan) -> tuple[list[tuple[_Job, int]], float]:
        """Move a batch from the queue to the runner; gives its rows and how long its oldest waited."""
        items = self._waiting.take(planned, self._limits)
        now = time.monotonic()
        waited_s = now - min(item.arrived_s for item in items)
        taken = [self._jobs.pop(number) for number in planned.numbers]
        self._running += 1
        self._admission.begin(sum(job.costs[place] for job, place in taken), now)
        return taken, waited_s

    def _batch_done(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        if not task.cancelled() and (error := task.exception()):
            metrics.record_crash("batch")
            _LOG.critical("a batch's task failed outside its own error handling", exc_info=error)

    async def _run(self, taken: list[tuple[_Job, int]], waited_s: float) -> None:
        """Run one batch and hand its rows out."""
        tokens = sum(job.costs[place] for job, place in taken)
        try:
            sequences = [job.sequences[place] for job, place in taken]
            outputs = tuple(sorted(frozenset[str]().union(*(job.outputs for job, _ in taken))))
            looks = tuple(job.looks[place] if job.looks else None for job, place in taken)
            looks = looks if any(looks) else ()
            states = [row for row, (job, _) in enumerate(taken) if job.needs_states]
            batch = pad(sequences, outputs, self._pad_token_id, self._limits, looks=looks, state_rows=states)
            places = batch.input_ids.size + padded_targets(batch.looks)
            metrics.record_batch_started(self._model, len(taken), places, tokens, waited_s)
            started = time.monotonic()
            deadline_s = _latest(job.deadline_s for job, _ in taken)
            wanted = [job.done for job, _ in taken]
            self._alone = self._alone + 1 if self._submitted == self._running == 1 and not len(self._waiting) else 0
            with batch_trace((job.trace for job, _ in taken), batch.input_ids.shape, batch.lengths) as trace:
                result = await self._runner.run(
                    batch,
                    alone=self._alone > _ALONE_BATCHES,
                    deadline_s=deadline_s,
                    wanted=lambda row: not wanted[row].done(),
                )
                trace.ran(result.inference_s, result.replica, len(result.failed))
        except Exception as error:  # noqa: BLE001 - whatever a runner raises, its callers must be told
            metrics.record_batch_ended(self._model, "error")
            self._fail(taken, error)
            return
        finally:
            self._running -= 1
            self._admission.end(tokens, time.monotonic(), idle=not self._running, queue=len(self._waiting) > 0)
            self._pump()  # before anything else, so that the device is not idle while answers are written
        passed_s = time.monotonic() - started
        self._admission.fastest.note(places, passed_s)
        metrics.record_batch_ended(self._model, "ok", result.inference_s, passed_s)
        try:
            self._hand_out(taken, batch, result, waited_s)
        except Exception as error:  # noqa: BLE001 - a fault of ours, of which callers must not wait for ever
            self._fail(taken, error)

    def _hand_out(self, taken: list[tuple[_Job, int]], batch: Batch, result: BatchResult, waited_s: float) -> None:
        """Give each job its rows; a job that has all of them is done."""
        wasted = [job.costs[place] for job, place in taken if job.done.done()]
        if wasted:
            metrics.record_wasted(self._model, len(wasted), sum(wasted))
        if result.again:
            metrics.record_float32(self._model, result.again)
        for error, failed in _by_error(result.failed).items():
            self._fail([taken[row] for row in failed], error)
        for row, (job, place) in enumerate(taken):
            if row in result.failed:
                continue
            rows = {name: unpad(batch, name, result.arrays[name], row) for name in job.outputs}
            job.rows[place] = {**rows, **result.looked.get(row, {})}
            job.queue_s = max(job.queue_s, waited_s)
            job.inference_s = max(job.inference_s, result.inference_s)
            if len(job.rows) == len(job.sequences) and not job.done.done():
                done = [job.rows[index] for index in range(len(job.sequences))]
                job.done.set_result(Encoded(done, job.queue_s, job.inference_s))

    def _fail(self, taken: list[tuple[_Job, int]], error: Exception) -> None:
        """Tell each caller of a failed batch, or of failed rows, once."""
        if not is_for_callers(error):
            fault = InternalFault()
            _count(self._model, error, len(taken))
            told = {"error_id": fault.id}
            _LOG.error("%d inputs of a batch failed (%s)", len(taken), fault.id, exc_info=error, extra=told)
            error = fault
        for job, _ in taken:
            self._forget(job)
            if not job.done.done():
                job.done.set_exception(error)


def _latest(deadlines: Iterable[float | None]) -> float | None:
    """Give the last of some deadlines; None when one of them is no deadline."""
    known = list(deadlines)
    return None if None in known else max(deadline_s or 0.0 for deadline_s in known)


def _by_error(failed: Mapping[int, Exception]) -> dict[Exception, list[int]]:
    """Group failed rows by the error that they share, or by its words where those are not for callers."""
    firsts: dict[str, Exception] = {}
    groups: dict[Exception, list[int]] = {}
    for row, error in failed.items():
        first = error if is_for_callers(error) else firsts.setdefault(str(error), error)
        groups.setdefault(first, []).append(row)
    return groups


def _count(model: str, error: Exception, inputs: int) -> None:
    """Count a failed batch, or inputs without a finite answer, by the cause."""
    if isinstance(error, NotFinite):
        metrics.record_fault(model, "not_finite", inputs)
    else:
        metrics.record_fault(model, "stuck" if isinstance(error, StuckError) else cause_of(error))
