"""Faults at the runner's border: a real session that fails as a test tells it to, in a real server of this process.

    faults = Faults()
    with serving(artifact, faults.session, ...) as running:
        faults.before = raise_for(POISON, RuntimeError("..."))
        running.client.encode(...)

`Faults.session` is a class that `LocalBackend` takes, or `EncoderReplica.session`; `before` is called with each batch
on the thread that runs it, and may raise or wait; `after` may change what the model yielded.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attencode import Client
from service.artifact import open_artifact
from service.backend import LocalBackend
from service.batching import Batch
from service.config import ServiceConfig
from service.server import Server
from service.session import Session

Arrays = dict[str, np.ndarray]


class Faults:
    """What goes wrong at present."""

    def __init__(self, base: type[Session] = Session) -> None:
        self.before: Callable[[Batch], None] = lambda _batch: None
        self.after: Callable[[Batch, Arrays], Arrays] = lambda _batch, arrays: arrays
        self.batches: list[Batch] = []
        faults = self

        class Faulty(base):  # type: ignore[valid-type,misc]
            def run(self, batch: Batch, *, alone: bool = False) -> Arrays:
                faults.batches.append(batch)
                faults.before(batch)
                return faults.after(batch, super().run(batch, alone=alone))

        self.session: type[Session] = Faulty


def raise_for(token: int, error: BaseException) -> Callable[[Batch], None]:
    """Give a fault of batches that hold a token."""

    def fail(batch: Batch) -> None:
        if token in batch.input_ids:
            raise error

    return fail


def always(error: BaseException) -> Callable[[Batch], None]:
    """Give a fault of all batches, those that try the device too."""

    def fail(_batch: Batch) -> None:
        raise error

    return fail


@dataclass(frozen=True)
class Running:
    """A server of this process, its client, and the loop that it is on."""

    server: Server
    client: Client
    address: str
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any, within_s: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(within_s)


@contextmanager
def serving(artifact: Path, session: type[Session], **settings: object) -> Iterator[Running]:
    """Serve an artifact, as `tiny`, on a loop of its own; the server is stopped in the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    plain: Mapping[str, object] = {"port": 0, "metrics_port": "none", "provider": "cpu", "model_name": "tiny"}
    config = ServiceConfig.model_validate({"model": str(artifact), **plain, **settings})

    async def build() -> Server:
        server = Server(config, LocalBackend(config, {"tiny": open_artifact(artifact)}, session=session))
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(build(), loop).result(60)
    address = f"127.0.0.1:{server.port}"
    try:
        with Client(address, timeout_s=15, options=[("grpc.enable_retries", 0)]) as client:
            yield Running(server, client, address, loop)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
