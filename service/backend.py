"""Backend: where the models run. Brings them up, keeps the server told of them, takes them down.

`LocalBackend` runs them in this process; `service.fleet.RayBackend` on Ray Serve's replicas.
May import: metrics, served, runner, device, integrity, session, supervision, placement, artifact, config, errors.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from service import metrics
from service.artifact import Artifact
from service.config import ServiceConfig
from service.device import Device
from service.errors import DeviceLost
from service.integrity import watch
from service.placement import choose_placement, streams_for, usable_cores
from service.runner import DeviceThreads, LocalRunner
from service.served import Models, ServedModel
from service.session import Session
from service.supervision import keep

_END_AFTER_S = 10.0  # of a process whose device is gone, where its event loop is blocked or its drain hangs


class Backend(Protocol):
    """Runs the models of one server."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the models are called, the default first."""
        ...

    async def start(self, models: Models) -> None:
        """Bring the models up and put them in; later changes are put in as they come."""
        ...

    async def stop(self) -> None:
        """Take down what `start` brought up, and wait for what still runs."""
        ...

    def summary(self) -> str:
        """Say in a few words where the models run, and why there."""
        ...


class LocalBackend:
    """Every model in this process, on one device that they share."""

    def __init__(
        self,
        config: ServiceConfig,
        artifacts: Mapping[str, Artifact],
        *,
        session: type[Session] = Session,
        end: Callable[[str], object] | None = None,
    ) -> None:
        """Choose where the models run and wire the parts; nothing runs yet.

        Args:
            config: The settings.
            artifacts: By the name that requests use; the first is the default.
            session: What runs the models; another one fails as a test wants it to.
            end: Ends the process where it does not end by itself once the device is gone.

        Raises:
            StartupError: An artifact or the provider cannot be used.
        """
        threads = usable_cores() if config.threads == "auto" else config.threads
        placements = {
            name: choose_placement(config.provider, config.precision, artifact) for name, artifact in artifacts.items()
        }
        self._placement = next(iter(placements.values()))  # of the default; others may differ in precision
        streams = streams_for(self._placement.provider, threads) if config.streams == "auto" else config.streams
        health = Device(end, _END_AFTER_S)
        self._device = device = DeviceThreads(streams, health, stuck_after_s=config.stuck_after_s)
        self._watch: asyncio.Task[None] | None = None
        self._served = []
        for name, artifact in artifacts.items():
            placement = placements[name]
            opened = session(artifact, placement, threads=threads, streams=streams)
            runner = LocalRunner(opened, device)
            each = max(1, threads // streams)
            self._served.append(ServedModel(config, name, artifact, runner, placement=placement, threads=each))

    @property
    def names(self) -> tuple[str, ...]:
        """What the models are called, the default first."""
        return tuple(served.name for served in self._served)

    async def start(self, models: Models) -> None:
        """Load and warm every model."""
        for served in self._served:
            await served.engine.start()
            models.put(served)
            metrics.record_compute_streams(served.name, self._device.streams)
            models.set_ready(served.name, ready=True)
        loop = asyncio.get_running_loop()
        artifacts = [served.artifact for served in self._served]
        self._watch = loop.create_task(keep("artifact", lambda: watch(artifacts, models.lose), models.lost))
        self._device.device.listen(lambda reason: _tell(loop, models, reason))

    async def stop(self) -> None:
        """Wait for running batches and end the threads."""
        if self._watch is not None:
            self._watch.cancel()
        for served in self._served:
            await served.engine.stop()

    def summary(self) -> str:
        """Name provider and precision, and why they were chosen."""
        return f"{self._placement.device}, {self._placement.reason}"


def _tell(loop: asyncio.AbstractEventLoop, models: Models, reason: str) -> None:
    """Let the models be lost, from another thread; a loop that is closed has none."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(models.lose, DeviceLost(f"the device is gone: {reason}"))
