"""Real servers for the tests: one in this process on a free port, or a process of its own."""

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from attencode import Client
from service.artifact import Artifact, open_artifact
from service.backend import Backend, LocalBackend
from service.config import ServiceConfig
from service.server import Server
from service.tracing import Tracing
from tests.service import translators

ROOT = Path(__file__).parents[2]
LITTLE_CPU = 0.01  # of a core a replica in Ray's books, so that many fit; each has one thread


@contextmanager
def cluster(**options: object) -> Iterator[str]:
    """Run a Ray cluster of one node that this process is part of."""
    import ray
    from ray import serve

    from service.config import prepare_ray_environment

    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home folder
    prepare_ray_environment()
    settings = {"address": "local", "num_cpus": 2, "include_dashboard": False, "log_to_driver": False, **options}
    context = ray.init(logging_level="ERROR", namespace="attencode", **settings)
    serve.start(proxy_location="Disabled")
    try:
        yield context.address_info["gcs_address"]
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Start a Ray cluster, join it with this process, and give its address; nothing of it is left in the end."""
    pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")
    with cluster() as address:
        yield address


@pytest.fixture(scope="session", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def where(request: pytest.FixtureRequest) -> str:
    """Say where a server's models run: every test of a server runs for both."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Serve each family once on Ray, not each of its variations too: how arrays cross is the same for all of them."""
    once = "test_served_answers_equal_transformers[ray-"
    items[:] = [item for item in items if not (item.name.startswith(once) and "," in item.name)]


class Servers:
    """Servers of this process, on an event loop of their own; on Ray each has an application of its own."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._numbers = count()

    @contextmanager
    def serving(self) -> Iterator[Callable[..., str]]:
        """Give a function that serves an artifact in float32 and gives the address; the servers end with the block."""
        servers: list[tuple[Server, ServiceConfig]] = []

        def start(artifact: Path, tracing: Tracing | None = None, **settings: object) -> str:
            defaults = {"port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32"}
            if self._where == "ray":
                name = f"served-{next(self._numbers)}"
                defaults |= {"ray": True, "model_name": name, "replica_cpus": LITTLE_CPU}
            config = ServiceConfig.model_validate({"model": str(artifact), **defaults, **settings})
            server = self._call(self._build(config, artifact, tracing))
            servers.append((server, config))
            return f"127.0.0.1:{server.port}"

        try:
            yield start
        finally:
            for server, config in servers:
                self._call(server.stop())
                if config.ray:
                    delete(config.model_name)

    async def _build(self, config: ServiceConfig, artifact: Path, tracing: Tracing | None) -> Server:
        opened = open_artifact(artifact)
        artifacts = {config.model_name or opened.model_id: opened}
        if config.ray:
            await asyncio.to_thread(deployed, config, artifacts)
        backend = ray_backend(config, artifacts) if config.ray else LocalBackend(config, artifacts)
        server = Server(config, backend, tracing)
        await server.start()
        return server

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def servers(where: str) -> Iterator[Servers]:
    """Give the servers of this process."""
    servers = Servers(where)
    yield servers
    servers.close()


@pytest.fixture
def serve(servers: Servers) -> Iterator[Callable[..., str]]:
    """Give a function that serves an artifact in this process, in float32, and gives the address."""
    with servers.serving() as start:
        yield start


@pytest.fixture(scope="module")
def serve_for_module(servers: Servers) -> Iterator[Callable[..., str]]:
    """Give the same for servers that all tests of a module may share."""
    with servers.serving() as start:
        yield start


@pytest.fixture(scope="session")
def serve_for_all(servers: Servers) -> Iterator[Callable[..., str]]:
    """Give the same for servers that all tests may share."""
    with servers.serving() as start:
        yield start


def deployed(config: ServiceConfig, artifacts: dict[str, Artifact]) -> None:
    from service.cluster import ensure_deployed  # only where Ray is there

    ensure_deployed(config, artifacts)


def delete(name: str) -> None:
    """Let a model's replicas go, so that they do not take the cores of the tests that follow; waits for nothing."""
    from ray import serve as ray_serve

    from service.replicas import application_name

    ray_serve.delete(application_name(name), _blocking=False)


def ray_backend(config: ServiceConfig, artifacts: dict[str, Artifact]) -> Backend:
    from service.cluster import RayBackend

    return RayBackend(config, artifacts)


@pytest.fixture(scope="session")
def tiny(serve_for_all: Callable[..., str], tiny_artifact: Path) -> Iterator[Client]:
    """Give a client of a server of the tiny BERT."""
    with Client(serve_for_all(tiny_artifact, max_inputs=64, max_message_bytes=2**20)) as client:
        yield client


@pytest.fixture(scope="session")
def minilm_address(serve_for_all: Callable[..., str], minilm_artifact: Path) -> str:
    """Give the address of a server of the real weights."""
    return serve_for_all(minilm_artifact)


@pytest.fixture(scope="session")
def minilm_client(minilm_address: str) -> Iterator[Client]:
    """Give a client of a server of the real weights."""
    with Client(minilm_address) as client:
        yield client


@pytest.fixture(scope="session")
def t5(
    tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]
) -> Iterator[translators.Translator]:
    """Give a served T5 with its decoder."""
    yield from translators.served("t5", tmp_path_factory.mktemp("t5"), export_artifact)


@pytest.fixture(scope="session", params=sorted(translators.FAMILIES))
def translator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]
) -> Iterator[translators.Translator]:
    """Give a served model of each family with a decoder."""
    if request.param == "t5":
        yield request.getfixturevalue("t5")
    else:
        yield from translators.served(request.param, tmp_path_factory.mktemp(request.param), export_artifact)


@dataclass
class ServerProcess:
    """A server process that is ready."""

    process: subprocess.Popen[str]
    address: str
    metrics_port: int | None
    line: str
    ready_s: float

    def terminate(self) -> int:
        """Send SIGTERM and give the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture
def spawn(where: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts `attencode serve` as a process and waits until it is ready."""
    with spawning([] if where == "local" else on_cluster(request.getfixturevalue("ray_cluster"))) as start:
        yield start


@pytest.fixture
def spawn_local() -> Iterator[Callable[..., ServerProcess]]:
    """Give the same for servers that run their models themselves, and know nothing of Ray."""
    with spawning([]) as start:
        yield start


@pytest.fixture(scope="module")
def spawn_for_all() -> Iterator[Callable[..., ServerProcess]]:
    """Give the same for servers that all tests of a module may share."""
    with spawning([]) as start:
        yield start


def on_cluster(address: str) -> list[str]:
    """Give the flags of a server whose models run on the tests' cluster."""
    return ["--ray", "--address", address, "--replica-cpus", str(LITTLE_CPU)]


@contextmanager
def spawning(
    further: list[str], module: tuple[str, ...] = ("service", "serve")
) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts servers with further flags; they end with the block."""
    processes: list[subprocess.Popen[str]] = []

    def start(model: Path | str | None, *flags: str, **environment: str) -> ServerProcess:
        words = [] if model is None else [str(model)]
        if further and model is not None and "--model-name" not in flags:  # one cluster: a name for each artifact
            words += ["--model-name", hashlib.sha256(words[0].encode()).hexdigest()[:8]]
        command = [sys.executable, "-m", *module, *words, "--port", "0", "--metrics-port", "0"]
        command += [*further, *flags]
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        hanging = threading.Timer(90, process.kill)
        hanging.start()
        line = process.stdout.readline()
        hanging.cancel()
        ready_s = time.perf_counter() - started
        match = re.search(r" at (\S+:\d+), .*?(?:metrics on port (\d+))?(?: \(ready.*)?$", line.strip())
        if match is None:
            process.kill()
        assert match, f"the server did not start: {line}{process.stderr.read() if process.stderr else ''}"
        return ServerProcess(process, match[1], int(match[2]) if match[2] else None, line, ready_s)

    try:
        yield start
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()
