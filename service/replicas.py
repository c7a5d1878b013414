"""Replicas: the Ray Serve deployment that runs batches, and what it and a gateway say to each other.

`encoder` builds a model's application from plain settings, for `serve run` and `serve deploy`, for
`attencode serve --ray` and for `attencode deploy` alike. This module is imported inside Ray's processes.
May import: artifact, batching, config, decoder, device, ending, integrity, runner, scaling, session, placement, ray,
pydantic.
"""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import ray
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from service.artifact import ARTIFACT_FILE, Artifact, open_artifact
from service.batching import Batch
from service.config import read_replicas
from service.decoder import TARGET_TOKENIZER
from service.device import Device
from service.ending import end_now
from service.integrity import Integrity
from service.placement import Placement, choose_placement, streams_for
from service.runner import DeviceThreads
from service.scaling import ReplicaLoad
from service.session import Session

ENCODER = "EncoderReplica"

# Serve asks after a replica's health this often, and replaces one whose device hangs for the timeout, thrice.
# How long the only replica's death goes unnoticed is the period.
_HEALTH_PERIOD_S = 1.0
_HEALTH_TIMEOUT_S = 5.0
# Several gateways may each have `replica_batches` at one replica.
_GATEWAYS_AT_ONCE = 8


class EncoderSettings(BaseModel):
    """What an encoder application is made of: one model on its replicas.

    Attributes:
        artifact: Folder of the artifact; it must exist on every node that may hold a replica.
        replicas: `N` or `MIN:MAX`.
        replica_cpus: Cores of a replica, which are its threads too.
        replica_gpus: GPUs of a replica; a fraction shares one.
        replica_batches: Batches that one gateway gives each stream of a replica at once.
        provider: As for `attencode serve`.
        precision: As for `attencode serve`.
        streams: Batches that run side by side in a replica.
        upscale_delay_s: How long more replicas must be needed before they come.
        downscale_delay_s: How long fewer must be needed before they go.
        stuck_after_s: When a batch that does not end takes its replica's process with it.
        surge_percent: Replicas, in percent and rounded up, that come beside the old ones while an artifact is
            replaced; 0 where there is no room for another, at the price of some capacity meanwhile.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    artifact: str
    replicas: str = "1"
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    replica_batches: int = 2
    provider: Literal["auto", "cuda", "openvino", "cpu"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    streams: int | Literal["auto"] = "auto"
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0
    stuck_after_s: float = 60.0
    surge_percent: int = 25

    @field_validator("replicas", mode="before")
    @classmethod
    def _replicas(cls, value: Any) -> str:
        read_replicas(str(value))
        return str(value)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a replica is: its id, its node, what computes there, and the artifact that it serves."""

    id: str
    node: str
    device: str
    digest: str


@dataclass(frozen=True, slots=True)
class Description:
    """All that a gateway must know of a model to serve it.

    Attributes:
        identity: Of the replica that tells.
        artifact: The bytes of `artifact.json`.
        tokenizer: The bytes of `tokenizer.json`.
        target_tokenizer: Those of the decoder's own; None where there is none.
        placement: Where the model runs.
        threads: Threads that one batch has.
        streams: Batches that run side by side.
        settings: What the application was made of.
    """

    identity: Identity
    artifact: bytes
    tokenizer: bytes
    placement: Placement
    threads: int
    streams: int
    settings: EncoderSettings
    target_tokenizer: bytes | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits at a gateway when it sends a batch."""

    gateway: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a replica says to a batch.

    Attributes:
        identity: Of the replica.
        arrays: The outputs; None when the replica serves another artifact than was asked for, or failed.
        looked: What was wanted of rows' attention.
        inference_s: How long the graph ran.
        in_flight: Batches that the replica still holds.
        error: What went wrong in the model, for the log.
        failed: Rows for which the model has no finite answer, each with the reason.
        again: Rows that were computed again in float32.
    """

    identity: Identity
    arrays: Mapping[str, NDArray[np.float32]] | None = None
    looked: Mapping[int, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    inference_s: float = 0.0
    in_flight: int = 0
    error: str = ""
    failed: Mapping[int, str] = field(default_factory=dict)
    again: int = 0


class EncoderReplica:
    """One session of one artifact; takes whole batches.

    Where its device is gone, or a batch does not end, it ends its process: a replica that fails at once would look like
    the least busy one. Batches under way run elsewhere, and Serve brings another replica.
    """

    session: type[Session] = Session
    """What runs the model; a replica whose session fails as a test wants it to has another one."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Load the artifact and warm the session up.

        Raises:
            StartupError: The artifact or the provider cannot be used here.
        """
        self._settings = settings
        self._artifact: Artifact = open_artifact(Path(settings.artifact))
        self._integrity = Integrity(self._artifact)
        self._placement = choose_placement(settings.provider, settings.precision, self._artifact)
        self._cores = max(1, int(settings.replica_cpus))
        streams = settings.streams
        self._streams = streams_for(self._placement.provider, self._cores) if streams == "auto" else streams
        self._session = self.session(self._artifact, self._placement, threads=self._cores, streams=self._streams)
        self._session.load("encode")
        self._session.warm_up()
        self._threads = DeviceThreads(self._streams, Device(end_now), stuck_after_s=settings.stuck_after_s)
        self._threads.start()
        self._identity = Identity(*_whereabouts(), self._placement.device, self._artifact.digest)
        self._load = ReplicaLoad(time.monotonic())
        self._in_flight = 0

    async def run(self, digest: str, batch: Batch, backlog: Backlog) -> Answer:
        """Run a batch that was made for the artifact of a digest."""
        if digest != self._artifact.digest:
            return Answer(self._identity, in_flight=self._in_flight)
        self._load.note_backlog(backlog.gateway, backlog.tokens, time.monotonic())
        self._in_flight += 1
        try:
            result = await self._threads.run(self._session, batch, alone=self._in_flight == 1)
        except Exception as error:  # noqa: BLE001 - told in the answer: what is raised here means a broken replica
            return Answer(self._identity, in_flight=self._in_flight - 1, error=f"{type(error).__name__}: {error}")
        finally:
            self._in_flight -= 1
        self._load.note_batch(batch.input_ids.size, result.inference_s)
        return Answer(
            self._identity,
            result.arrays,
            result.looked,
            result.inference_s,
            self._in_flight,
            failed={row: str(error) for row, error in result.failed.items()},
            again=result.again,
        )

    async def identify(self, backlog: Backlog) -> tuple[Identity, int]:
        """Say who this is and how many batches it holds."""
        self._load.note_backlog(backlog.gateway, backlog.tokens, time.monotonic())
        return self._identity, self._in_flight

    async def describe(self) -> Description:
        """Give what a gateway needs to serve this artifact."""
        folder, decoder = self._artifact.folder, self._artifact.decoder
        own = decoder is not None and decoder.tokenizer == TARGET_TOKENIZER
        return Description(
            self._identity,
            (folder / ARTIFACT_FILE).read_bytes(),
            (folder / "tokenizer.json").read_bytes(),
            self._placement,
            max(1, self._cores // self._streams),
            self._streams,
            self._settings,
            (folder / TARGET_TOKENIZER).read_bytes() if own else None,
        )

    async def check_health(self) -> None:
        """Run a tiny batch on the device; Serve replaces the replica where that fails, or takes too long.

        Raises:
            ArtifactChanged: A file of the artifact was written into.
            ProviderError: It computes NaN or infinity.
            DeviceLost: It is gone.
        """
        self._integrity.check()
        result = await self._threads.run(self._session, self._session.trial(1, 2))
        self._session.check(result.arrays)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler what `scale_on_work` reads."""
        return self._load.report(time.monotonic())


def encoder(settings: EncoderSettings) -> serve.Application:
    """Build a model's application; name it `attencode-NAME`."""
    least, most = read_replicas(settings.replicas)
    scale: dict[str, Any] = {"num_replicas": least}
    if least < most:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                upscale_delay_s=settings.upscale_delay_s,
                downscale_delay_s=settings.downscale_delay_s,
                look_back_period_s=5.0,
                metrics_interval_s=1.0,
                policy=AutoscalingPolicy(policy_function="service.scaling:scale_on_work"),
            )
        }
    deployment = serve.deployment(
        name=ENCODER,
        max_ongoing_requests=settings.replica_batches * _most_streams(settings) * _GATEWAYS_AT_ONCE,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        max_surge_percent=settings.surge_percent,
        logging_config={"enable_access_log": False},
        **scale,
    )(EncoderReplica)
    return deployment.bind(settings)


def _most_streams(settings: EncoderSettings) -> int:
    """Give the most streams that a replica may have; only there is it known what runs them."""
    if settings.streams != "auto":
        return settings.streams
    return max(streams_for(provider, max(1, int(settings.replica_cpus))) for provider in ("cuda", "cpu"))


def method(handle: Any, name: str, *, large: bool) -> Any:
    """Give a replica's method as the handle calls it: by gRPC, or, for large arrays, through the object store.

    The option has no public name; this is its only place.
    """
    return handle.options(method_name=name, _by_reference=large)


def handle_on_this_loop(model: str) -> Any:
    """Give a handle to a model's replicas whose router runs on the running event loop.

    By default it runs on a thread of its own, and each call pays for two changes of threads: 7 % of what one core of
    a gateway can do. The option has no public name; this is its only place.
    """
    handle = DeploymentHandle(ENCODER, application_name(model))
    handle._init(_run_router_in_separate_loop=False)  # noqa: SLF001
    return handle


def application_name(model: str) -> str:
    """Name the application that runs a model; Serve's controller chokes on what is not ASCII."""
    return "attencode-" + "".join(char if char.isascii() and char.isprintable() else quote(char) for char in model)


def _whereabouts() -> tuple[str, str]:
    """Give this replica's id and its node: host name and the head of the node's id."""
    replica = serve.get_replica_context().replica_id.unique_id
    node = ray.get_runtime_context().get_node_id()
    return replica, f"{socket.gethostname()}/{node[:8]}"
