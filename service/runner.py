"""Runner: takes whole batches and gives back whole results, wherever the model runs.

May import: batching, session, request, errors, numpy.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread, get_native_id
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch
from service.request import ReplicaInfo
from service.session import Session

# Up to so many tokens (a few ms on two cores) a lone batch runs on the event loop's own thread: handing it over
# and back costs 0.15 to 0.2 ms of a call of 2 to 3 (measured in turns), and whoever comes meanwhile would wait
# for the device anyway.
_INLINE_TOKENS = 32
_NICENESS = 5  # of the threads that compute, above that of the process


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch yielded.

    Attributes:
        arrays: The batch's outputs by name, padding included.
        inference_s: How long the graph ran.
        looked: What was wanted of rows' attention: row -> arrays by the names of `InputResult`.
        failed: Rows that have no place in the arrays' meaning, each with its error.
        replica: Id of the replica that ran it; empty in this process, or where several did.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    inference_s: float
    looked: Mapping[int, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    failed: Mapping[int, Exception] = field(default_factory=dict)
    replica: str = ""


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

    A queue and a callback carry each batch, so that models take turns in the order of their batches.
    """

    def __init__(self, streams: int) -> None:
        """Store how many batches run side by side."""
        self.streams = streams
        self._work: SimpleQueue[tuple[Session, Batch, bool, asyncio.Future[BatchResult]] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._queued = 0

    @property
    def idle(self) -> bool:
        """Whether no batch is queued or runs."""
        return self._queued == 0

    def start(self) -> None:
        """Start the threads, if they do not run yet."""
        for number in range(len(self._threads), self.streams):
            thread = Thread(target=self._loop, name=f"attencode-run-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def run(self, session: Session, batch: Batch, *, alone: bool = False) -> BatchResult:
        """Run a batch on the next free thread; `alone` says that no other runs or waits."""
        future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        self._queued += 1
        future.add_done_callback(self._done)
        self._work.put((session, batch, alone, future))
        return await future

    def stop(self) -> None:
        """Wait for running batches and end the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _done(self, _future: asyncio.Future[BatchResult]) -> None:
        self._queued -= 1

    def _loop(self) -> None:
        _give_way()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a batch and run it; False when told to end. Keeps no array alive between two batches."""
        work = self._work.get()
        if work is None:
            return False
        session, batch, alone, future = work
        result: BatchResult | Exception
        try:
            result = _timed(session, batch, alone=alone)
        except Exception as error:  # noqa: BLE001 - the awaiting side raises it
            result = error
        future.get_loop().call_soon_threadsafe(_settle, future, result)
        return True


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
        if alone and not batch.state_rows.size and batch.input_ids.size <= _INLINE_TOKENS:
            return _timed(self._session, batch, alone=True)
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


def _timed(session: Session, batch: Batch, *, alone: bool) -> BatchResult:
    started = time.perf_counter()
    arrays = session.run(batch, alone=alone)
    looked = session.look(batch, arrays["hidden_states"], alone=alone) if batch.looks else {}
    wanted = {name: arrays[name] for name in batch.outputs}
    return BatchResult(wanted, time.perf_counter() - started, looked)


def _settle(future: asyncio.Future[BatchResult], result: BatchResult | Exception) -> None:
    """Set a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if isinstance(result, BatchResult):
        future.set_result(result)
    else:
        future.set_exception(result)
