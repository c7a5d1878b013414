"""What the tests of faults do to a server, and how they look at it.

Every process that a test kills or stops is one that it started: replicas are found by names of this run alone.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attencode import Client, EncodeResult
from tests.service.conftest import ROOT, ServerProcess

RUN = f"faults-{os.getpid()}"
SINGLE, PAIR, ROLLING = f"{RUN}-single", f"{RUN}-pair", f"{RUN}-rolling"
TEXTS = ["a", "abc", "fade a bed", "a b c d e f g h", "jib " * 6, "abcdefghij " * 3]


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
