"""Runner: takes whole batches and gives back whole results, wherever the model runs.

May import: batching, session, errors, numpy.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch
from service.session import Session


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

    async def run(self, batch: Batch) -> BatchResult:
        """Run one batch."""
        ...

    async def stop(self) -> None:
        """Release what `start` took."""
        ...


class LocalRunner:
    """A session in this process, on threads of its own."""

    def __init__(self, session: Session, *, streams: int = 1) -> None:
        """Store the session; `streams` batches run side by side."""
        self._session = session
        self._streams = streams
        self._threads = ThreadPoolExecutor(max_workers=streams, thread_name_prefix="attencode-run")

    @property
    def capacity(self) -> int:
        """One batch a stream."""
        return self._streams

    async def start(self) -> None:
        """Load the plain graph and warm it up."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare)

    async def run(self, batch: Batch) -> BatchResult:
        """Run a batch on the next free thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, batch)

    async def stop(self) -> None:
        """Wait for running batches and end the threads."""
        await asyncio.to_thread(self._threads.shutdown)

    def _prepare(self) -> None:
        self._session.load("encode")
        self._session.warm_up()

    def _run(self, batch: Batch) -> BatchResult:
        started = time.perf_counter()
        arrays = self._session.run(batch)
        return BatchResult(arrays, time.perf_counter() - started)
