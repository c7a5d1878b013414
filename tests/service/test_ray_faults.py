"""Faults: what callers notice while replicas, gateways, nodes and a cluster die, or while a model is replaced.

Every process that a test kills or stops is one that it started: replicas are found by names of this run alone.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attencode import Client, DeadlineExceeded, EncodeResult
from tests.service.conftest import LITTLE_CPU, ROOT, ServerProcess, on_cluster, spawning

ray = pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")

from ray import serve as ray_serve  # noqa: E402

from service.artifact import open_artifact  # noqa: E402
from service.replicas import application_name  # noqa: E402

pytestmark = pytest.mark.ray
RUN = f"faults-{os.getpid()}"
SINGLE, PAIR, ROLLING = f"{RUN}-single", f"{RUN}-pair", f"{RUN}-rolling"
TEXTS = ["a", "abc", "fade a bed", "a b c d e f g h", "jib " * 6, "abcdefghij " * 3]


# ---------------------------------------------------------------- what the tests do


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


@contextmanager
def load(address: str, requests: list[str] | list[list[str]], clients: int = 8) -> Iterator[list]:
    """Let clients ask while the block runs; gives (request's place, answer). A call that fails fails the test."""
    over = threading.Event()
    answers: list[tuple[int, EncodeResult]] = []

    def ask(first: int) -> None:
        with Client(address, wait_for_ready=True) as client:
            for number in count(first):
                if over.is_set():
                    return
                place = number % len(requests)
                answers.append((place, client.encode(requests[place])))

    with ThreadPoolExecutor(clients) as pool:
        calls = [pool.submit(ask, number) for number in range(clients)]
        try:
            yield answers
        finally:
            over.set()
    for call in calls:
        call.result()


def right_answers(address: str, requests: list[str] | list[list[str]]) -> dict[str, list[np.ndarray]]:
    """Give the vectors of each request, under the digest of the version that made them."""
    with Client(address) as client:
        answers = [client.encode(request) for request in requests]
    return {answers[0].model_digest: [answer.pooled for answer in answers]}


def check(answers: list[tuple[int, EncodeResult]], expected: dict[str, list[np.ndarray]]) -> None:
    """Hold each answer against the vectors of the version that it says it is of."""
    assert answers
    for place, answer in answers:
        np.testing.assert_allclose(answer.pooled, expected[answer.model_digest][place], atol=1e-5)


def replicas(address: str) -> set[str]:
    with Client(address) as client:
        return {replica.id for replica in client.get_model().replicas}


def processes(model: str) -> list[psutil.Process]:
    """Find the replicas of a model of this run."""
    title = f"ray::ServeReplica:attencode-{model}:EncoderReplica"
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if "".join(process.info["cmdline"] or []).startswith(title)]


def kill_one(model: str) -> None:
    victim = processes(model)[0]
    victim.kill()
    psutil.wait_procs([victim], timeout=10)


def serving(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def metrics(server: ServerProcess) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5).read().decode()


def value(server: ServerProcess, sample: str) -> float:
    match = re.search(rf"^{re.escape(sample)} (\S+)$", metrics(server), re.MULTILINE)
    return float(match[1]) if match else 0.0


def readiness(server: ServerProcess, model: str) -> tuple[bool, bool, float]:
    names = ("", f"attencode.v1.Encoder/{model}")
    whole, one = (serving(server.address, name) for name in names)
    return whole, one, value(server, f'attencode_ready{{model="{model}"}}')


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    line = [sys.executable, "-m", "service", *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def fault(ended: subprocess.CompletedProcess[str]) -> str:
    """Give the one line in which a command says what went wrong."""
    assert not re.search("^Traceback", ended.stderr, re.MULTILINE), ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("attencode: "))
    return line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---------------------------------------------------------------- what they do it to


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


# ---------------------------------------------------------------- replicas


def test_deaths_go_unnoticed(pair: ServerProcess) -> None:
    """While replicas die one after the other, no call fails and every answer is as before."""
    expected = right_answers(pair.address, TEXTS)
    with load(pair.address, TEXTS) as answers:
        for _ in range(2):
            time.sleep(2)
            kill_one(PAIR)
            time.sleep(2)
        time.sleep(2)
    check(answers, expected)


def test_the_only_replica_dies(single: ServerProcess) -> None:
    """Calls wait for its successor; readiness says so, liveness does not change, its series leave the metrics."""
    large = [TEXTS * 20]  # some 0.1 s, so that a batch dies with its replica
    expected = right_answers(single.address, large)
    (dead,) = replicas(single.address)
    with load(single.address, large, clients=4) as answers:
        time.sleep(0.5)
        assert f'replica="{dead}"' in metrics(single)
        kill_one(SINGLE)
        wait_until(lambda: readiness(single, SINGLE) == (False, False, 0))
        assert serving(single.address, "liveness")
        wait_until(lambda: readiness(single, SINGLE) == (True, True, 1))
    check(answers, expected)
    (successor,) = replicas(single.address)
    assert dead not in metrics(single)
    assert f'replica="{successor}"' in metrics(single)
    assert value(single, f'attencode_batch_retries_total{{model="{SINGLE}",reason="died"}}') >= 1


def test_a_deadline_passes_without_a_replica(single: ServerProcess) -> None:
    """A caller who cannot wait for the successor is told DEADLINE_EXCEEDED; those who can are answered."""
    with Client(single.address) as patient, Client(single.address, timeout_s=0.4) as hasty:
        expected = patient.encode("abc").pooled
        kill_one(SINGLE)
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(client.encode, "abc") for client in (patient, hasty) * 4]
        for answered, failed in zip(calls[::2], calls[1::2], strict=True):
            np.testing.assert_allclose(answered.result().pooled, expected, atol=1e-5)
            with pytest.raises(DeadlineExceeded):
                failed.result()


def test_a_replica_hangs(pair: ServerProcess) -> None:
    """What a stopped replica holds runs on the other one; no call fails."""
    expected = right_answers(pair.address, TEXTS)
    wait_until(lambda: len(processes(PAIR)) == len(replicas(pair.address)) == 2)
    stopped = processes(PAIR)[0]
    try:
        with load(pair.address, TEXTS) as answers:
            time.sleep(1)
            stopped.suspend()
            time.sleep(8)
            before = len(answers)
            time.sleep(3)
            assert len(answers) > before
    finally:
        stopped.kill()
    check(answers, expected)
    assert value(pair, f'attencode_batch_retries_total{{model="{PAIR}",reason="hung"}}') >= 1


# ---------------------------------------------------------------- versions


def test_a_model_is_replaced_under_load(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path
) -> None:
    """`deploy` brings a new version without a failure, and no answer, however large, mixes the two."""
    server = spawn(artifact, "--model-name", ROLLING, "--replicas", "2", "--max-batch-tokens", "64")
    old, new = open_artifact(artifact).digest, open_artifact(other_artifact).digest
    requests = [["abc"], TEXTS, TEXTS * 5]
    expected = right_answers(server.address, requests)
    with load(server.address, requests) as answers:
        time.sleep(1)
        done = command("deploy", f"{ROLLING}={other_artifact}", "--address", ray_cluster)
        wait_until(lambda: answers[-1][1].model_digest == new)
        time.sleep(2)
        settled = len(answers)
        time.sleep(1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{ROLLING} runs {new}, ")
    check(answers, expected | right_answers(server.address, requests))
    assert {answer.model_digest for _, answer in answers} == {old, new}
    assert {answer.model_digest for _, answer in answers[settled:]} == {new}


def no_artifact(folder: Path, _artifact: Path) -> str:
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing")
    return "config.json is missing"


def damaged(folder: Path, artifact: Path) -> str:
    shutil.copytree(artifact, folder)
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[100] ^= 1
    (folder / "weights.bin").write_bytes(weights)
    return "weights.bin was changed or damaged after the export"


@pytest.mark.parametrize("make", [no_artifact, damaged])
def test_what_cannot_be_deployed(
    single: ServerProcess,
    ray_cluster: str,
    other_artifact: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], str],
) -> None:
    """What is no artifact, or no whole one, is refused in one line, and the old version goes on."""
    expected = right_answers(single.address, TEXTS)
    message = make(tmp_path / "model", other_artifact)
    with load(single.address, TEXTS, clients=2) as answers:
        ended = command("deploy", f"{SINGLE}={tmp_path / 'model'}", "--address", ray_cluster, "--cache-dir", tmp_path)
    assert ended.returncode == 1
    assert message in fault(ended)
    check(answers, expected)


def test_what_does_not_start(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path
) -> None:
    """A version that no replica can start is taken back: the old one goes on, and its dead are replaced."""
    name = f"{RUN}-refused"
    server = spawn(artifact, "--model-name", name)
    expected = right_answers(server.address, TEXTS)
    flags = ["--provider", "cuda", "--replica-gpus", "0", "--address", ray_cluster]
    with load(server.address, TEXTS, clients=2) as answers:
        ended = command("deploy", f"{name}={other_artifact}", *flags)
        kill_one(name)
    assert ended.returncode == 1
    assert "provider cuda cannot run here" in fault(ended)
    check(answers, expected)


def test_what_starts_no_more(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path, tmp_path: Path
) -> None:
    """A model whose replicas died and cannot start again is brought back by `deploy` of a whole artifact."""
    name, folder = f"{RUN}-gone", tmp_path / "artifact"
    server = spawn(shutil.copytree(artifact, folder), "--model-name", name)
    shutil.rmtree(folder)
    kill_one(name)
    wait_until(lambda: ray_serve.status().applications[application_name(name)].status == "UNHEALTHY")
    with Client(server.address, timeout_s=90) as client, ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.encode, "abc")
        flags = ["--address", ray_cluster, "--replica-cpus", LITTLE_CPU]
        done = command("deploy", f"{name}={other_artifact}", *flags)
        assert done.returncode == 0, done.stderr
        assert waiting.result().model_digest == open_artifact(other_artifact).digest


def test_serve_changes_no_model(single: ServerProcess, ray_cluster: str, other_artifact: Path) -> None:
    """`serve` of another artifact under a name that runs is refused, and says what would change it."""
    flags = ["--port", "0", "--metrics-port", "none", *on_cluster(ray_cluster)]
    ended = command("serve", other_artifact, "--model-name", SINGLE, *flags)
    assert ended.returncode == 1
    assert f"`attencode deploy {SINGLE}={other_artifact} " in fault(ended)


# ---------------------------------------------------------------- gateways, nodes, clusters


def test_a_gateway_dies(pair: ServerProcess, spawn: Callable[..., ServerProcess], artifact: Path) -> None:
    """Clients that wait do not notice that a gateway was killed and started anew; the replicas stay."""
    flags = ["--model-name", PAIR, "--port", str(free_port())]
    first = spawn(artifact, *flags)
    wait_until(lambda: len(replicas(first.address)) == 2)
    before = replicas(first.address)
    expected = right_answers(first.address, TEXTS)
    with load(first.address, TEXTS) as answers:
        time.sleep(1)
        first.process.kill()
        first.process.wait()
        spawn(artifact, *flags)
        time.sleep(1)
    check(answers, expected)
    assert replicas(first.address) == before


def test_a_node_dies(own_cluster: Cluster, artifact: Path) -> None:
    """Calls go on without a failure on the other node's replica; with a new node there are two again."""
    flags = ["--ray", "--address", own_cluster.address, "--model-name", f"{RUN}-nodes"]
    second = own_cluster.add()
    with servers([*flags, "--replicas", "2", "--replica-cpus", "1"]) as start:
        server = start(artifact)
        expected = right_answers(server.address, TEXTS)
        with Client(server.address) as client, load(server.address, TEXTS) as answers:
            wait_until(lambda: len(client.get_model().replicas) == 2)
            before = {replica.node for replica in client.get_model().replicas}
            assert len(before) == 2
            own_cluster.kill(second)
            wait_until(lambda: len(client.get_model().replicas) == 1)
            own_cluster.add()
            wait_until(lambda: len(client.get_model().replicas) == 2)
            assert len({replica.node for replica in client.get_model().replicas} - before) == 1
        check(answers, expected)


def test_the_cluster_is_lost(own_cluster: Cluster, artifact: Path) -> None:
    """A gateway whose cluster is gone ends by itself and says why."""
    flags = ["--ray", "--address", own_cluster.address, "--model-name", f"{RUN}-lost", "--replica-cpus", "1"]
    with spawning(flags) as start:
        server = start(artifact)
        (raylet,) = (process for process in own_cluster.tree(own_cluster.head) if process.name() == "raylet")
        raylet.kill()  # `ray start --block` then ends the rest of the node
        _, errors = server.process.communicate(timeout=90)
        assert server.process.returncode == 1
        assert re.search("^attencode: the Ray cluster does not answer any more", errors, re.MULTILINE)
        assert not re.search("^Traceback", errors, re.MULTILINE)
