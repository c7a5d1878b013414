"""Runner: takes whole batches and gives back whole results, wherever the model runs.

May import: batching, device, ending, inference, session, watchdog, request, errors.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread, get_native_id
from typing import Protocol

from service.batching import Batch
from service.device import Device
from service.ending import show_threads
from service.errors import DeviceLost
from service.inference import BatchResult, infer
from service.request import ReplicaInfo
from service.session import Session
from service.watchdog import Watchdog, patience

# Up to so many tokens (a few ms on two cores) a lone batch runs on the event loop's own thread: handing it over
# and back costs 0.15 to 0.2 ms of a call of 2 to 3 (measured in turns), and whoever comes meanwhile would wait
# for the device anyway.
_INLINE_TOKENS = 32
_NICENESS = 5  # of the threads that compute, above that of the process
_GONE = "this server cannot compute any more and is about to end; try another one, or try again"
_GONE_S = 0.1  # for each thread to end that may hang


class StuckError(Exception):
    """Report a batch that does not end."""


class Runner(Protocol):
    """Runs batches; several at once up to its capacity."""

    @property
    def capacity(self) -> int:
        """Batches that it makes sense to have in flight."""
        ...

    @property
    def eager(self) -> bool:
        """Whether a small batch is worth sending beside those that run already."""
        ...

    def replicas(self) -> list[ReplicaInfo]:
        """List where batches run."""
        ...

    async def start(self, wake: Callable[[], None]) -> None:
        """Get ready: after it, `run` is as fast as it will be. `wake` is called when the capacity has grown."""
        ...

    async def run(
        self,
        batch: Batch,
        *,
        alone: bool = False,
        deadline_s: float | None = None,
        wanted: Callable[[int], bool] = lambda _row: True,
    ) -> BatchResult:
        """Run one batch.

        Args:
            batch: The batch.
            alone: Whether nobody else waits for anything at the moment.
            deadline_s: When the last of its callers is gone, on the clock of `time.monotonic`.
            wanted: Tells whether anybody still waits for a row; asked before it is run again.
        """
        ...

    async def stop(self) -> None:
        """Release what `start` took."""
        ...


def _give_way() -> None:
    """Let the event loop go first where there are fewer cores than threads; Linux has a priority for each thread.

    Near saturation, on two cores, half the requests were answered in 55 ms instead of 100, and at 1.5 times of it the
    refused ones were told so in 30 ms instead of a second.
    """
    if hasattr(os, "setpriority") and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19))


class DeviceThreads:
    """The threads that run batches on one machine's device; the sessions of several models share them.

    A queue and a callback carry each batch, so that models take turns in the order of their batches. A batch that does
    not end is failed for its callers, and the device is gone.
    """

    def __init__(self, streams: int, device: Device | None = None, *, stuck_after_s: float = inf) -> None:
        """Store what is needed.

        Args:
            streams: Batches that run side by side.
            device: Told how batches fare; one of its own if None.
            stuck_after_s: How long a batch may run.
        """
        self.streams = streams
        self.device = device or Device()
        self._watchdog = None if stuck_after_s == inf else Watchdog(stuck_after_s)
        self._work: SimpleQueue[tuple[Session, Batch, bool, asyncio.Future[BatchResult]] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._queued = 0
        self.device.listen(lambda _reason: self._give_back())

    @property
    def idle(self) -> bool:
        """Whether no batch is queued or runs."""
        return self._queued == 0

    def start(self) -> None:
        """Start the threads, if they do not run yet."""
        if self._watchdog is not None:
            self._watchdog.start()
        for number in range(len(self._threads), self.streams):
            thread = Thread(target=self._loop, name=f"attencode-run-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def run(self, session: Session, batch: Batch, *, alone: bool = False) -> BatchResult:
        """Run a batch on the next free thread; `alone` says that no other runs or waits.

        Raises:
            DeviceLost: The device is gone.
        """
        self._check_device()
        future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        self._queued += 1
        future.add_done_callback(self._done)
        self._work.put((session, batch, alone, future))
        if self.device.gone:  # just now, so that nobody may come for it
            self._give_back()
        return await future

    def run_here(self, session: Session, batch: Batch) -> BatchResult:
        """Run a batch that is alone on the calling thread.

        Raises:
            DeviceLost: The device is gone.
        """
        self._check_device()
        return self._compute(session, batch, alone=True)

    def stop(self) -> None:
        """Wait for running batches and end the threads; where the device is gone they are not waited for."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(_GONE_S if self.device.gone else None)
        self._threads.clear()
        if self._watchdog is not None:
            self._watchdog.stop()

    def _check_device(self) -> None:
        if self.device.gone:
            raise DeviceLost(_GONE)

    def _give_back(self) -> None:
        """Fail what waits for a thread."""
        with suppress(Empty):
            while True:
                if work := self._work.get_nowait():
                    _tell(work[-1], DeviceLost(_GONE))

    def _done(self, _future: asyncio.Future[BatchResult]) -> None:
        self._queued -= 1

    def _loop(self) -> None:
        _give_way()
        try:
            while self._run_next():
                pass
        except BaseException as error:
            self.device.lose(f"a thread that runs batches has ended: {type(error).__name__}: {error}")
            raise

    def _run_next(self) -> bool:
        """Wait for a batch and run it; False when told to end. Keeps no array alive between two batches."""
        work = self._work.get()
        if work is None:
            return False
        session, batch, alone, future = work
        result: BatchResult | Exception
        try:
            result = self._compute(session, batch, alone=alone, future=future)
        except Exception as error:  # noqa: BLE001 - the awaiting side raises it
            result = error
        except BaseException as error:
            _tell(future, RuntimeError(f"the thread that ran the batch has ended: {error!r}"))
            raise
        _tell(future, result)
        return True

    def _compute(
        self, session: Session, batch: Batch, *, alone: bool, future: asyncio.Future[BatchResult] | None = None
    ) -> BatchResult:
        """Run a batch, watched, and tell the device how it went."""
        watched = None
        if self._watchdog is not None:
            watched = self._watchdog.begin(lambda: self._stuck(batch, future), patience(batch.input_ids.size))
        try:
            result = infer(session, batch, alone=alone)
            if len(result.failed) == len(batch.lengths):
                self.device.failed(next(iter(result.failed.values())), session.try_out)
            else:
                self.device.succeeded()
        except Exception as error:
            self.device.failed(error, session.try_out)
            raise
        finally:
            if self._watchdog is not None and watched is not None:
                self._watchdog.end(watched)
        return result

    def _stuck(self, batch: Batch, future: asyncio.Future[BatchResult] | None) -> None:
        """Fail a batch that does not end; its thread cannot be ended."""
        rows, length = batch.input_ids.shape
        seconds = self._watchdog.stuck_after_s * patience(batch.input_ids.size) if self._watchdog is not None else inf
        where = "the event loop's own thread" if future is None else "its thread"
        reason = f"a batch of {rows} inputs, {length} tokens each, has run for {seconds:g} s and hangs on {where}"
        if future is not None:
            _tell(future, StuckError(reason))
        show_threads()
        self.device.lose(
            f"{reason}; batches that honestly take longer want a higher --stuck-after-s", at_once=future is None
        )


class LocalRunner:
    """A session in this process."""

    def __init__(self, session: Session, threads: DeviceThreads) -> None:
        """Store the session and the threads that run it."""
        self._session = session
        self._threads = threads

    @property
    def capacity(self) -> int:
        """One batch a stream."""
        return self._threads.streams

    @property
    def eager(self) -> bool:
        """Always: handing a batch over costs next to nothing here."""
        return True

    def replicas(self) -> list[ReplicaInfo]:
        """List this process, the only place."""
        device, digest = self._session.placement.device, self._session.artifact.digest
        return [ReplicaInfo("local", socket.gethostname(), device, "RUNNING", digest)]

    async def start(self, wake: Callable[[], None]) -> None:  # noqa: ARG002 - the capacity never changes
        """Load the plain graph and warm it up."""
        await asyncio.wrap_future(self._prepared())
        self._threads.start()

    async def run(
        self,
        batch: Batch,
        *,
        alone: bool = False,
        deadline_s: float | None = None,  # noqa: ARG002 - what has begun here ends here
        wanted: Callable[[int], bool] = lambda _row: True,  # noqa: ARG002 - likewise
    ) -> BatchResult:
        """Run a batch on the next free thread; a short one that is alone right here, without any hand-over."""
        alone = alone and self._threads.idle
        if alone and not batch.state_rows.size and not batch.looks and batch.input_ids.size <= _INLINE_TOKENS:
            return self._threads.run_here(self._session, batch)
        return await self._threads.run(self._session, batch, alone=alone)

    async def stop(self) -> None:
        """Wait for running batches and end the threads."""
        await asyncio.to_thread(self._threads.stop)

    def _prepared(self) -> Future[None]:
        """Load and warm up on a thread that gives way, as do those that the session makes of it."""
        done: Future[None] = Future()

        def prepare() -> None:
            _give_way()
            try:
                self._session.load("encode")
                self._session.warm_up()
            except Exception as error:  # noqa: BLE001 - the awaiting side raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        Thread(target=prepare, name="attencode-prepare", daemon=True).start()
        return done


def _tell(future: asyncio.Future[BatchResult], result: BatchResult | Exception) -> None:
    """Settle a future of another thread's loop, if that still runs."""
    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_settle, future, result)


def _settle(future: asyncio.Future[BatchResult], result: BatchResult | Exception) -> None:
    """Set a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if isinstance(result, BatchResult):
        future.set_result(result)
    else:
        future.set_exception(result)
