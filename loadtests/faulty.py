"""Serve as `attencode serve` does, with a model that fails now and then, and say what is left in memory when asked.

    python loadtests/faulty.py serve FOLDER --seed 7 ...

SIGUSR2 switches the faults on and off; a seed in CHAOS_SEED draws them: a run raises, yields NaN, or takes its time.
SIGUSR1 writes a line of JSON to stdout: tasks by what they run, futures that nobody has answered, and objects that live
as long as a request does. May import: service.
"""

import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported, as in service/__main__.py

from service import server
from service.batching import Batch
from service.session import Session

FAULTS = {"raise": 0.02, "nan": 0.02, "slow": 0.01}
SLOW_S = 0.4
INJECTED = "a fault injected on purpose"
_OF_REQUESTS = ("_Job", "Call", "Place", "Share", "StreamAnswer", "_ServicerContext")


class Faults:
    """What befalls the runs of all sessions, once that is switched on."""

    def __init__(self, seed: int) -> None:
        """Start without faults."""
        self.failing = False
        self._draw = random.Random(seed)
        self._run = Session.run

    def run(self, session: Session, batch: Batch, *, alone: bool = False) -> dict[str, NDArray[np.float32]]:
        """Run a batch as a session does, or do not."""
        fault = self._drawn() if self.failing else None
        if fault == "raise":
            raise RuntimeError(INJECTED)
        if fault == "slow":
            time.sleep(SLOW_S)
        arrays = self._run(session, batch, alone=alone)
        if fault == "nan":
            arrays = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
        return arrays

    def switch(self) -> None:
        """Begin, or end."""
        self.failing = not self.failing
        tell({"failing": self.failing})

    def _drawn(self) -> str | None:
        drawn = self._draw.random()
        for fault, share in FAULTS.items():
            drawn -= share
            if drawn < 0:
                return fault
        return None


def tell(what: dict[str, Any]) -> None:
    """Write a line of JSON to stdout, also where Ray's words have taken its place."""
    print(json.dumps(what), file=sys.__stdout__, flush=True)


def left() -> dict[str, Any]:
    """Say what is alive now, but for what lived when the server had started."""
    gc.collect()
    tasks = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())
    objects: Counter[str] = Counter()
    for found in gc.get_objects():
        kind = type(found).__name__
        if kind in _OF_REQUESTS:
            objects[kind] += 1
        elif _is_future(type(found)) and not found.done():
            objects["pending Future"] += 1
    return {"tasks": dict(tasks), "objects": dict(objects)}


def _is_future(kind: type) -> bool:
    return issubclass(kind, asyncio.Future) and not issubclass(kind, asyncio.Task)


def main() -> None:
    """Put the faults in, and serve."""
    plain = server.serve
    faults = Faults(int(os.environ.get("CHAOS_SEED", "0")))

    async def serve(*arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: tell(left()))
        loop.add_signal_handler(signal.SIGUSR2, faults.switch)
        await plain(*arguments)

    server.serve = serve
    Session.run = lambda session, batch, *, alone=False: faults.run(session, batch, alone=alone)
    from service.cli import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
