"""Cluster: starts or joins Ray, deploys models on it, and serves them from a gateway.

May import: fleet, replicas, served, supervision, artifact, config, placement, errors, ray.
"""

import asyncio
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from threading import Event, Thread
from typing import Any

import ray
from ray import serve
from ray.serve.config import ProxyLocation

from service.artifact import Artifact
from service.config import ServiceConfig, read_replicas
from service.errors import ConfigError, StartupError, Unavailable
from service.fleet import Fleet
from service.placement import choose_placement, usable_cores
from service.replicas import ENCODER, Description, EncoderSettings, application_name, encoder, method
from service.served import Models
from service.supervision import keep

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 10.0
_DOOR_S = 5.0
_SERVE_ATTEMPTS = 10
_DESCRIBE_ATTEMPTS = 10  # a second apart: the only replica may just be replaced


class RayBackend:
    """Models that run on Ray Serve's replicas, watched from here."""

    def __init__(self, config: ServiceConfig, names: Iterable[str], *, wait: bool = True) -> None:
        """Store what is needed; nothing runs yet.

        Args:
            config: The settings.
            names: Of the models, the default first; they are deployed already, or will be.
            wait: Whether the start waits until every model answers.
        """
        self._config = config
        self._names = tuple(names)
        self._wait = wait
        self._tasks: list[asyncio.Task[None]] = []
        self._fleets: list[Fleet] = []

    @property
    def names(self) -> tuple[str, ...]:
        """What the models are called, the default first."""
        return self._names

    async def start(self, models: Models) -> None:
        """Watch the replicas of every model, on the cluster that this process has joined."""
        for name in self._names:
            fleet = Fleet(self._config, name, models)
            self._fleets.append(fleet)
            kept = keep("fleet", fleet.watch, models.lost)
            self._tasks.append(asyncio.get_running_loop().create_task(kept))
        while self._wait and not all(models.is_ready(name) for name in self._names):
            await models.changed.wait()
            models.changed.clear()

    async def stop(self) -> None:
        """Watch no longer; the replicas stay."""
        for task in self._tasks:
            task.cancel()

    def summary(self) -> str:
        """Count the replicas and say what computes there."""
        replicas = [replica for fleet in self._fleets for replica in fleet.replicas()]
        devices = ", ".join(sorted({replica.device for replica in replicas})) or "no replica yet"
        return f"{devices}, Ray Serve with {len(replicas)} replica{'s' if len(replicas) != 1 else ''}"


def ensure_deployed(config: ServiceConfig, artifacts: Mapping[str, Artifact]) -> None:
    """Deploy every model that is not deployed yet.

    Args:
        config: The settings.
        artifacts: By the name that requests use.

    Raises:
        StartupError: A model cannot be deployed, or its name is taken by another artifact.
    """
    for name, artifact in artifacts.items():
        running = describe(name)
        if running is None:
            deploy(name, encoder_settings(config, artifact, len(artifacts)), None)
        elif running.identity.digest != artifact.digest:
            raise ConfigError(
                f"{name} runs on this cluster with artifact {running.identity.digest[:12]}, "
                f"{artifact.folder} is {artifact.digest[:12]}; change it with "
                f"`attencode deploy {shlex.quote(f'{name}={artifact.folder}')} --address {config.address or 'auto'}`, "
                "or serve under another --model-name"
            )


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Be in a Ray cluster: one that is there, or, for an empty address, one on this machine that ends with it.

    To be entered on the main thread, before there are others: Ray makes processes.

    Raises:
        ConfigError: There is no cluster at the address, or this machine is none of its nodes.
    """
    _check_address(address)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # a node's death makes 100 KB of warnings
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": "attencode"}
    if address:
        options["address"] = address
    else:
        options |= {"include_dashboard": False, "address": "local"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(sys.stderr):
            ray.init(**options)
        signal.signal(signal.SIGTERM, before)  # Ray puts one of its own there
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot join a Ray cluster at {address!r}: {error}; start a node of it here with `ray start`"
        ) from error
    try:
        with redirect_stdout(sys.stderr):  # where Ray prints what happens on its nodes
            _start_serve()
            yield
            if not address:
                serve.shutdown()
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Knock at a cluster's door first: Ray itself would knock for a quarter of an hour.

    Raises:
        ConfigError: Nobody answers, or it is no address.
    """
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--address must be auto or HOST:PORT of a Ray cluster, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_DOOR_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}; start one with `ray start --head`, or correct --address"
        ) from error


def _start_serve() -> None:
    """Start Serve, or find it started; another process may be about to do the same."""
    for attempt in range(_SERVE_ATTEMPTS):
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
        except Exception as error:
            if "already" not in str(error) or attempt == _SERVE_ATTEMPTS - 1:
                raise
            time.sleep(1)
        else:
            return


def deploy(name: str, settings: EncoderSettings, before: Description | None) -> Description:
    """Deploy a model, or change what is deployed under its name; waits until its replicas run.

    Args:
        name: The model's name.
        settings: What it shall be.
        before: What runs under the name, as `describe` gave it; it comes back if the new settings do not work.

    Returns:
        What one of the new replicas says of itself.

    Raises:
        StartupError: The replicas do not come up; the message is theirs, and all is as before.
    """
    try:
        with _saying_what_is_missing(name, settings):
            serve.run(encoder(settings), name=application_name(name), route_prefix=None)
    except BaseException as error:  # an interrupt too
        status = serve.status().applications.get(application_name(name))
        reasons = [deployment.message for deployment in status.deployments.values()] if status else []
        _take_back(name, before)
        if not isinstance(error, RuntimeError):
            raise
        raise StartupError(f"{name} cannot be deployed: {_last_words(reasons) or error}") from error
    description = describe(name)
    if description is None:
        raise StartupError(f"{name} was taken down while it was deployed")
    return description


def undeploy(name: str) -> None:
    """Take a model down.

    Raises:
        ConfigError: No such model is deployed.
    """
    if application_name(name) not in serve.status().applications:
        deployed = [
            app.removeprefix("attencode-") for app in serve.status().applications if app.startswith("attencode-")
        ]
        raise ConfigError(
            f"{name} is not deployed on this cluster; deployed: {', '.join(sorted(deployed)) or 'nothing'}"
        )
    serve.delete(application_name(name))


def _take_back(name: str, before: Description | None) -> None:
    """Undo a deployment that failed, or was interrupted."""
    if before is None:
        serve.delete(application_name(name))
    else:  # Serve lets the old replicas run, but would not replace one that dies
        serve.run(encoder(before.settings), name=application_name(name), route_prefix=None)


@contextmanager
def _saying_what_is_missing(name: str, settings: EncoderSettings) -> Iterator[None]:
    """Log every so often what is waited for: Serve itself waits in silence for room that may never come."""
    done = Event()

    def watch() -> None:
        while not done.wait(_PATIENCE_S):
            status = serve.status().applications.get(application_name(name))
            states = status.deployments[ENCODER].replica_states if status and status.deployments else {}
            has = ray.cluster_resources()
            _LOG.warning(
                "waiting for replicas of %s: %d of %s run; each takes %g CPUs and %g GPUs, the whole cluster has "
                "%g and %g; see --replicas, --replica-cpus and --replica-gpus",
                *(name, states.get("RUNNING", 0), settings.replicas, settings.replica_cpus, settings.replica_gpus),
                *(has.get("CPU", 0.0), has.get("GPU", 0.0)),
            )

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _last_words(reasons: Iterable[str]) -> str:
    """Cut Serve's message, traceback and all, to the error that a replica ended with."""
    lines = [line.strip() for reason in reasons for line in reason.splitlines()]
    errors = [line for line in lines if line.startswith("service.errors.")]
    return errors[-1].partition(": ")[2] if errors else " ".join(lines)


def describe(name: str) -> Description | None:
    """Ask a replica of a model for its description; None when no such model runs, even after some patience.

    What somebody began to deploy and never came up runs not either.
    """
    for _ in range(_DESCRIBE_ATTEMPTS):
        status = serve.status().applications.get(application_name(name))
        if status is None or (status.status in ("DELETING", "DEPLOY_FAILED") and not _running(status)):
            return None
        if _running(status):
            break
        time.sleep(1)
    else:
        return None
    handle = serve.get_deployment_handle(ENCODER, application_name(name))
    try:
        description: Description = method(handle, "describe", large=True).remote().result(timeout_s=60)
    except TimeoutError as error:
        raise Unavailable(f"{name} is deployed, but none of its replicas answers") from error
    return description


def _running(status: Any) -> int:
    """Count the running replicas of an application."""
    return sum(int(deployment.replica_states.get("RUNNING", 0)) for deployment in status.deployments.values())


def settings_for(config: ServiceConfig, artifact: Artifact, models: int, before: Description | None) -> EncoderSettings:
    """Give the settings with which a model is to be deployed: as it runs, changed by what was set.

    Args:
        config: The settings, of which only those that were given count for a model that runs.
        artifact: What it shall serve.
        models: How many models share this machine, for one that does not run yet.
        before: What runs under its name, as `describe` gave it.
    """
    wanted = encoder_settings(config, artifact, models)
    if before is None:
        return wanted
    given = {
        field: getattr(wanted, field) for field in EncoderSettings.model_fields if field in config.model_fields_set
    }
    return before.settings.model_copy(update={**given, "artifact": wanted.artifact})


def encoder_settings(config: ServiceConfig, artifact: Artifact, models: int) -> EncoderSettings:
    """Read from the server's settings how a model's replicas shall be.

    Args:
        config: The settings.
        artifact: The model.
        models: How many models share this machine.
    """
    most = read_replicas(config.replicas)[1]
    cpus, gpus = config.replica_cpus, config.replica_gpus
    if gpus == "auto":
        gpus = 1.0 if choose_placement(config.provider, config.precision).provider == "cuda" else 0.0
    share = max(1.0, float(usable_cores() // (most * models)))
    return EncoderSettings(
        artifact=str(artifact.folder.resolve()),
        replicas=config.replicas,
        replica_cpus=share if cpus == "auto" else cpus,
        replica_gpus=gpus,
        replica_batches=config.replica_batches,
        provider=config.provider,
        precision=config.precision,
        streams=config.streams,
        stuck_after_s=config.stuck_after_s,
    )
