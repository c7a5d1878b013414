"""What the tests of faults do it to: servers on the tests' cluster, and clusters of a test's own."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil
import pytest

from tests.service.conftest import ServerProcess, on_cluster, spawning
from tests.service.faults.load import (
    PAIR,
    RUN,
    SINGLE,
    free_port,
    wait_until,
)


@contextmanager
def servers(flags: list[str]) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts servers and reads what they log: in trouble that is more than a pipe holds."""
    with spawning(flags) as start:

        def begin(*words: object) -> ServerProcess:
            server = start(*words)
            pipe = os.fdopen(os.dup(server.process.stderr.fileno()), "rb")
            threading.Thread(target=lambda: (pipe.read(), pipe.close()), daemon=True).start()
            return server

        yield begin


@pytest.fixture(scope="module")
def spawn(ray_cluster: str) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts servers on the tests' cluster; models of this run leave it in the end."""
    from ray import serve as ray_serve

    from service.replicas import application_name

    with servers(on_cluster(ray_cluster)) as start:
        yield start
    for name in ray_serve.status().applications:
        if name.startswith(application_name(RUN)):
            ray_serve.delete(name)


@pytest.fixture(scope="module")
def artifact(make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path]) -> Path:
    """Give an artifact whose batches take some 10 ms, so that those who are killed die at work."""
    return export_artifact(make_bert(hidden_size=384, num_attention_heads=6, intermediate_size=1536))


@pytest.fixture(scope="module")
def other_artifact(make_bert: Callable[..., Path], export_artifact: Callable[[Path], Path]) -> Path:
    """Give one whose answers have the same shape and other numbers."""
    return export_artifact(make_bert(hidden_size=384, num_attention_heads=6, intermediate_size=1530))


@pytest.fixture(scope="module")
def single(spawn: Callable[..., ServerProcess], artifact: Path) -> ServerProcess:
    """Give a server of one replica."""
    return spawn(artifact, "--model-name", SINGLE, "--max-batch-tokens", "16384")


@pytest.fixture(scope="module")
def pair(spawn: Callable[..., ServerProcess], artifact: Path) -> ServerProcess:
    """Give a server of two replicas that gives a hung one up after 2 s."""
    return spawn(artifact, "--model-name", PAIR, "--replicas", "2", "--batch-timeout-s", "2")


class Cluster:
    """A Ray cluster of a test's own, whose nodes may die."""

    def __init__(self) -> None:
        """Start its head."""
        import ray

        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: Ray puts sockets into it
        self._seen: set[psutil.Process] = set()
        self._number = count(1)
        port, other = free_port(), free_port()
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        flags = ["--include-dashboard=false", f"--temp-dir={self._folder}", f"--ray-client-server-port={other}"]
        self.head = self._start("--head", f"--port={port}", *flags)

    def add(self) -> psutil.Process:
        """Start another node, on an address of its own: whoever joins at the head's becomes part of the head."""
        return self._start(f"--address={self.address}", f"--node-ip-address=127.0.0.{1 + next(self._number)}")

    def _start(self, *flags: str) -> psutil.Process:
        log = self._folder / f"{len(self._seen)}.log"
        line = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=1", *flags]
        line += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        line += ["--object-store-memory=100000000", "--include-log-monitor=false"]
        with log.open("w") as file:
            process = psutil.Popen(line, stdout=file, stderr=subprocess.STDOUT)
        self._seen.add(process)
        wait_until(lambda: "Ray runtime started" in log.read_text())
        return process

    def tree(self, process: psutil.Process) -> list[psutil.Process]:
        """List a node's processes, which `end` will not forget even if they lose their parent."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= {process, *process.children(recursive=True)}
            return [process, *process.children(recursive=True)]
        return []

    def kill(self, process: psutil.Process) -> None:
        """Kill a node: all of its processes."""
        _kill(self.tree(process))

    def end(self) -> None:
        """Kill every process that was started, and remove what they wrote."""
        for process in list(self._seen):
            self.tree(process)
        _kill(list(self._seen))
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill(several: list[psutil.Process]) -> None:
    for process in several:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(several, timeout=10)


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Give a cluster of one node with one core; nothing of it is left in the end."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # who joins must take to what the nodes do
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # a dead node is noticed in 3 s; else in 15
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.end()
