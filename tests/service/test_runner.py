"""Runner: a real session behind an engine, on whichever thread is soonest done."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np

from service.artifact import open_artifact
from service.batching import Batch
from service.placement import choose_placement
from service.runner import DeviceThreads, LocalRunner
from service.session import Session
from tests.service.gate import OUTPUT, run, sequence, started


def test_the_local_runner_runs_a_real_session(tiny_artifact: Path) -> None:
    """The same rows come from a real session, alone and together."""

    async def test() -> None:
        artifact = open_artifact(tiny_artifact)
        session = Session(artifact, choose_placement("cpu", "float32"), threads=1)
        engine = await started(LocalRunner(session, DeviceThreads(1)))
        sequences = [sequence(number, length) for number, length in ((5, 3), (6, 12), (7, 7))]
        together = await engine.submit(sequences, OUTPUT, None)
        for item, row in zip(sequences, together.rows, strict=True):
            alone = await engine.submit([item], OUTPUT, None)
            np.testing.assert_allclose(alone.rows[0]["pooled_mean"], row["pooled_mean"], atol=1e-5)
        await engine.finish(within_s=10)
        await engine.stop()

    run(test)


def test_a_lone_short_batch_needs_no_thread(tiny_artifact: Path) -> None:
    """Short batches run on the event loop's thread once their caller has been alone for some, else on another one."""

    async def test() -> None:
        session = Session(open_artifact(tiny_artifact), choose_placement("cpu", "float32"), threads=1)
        engine = await started(LocalRunner(session, DeviceThreads(1)))
        threads: list[int] = []
        run_session = session.run

        def noted(batch: Batch, *, alone: bool) -> Any:
            threads.append(threading.get_ident())
            return run_session(batch, alone=alone)

        session.run = noted  # type: ignore[method-assign]
        here = threading.get_ident()
        for _ in range(10):
            await engine.submit([sequence(5)], OUTPUT, None)
        assert [thread == here for thread in threads] == [False] * 8 + [True] * 2
        threads.clear()
        await asyncio.gather(*(engine.submit([sequence(5)], OUTPUT, None) for _ in range(2)))
        await engine.submit([sequence(5)], OUTPUT, None)
        await engine.submit([sequence(5, 30)] * 4, OUTPUT, None)
        assert all(thread != here for thread in threads)
        await engine.stop()

    run(test)
