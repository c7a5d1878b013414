"""Runner: takes whole batches and gives back whole results, wherever the model runs.

May import: batching, session, errors, numpy.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch
from service.session import Session

# Up to so many tokens (a few ms on two cores) a lone batch runs on the event loop's own thread: handing it over
# and back costs 0.15 to 0.2 ms of a call of 2 to 3 (measured in turns), and whoever comes meanwhile would wait
# for the device anyway.
_INLINE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch yielded.

    Attributes:
        arrays: The batch's outputs by name, padding included.
        inference_s: How long the graph ran.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    inference_s: float


class Runner(Protocol):
    """Runs batches; several at once up to its capacity."""

    @property
    def capacity(self) -> int:
        """Batches that it makes sense to have in flight."""
        ...

    async def start(self) -> None:
        """Get ready: after it, `run` is as fast as it will be."""
        ...

    async def run(self, batch: Batch, *, alone: bool = False) -> BatchResult:
        """Run one batch; `alone` says that nobody else waits for anything at the moment."""
        ...

    async def stop(self) -> None:
        """Release what `start` took."""
        ...


class LocalRunner:
    """A session in this process, on threads of its own; a queue and a callback carry each batch."""

    def __init__(self, session: Session, *, streams: int = 1) -> None:
        """Store the session; `streams` batches run side by side."""
        self._session = session
        self._streams = streams
        self._work: SimpleQueue[tuple[Batch, asyncio.Future[BatchResult]] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    @property
    def capacity(self) -> int:
        """One batch a stream."""
        return self._streams

    async def start(self) -> None:
        """Load the plain graph, warm it up, and start the threads."""
        await asyncio.to_thread(self._prepare)
        for number in range(self._streams):
            thread = Thread(target=self._loop, name=f"attencode-run-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def run(self, batch: Batch, *, alone: bool = False) -> BatchResult:
        """Run a batch on the next free thread; a short one that is alone right here, without any hand-over."""
        if alone and batch.graph == "encode" and batch.input_ids.size <= _INLINE_TOKENS:
            return self._timed(batch)
        future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        self._work.put((batch, future))
        return await future

    async def stop(self) -> None:
        """Wait for running batches and end the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _timed(self, batch: Batch) -> BatchResult:
        started = time.perf_counter()
        arrays = self._session.run(batch)
        return BatchResult(arrays, time.perf_counter() - started)

    def _prepare(self) -> None:
        self._session.load("encode")
        self._session.warm_up()

    def _loop(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a batch and run it; False when told to end. Keeps no array alive between two batches."""
        work = self._work.get()
        if work is None:
            return False
        batch, future = work
        result: BatchResult | Exception
        try:
            result = self._timed(batch)
        except Exception as error:  # noqa: BLE001 - the awaiting side raises it
            result = error
        future.get_loop().call_soon_threadsafe(_settle, future, result)
        return True


def _settle(future: asyncio.Future[BatchResult], result: BatchResult | Exception) -> None:
    """Set a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if isinstance(result, BatchResult):
        future.set_result(result)
    else:
        future.set_exception(result)
