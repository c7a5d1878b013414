"""An engine on a runner whose batches wait for a gate, for tests of either."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from service.admission import QueueLimits
from service.batching import Batch, BatchLimits
from service.engine import Engine
from service.inference import BatchResult
from service.tokenization import Sequence

OUTPUT = frozenset({"pooled_mean"})


class GateRunner:
    """A runner whose batches wait for a gate; each row answers with its first token id."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self.eager = True
        self.gate = asyncio.Event()
        self.batches: list[Batch] = []
        self.error: Exception | None = None
        self.wanted: Callable[[int], bool] = lambda _row: True

    async def start(self, wake: Callable[[], None]) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def run(
        self,
        batch: Batch,
        *,
        alone: bool = False,
        deadline_s: float | None = None,
        wanted: Callable[[int], bool] = lambda _row: True,
    ) -> BatchResult:
        self.batches.append(batch)
        self.wanted = wanted
        await self.gate.wait()
        if self.error:
            raise self.error
        first = batch.input_ids[:, :1].astype(np.float32)
        return BatchResult(dict.fromkeys(batch.outputs, first), 0.001)


def sequence(first: int, length: int = 4) -> Sequence:
    return Sequence(np.full(length, first, dtype=np.int64), None, length, None)


async def started(runner: Any, **settings: Any) -> Engine:
    limits = settings.pop("limits", BatchLimits(max_batch_tokens=64))
    queue = QueueLimits(**{"max_inputs": 100, "max_tokens": 10_000, **settings})
    engine = Engine(runner, limits, model="m", pad_token_id=0, queue=queue)
    await engine.start()
    return engine


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))
