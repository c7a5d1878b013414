"""Fleet: what a gateway sends again, and what it does not, when replicas die under it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")

from service.artifact import open_artifact
from service.batching import Batch
from service.config import ServiceConfig
from service.errors import DeadlineExceeded
from service.fleet import Fleet, RayRunner
from service.served import Models

pytestmark = pytest.mark.ray


class Dying(Fleet):
    """A fleet whose replicas die under every batch, and meanwhile the callers of some rows leave."""

    sent: list[int]
    leaving: set[int]
    gone: set[int]

    async def send(self, digest: str, batch: Batch, *, large: bool) -> Any:
        self.sent.append(len(batch.lengths))
        self.gone |= self.leaving
        raise RuntimeError("the replica died")

    def wanted(self, row: int) -> bool:
        return row not in self.gone


@pytest.mark.parametrize(("leaving", "sent"), [({0, 1, 2}, [3]), ({0, 2}, [3, 3, 1]), (set(), [3, 3, 1, 1, 1])])
def test_nothing_is_sent_again_for_nobody(tiny_artifact: Path, leaving: set[int], sent: list[int]) -> None:
    """A batch runs again while anybody waits for one of its rows, and taken apart, only the rows that are wanted do."""

    async def test() -> None:
        artifact = open_artifact(tiny_artifact)
        config = ServiceConfig(model=str(tiny_artifact), ray=True)
        fleet = Dying(config, "m", Models(["m"]))
        fleet._serving[artifact.digest] = 1
        fleet.sent, fleet.leaving, fleet.gone = [], leaving, set()
        ids = np.full((3, 4), 5, dtype=np.int64)
        batch = Batch(("pooled_mean",), (4, 4, 4), ids, np.ones_like(ids), np.zeros_like(ids), np.ones_like(ids))
        runner = RayRunner(fleet, artifact, batches=1)
        if len(leaving) == 3:
            with pytest.raises(DeadlineExceeded, match="the caller left"):
                await runner.run(batch, wanted=fleet.wanted)
        else:
            assert set((await runner.run(batch, wanted=fleet.wanted)).failed) == {0, 1, 2}
        assert fleet.sent == sent

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_batch_is_not_sent_again_after_its_deadline(tiny_artifact: Path) -> None:
    """However many attempts are left, none begins after the last caller's deadline."""

    async def test() -> None:
        artifact = open_artifact(tiny_artifact)
        config = ServiceConfig(model=str(tiny_artifact), ray=True, batch_attempts=10**6)
        fleet = Dying(config, "m", Models(["m"]))
        fleet._serving[artifact.digest] = 1
        fleet.sent, fleet.leaving, fleet.gone = [], set(), set()
        ids = np.full((1, 4), 5, dtype=np.int64)
        batch = Batch(("pooled_mean",), (4,), ids, np.ones_like(ids), np.zeros_like(ids), np.ones_like(ids))
        with pytest.raises(DeadlineExceeded):
            await RayRunner(fleet, artifact, batches=1).run(batch, deadline_s=asyncio.get_running_loop().time() + 0.3)
        assert 1 < len(fleet.sent) < 10

    asyncio.run(asyncio.wait_for(test(), 30))
