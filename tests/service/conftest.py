"""Real servers for the tests: one in this process on a free port, or a process of its own."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attencode import Client
from service.artifact import open_artifact
from service.backend import LocalBackend
from service.config import ServiceConfig
from service.server import Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., str]]:
    """Give a function that serves an artifact in this process, in float32, and gives the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[Server] = []

    def call(coroutine: object) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)  # type: ignore[arg-type]

    async def build(config: ServiceConfig, artifact: Path) -> None:
        opened = open_artifact(artifact)
        servers.append(Server(config, LocalBackend(config, {config.model_name or opened.model_id: opened})))
        await servers[-1].start()

    def start(artifact: Path, **settings: object) -> str:
        defaults = {"port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32"}
        config = ServiceConfig.model_validate({"model": str(artifact), **defaults, **settings})
        call(build(config, artifact))
        return f"127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        call(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


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
def spawn() -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts `attencode serve` as a process and waits until it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(model: Path | str | None, *flags: str, **environment: str) -> ServerProcess:
        words = [] if model is None else [str(model)]
        command = [sys.executable, "-m", "service", "serve", *words, "--port", "0", "--metrics-port", "0", *flags]
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
        line = process.stdout.readline()
        ready_s = time.perf_counter() - started
        match = re.search(r" at (\S+:\d+), .*?(?:metrics on port (\d+))?(?: \(ready.*)?$", line.strip())
        assert match, f"the server did not start: {line}{process.stderr.read() if process.stderr else ''}"
        return ServerProcess(process, match[1], int(match[2]) if match[2] else None, line, ready_s)

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
