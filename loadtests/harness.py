"""Harness: what the load tests share: a server, an artifact, requests for h2load, and the bare session.

h2load (Debian's nghttp2-client) speaks gRPC's unary calls and costs next to nothing itself. It takes any
answer for a success, whatever its gRPC status, so `load` also counts the bytes that came.
May import: texts, wire, service.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from service.artifact import Artifact
from service.batching import Batch, BatchLimits, pad
from service.client import Client
from service.plain import encode_request
from service.session import Session
from service.tokenization import TextTokenizer
from texts import TEXT, TOKENS, in_groups
from wire import ENCODE, request_bytes

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
GRPC = ("content-type: application/grpc", "te: trailers")


@contextmanager
def running_server(*words: str, **variables: str) -> Iterator[tuple[int, int]]:
    """Start `attencode serve` with these words and give its port and process id; it is drained in the end."""
    command = [sys.executable, "-m", "service", "serve", "--port=0", "--metrics-port=none", *words]
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            print(line.strip(), file=sys.stderr)
            match = re.search(r":(\d+), ", line)
            if match is None:
                sys.exit("the server did not start")
            yield int(match[1]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Give a command line that says what is served, and where it runs."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--artifact", type=Path, help="exported from the default model if unset")
    made.add_argument("--provider", default="auto")
    made.add_argument("--precision", default="auto")
    return made


def serve_words(arguments: argparse.Namespace) -> list[str]:
    """Give the words of `attencode serve` that such a command line asks for."""
    return [str(arguments.artifact), "--provider", arguments.provider, "--precision", arguments.precision]


def exported(artifact: Path | None) -> Path:
    """Give the artifact, or that of the default model, exported now."""
    if artifact is not None:
        return artifact
    folder = Path(tempfile.mkdtemp()) / "artifact"
    command = [sys.executable, "-m", "service", "export", MODEL, "-o", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


@contextmanager
def body_file(content: bytes) -> Iterator[Path]:
    """Write what h2load shall send to a file."""
    with tempfile.NamedTemporaryFile() as body:
        body.write(content)
        body.flush()
        yield Path(body.name)


@contextmanager
def message_file(texts: list[str]) -> Iterator[Path]:
    """Write a request with gRPC's length prefix, as h2load sends it, to a file."""
    message = request_bytes(texts)
    with body_file(b"\0" + len(message).to_bytes(4, "big") + message) as path:
        yield path


@dataclass(frozen=True, slots=True)
class Target:
    """What h2load sends to.

    Attributes:
        url: Where to.
        headers: Of each request.
        http1: HTTP/1.1, a connection for each request in flight; else one connection of HTTP/2.
        least_bytes: Fewest bytes that a right answer to one text has; an error has fewer.
    """

    url: str
    headers: tuple[str, ...]
    http1: bool = False
    least_bytes: int = 0


def encoder(port: int, least_bytes: int = 0) -> Target:
    """Give the Encode method of a server on this machine."""
    return Target(f"http://127.0.0.1:{port}{ENCODE}", GRPC, least_bytes=least_bytes)


def send(target: Target, in_flight: int, requests: int, body: Path, texts: int = 1) -> float:
    """Send one request again and again with h2load; gives requests a second.

    Args:
        target: Where to.
        in_flight: Requests at one time.
        requests: Requests in all.
        body: A file with what is sent.
        texts: Texts in each request.
    """
    return _h2load(target, in_flight, requests, body, texts)


def spent(target: Target, requests: int, body: Path) -> list[float]:
    """Send one request after another with h2load; gives the seconds of each."""
    with tempfile.NamedTemporaryFile() as log:
        _h2load(target, 1, requests, body, 1, f"--log-file={log.name}")
        lines = Path(log.name).read_text("ascii").splitlines()
    return [int(line.split()[2]) / 1e6 for line in lines]  # start, status, microseconds


def _h2load(target: Target, in_flight: int, requests: int, body: Path, texts: int, *words: str) -> float:
    each = ["--h1", "-c", str(in_flight)] if target.http1 else ["-c", "1", "-m", str(in_flight)]
    command = ["h2load", "-n", str(requests), *each, "-d", str(body), *words]
    for header in target.headers:
        command += ["-H", header]
    printed = subprocess.run([*command, target.url], check=True, capture_output=True, text=True).stdout
    rate = re.search(r"([\d.]+) req/s", printed)
    done = re.search(r"(\d+) 2xx", printed)
    data = re.search(r"\((\d+)\) data", printed)
    if rate is None or done is None or int(done[1]) != requests:
        sys.exit(f"h2load could not finish its requests:\n{printed}")
    if data is None or int(data[1]) < requests * texts * target.least_bytes:
        sys.exit(f"some answers are too short to be right, so some requests failed:\n{printed}")
    return float(rate[1])


def load(port: int, in_flight: int, requests: int, body: Path) -> tuple[float, float]:
    """Send requests to a server with h2load; gives requests a second and the mean seconds of one."""
    rate = send(encoder(port), in_flight, requests, body)
    return rate, in_flight / rate


def latencies(port: int, count: int) -> list[float]:
    """Send one request after another from Python; gives the seconds of each."""
    seconds = []
    with Client(f"127.0.0.1:{port}") as client:
        for _ in range(count):
            started = time.perf_counter()
            client.encode(TEXT)
            seconds.append(time.perf_counter() - started)
    return seconds


def timed(session: Session, batch: Batch, runs: int) -> list[float]:
    """Run a batch again and again; gives the seconds of each run."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        session.run(batch, alone=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def bare(session: Session, artifact: Artifact, rows: int, runs: int) -> list[float]:
    """Run the bare session on one batch again and again, its rows of `TOKENS` tokens; gives the seconds of each run."""
    return timed(session, equal_rows(artifact, rows), runs)


def equal_rows(artifact: Artifact, rows: int) -> Batch:
    """Make a batch of random rows of `TOKENS` tokens."""
    ids = np.random.default_rng(0).integers(1000, artifact.vocab_size, (rows, TOKENS))
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    return Batch((f"pooled_{artifact.pooling}",), (TOKENS,) * rows, ids, ones, zeros, ones)


def packed(artifact: Artifact, texts: list[str], rows: int) -> list[Batch]:
    """Tokenize texts, sort them by length and lay them into batches padded to their longest and no further.

    That is the best packing that is known (measured on two cores: batches of 8 and 16 beat larger ones), and
    no server can have it, for it needs all texts before the first run.
    """
    sequences = TextTokenizer(artifact).tokenize(encode_request(texts), describe=False)
    ordered = sorted(sequences, key=lambda sequence: sequence.length)
    limits = BatchLimits(max_batch_tokens=2**31, max_length=artifact.max_tokens)
    groups = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
    return [pad(group, (f"pooled_{artifact.pooling}",), artifact.pad_token_id, limits) for group in groups]


def one_by_one(session: Session, batches: list[Batch]) -> float:
    """Run batches one after another, each on all threads; gives texts a second."""
    started = time.perf_counter()
    for batch in batches:
        session.run(batch, alone=True)
    return sum(len(batch.lengths) for batch in batches) / (time.perf_counter() - started)


def side_by_side(session: Session, batches: list[Batch]) -> float:
    """Run batches on the session's streams, the largest first; gives texts a second."""
    with ThreadPoolExecutor(session.streams) as pool:
        list(pool.map(session.run, batches[-session.streams :]))  # the threads are there
        started = time.perf_counter()
        list(pool.map(session.run, batches[::-1]))
    return sum(len(batch.lengths) for batch in batches) / (time.perf_counter() - started)


def vectors(port: int, texts: list[str]) -> NDArray[np.floating]:
    """Ask a server for pooled vectors (texts, dim), many texts a request."""
    with Client(f"127.0.0.1:{port}") as client:
        answers = [client.encode(group).pooled for group in in_groups(texts, 32)]
    return np.concatenate([answer for answer in answers if answer is not None])
