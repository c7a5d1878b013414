"""Runner: takes whole batches and gives back whole results, wherever the model runs.

May import: batching, cuda, session, request, errors, numpy.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch
from service.cuda import STREAMS
from service.request import ReplicaInfo
from service.session import Placement, Session

# Up to so many tokens (a few ms on two cores) a lone batch runs on the event loop's own thread: handing it over
# and back costs 0.15 to 0.2 ms of a call of 2 to 3 (measured in turns), and whoever comes meanwhile would wait
# for the device anyway.
_INLINE_TOKENS = 32


def count_streams(streams: int | str, placement: Placement) -> int:
    """Give how many batches run side by side: as many as asked for, or for `auto` what the provider gains from."""
    if isinstance(streams, int):
        return streams
    return STREAMS if placement.provider == "cuda" else 1


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch yielded.

    Attributes:
        arrays: The batch's outputs by name, padding included.
        inference_s: How long the graph ran.
        failed: Rows that have no place in the arrays' meaning, each with its error.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    inference_s: float
    failed: Mapping[int, Exception] = field(default_factory=dict)


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

    async def run(self, batch: Batch, *, alone: bool = False, deadline_s: float | None = None) -> BatchResult:
        """Run one batch.

        Args:
            batch: The batch.
            alone: Whether nobody else waits for anything at the moment.
            deadline_s: When the last of its callers is gone, on the clock of `time.monotonic`.
        """
        ...

    async def stop(self) -> None:
        """Release what `start` took."""
        ...


class DeviceThreads:
    """The threads that run batches on one machine's device; the sessions of several models share them.

    A queue and a callback carry each batch, so that models take turns in the order of their batches.
    """

    def __init__(self, streams: int) -> None:
        """Store how many batches run side by side."""
        self.streams = streams
        self._work: SimpleQueue[tuple[Session, Batch, asyncio.Future[BatchResult]] | None] = SimpleQueue()
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

    async def run(self, session: Session, batch: Batch) -> BatchResult:
        """Run a batch on the next free thread."""
        future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        self._queued += 1
        future.add_done_callback(self._done)
        self._work.put((session, batch, future))
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
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a batch and run it; False when told to end. Keeps no array alive between two batches."""
        work = self._work.get()
        if work is None:
            return False
        session, batch, future = work
        result: BatchResult | Exception
        try:
            result = _timed(session, batch)
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
        await asyncio.to_thread(self._prepare)
        self._threads.start()

    async def run(self, batch: Batch, *, alone: bool = False, deadline_s: float | None = None) -> BatchResult:  # noqa: ARG002
        """Run a batch on the next free thread; a short one that is alone right here, without any hand-over."""
        if alone and batch.graph == "encode" and batch.input_ids.size <= _INLINE_TOKENS and self._threads.idle:
            return _timed(self._session, batch)
        return await self._threads.run(self._session, batch)

    async def stop(self) -> None:
        """Wait for running batches and end the threads."""
        await asyncio.to_thread(self._threads.stop)

    def _prepare(self) -> None:
        self._session.load("encode")
        self._session.warm_up()


def _timed(session: Session, batch: Batch) -> BatchResult:
    started = time.perf_counter()
    arrays = session.run(batch)
    return BatchResult(arrays, time.perf_counter() - started)


def _settle(future: asyncio.Future[BatchResult], result: BatchResult | Exception) -> None:
    """Set a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if isinstance(result, BatchResult):
        future.set_result(result)
    else:
        future.set_exception(result)
