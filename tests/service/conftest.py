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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from attencode import Client
from service.artifact import Artifact, open_artifact
from service.backend import Backend, LocalBackend
from service.config import ServiceConfig
from service.server import Server
from service.tracing import Tracing

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


@pytest.fixture(scope="session")
def serve(where: str) -> Iterator[Callable[..., str]]:
    """Give a function that serves an artifact in this process, in float32, and gives the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[Server] = []

    def call(coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)  # type: ignore[arg-type]

    async def build(config: ServiceConfig, artifact: Path, tracing: Tracing | None) -> None:
        opened = open_artifact(artifact)
        artifacts = {config.model_name or opened.model_id: opened}
        if config.ray:
            await asyncio.to_thread(deployed, config, artifacts)
        backend = ray_backend(config, artifacts) if config.ray else LocalBackend(config, artifacts)
        servers.append(Server(config, backend, tracing))
        await servers[-1].start()

    def start(artifact: Path, tracing: Tracing | None = None, **settings: object) -> str:
        defaults = {"port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32"}
        if where == "ray":
            defaults |= {"ray": True, "model_name": f"served-{len(servers)}", "replica_cpus": LITTLE_CPU}
        config = ServiceConfig.model_validate({"model": str(artifact), **defaults, **settings})
        call(build(config, artifact, tracing))
        return f"127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        call(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def deployed(config: ServiceConfig, artifacts: dict[str, Artifact]) -> None:
    from service.cluster import ensure_deployed  # only where Ray is there

    ensure_deployed(config, artifacts)


def ray_backend(config: ServiceConfig, artifacts: dict[str, Artifact]) -> Backend:
    from service.cluster import RayBackend

    return RayBackend(config, artifacts)


@pytest.fixture(scope="session")
def tiny(serve: Callable[..., str], tiny_artifact: Path) -> Iterator[Client]:
    """Give a client of a server of the tiny BERT."""
    with Client(serve(tiny_artifact, max_inputs=64, max_message_bytes=2**20)) as client:
        yield client


@pytest.fixture(scope="session")
def minilm_address(serve: Callable[..., str], minilm_artifact: Path) -> str:
    """Give the address of a server of the real weights."""
    return serve(minilm_artifact)


@pytest.fixture(scope="session")
def minilm_client(minilm_address: str) -> Iterator[Client]:
    """Give a client of a server of the real weights."""
    with Client(minilm_address) as client:
        yield client


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
