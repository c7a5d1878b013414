"""Peers: other ways to get the same vectors, each in a virtual environment of its own, for the benchmark.

    python loadtests/peers.py install        # into loadtests/.venv-peers, about 3 GB with torch's CPU build
    python loadtests/peers.py check          # one small round of each

* sentence-transformers: `encode` called in a loop, no server at all.
* Infinity (infinity-emb): its HTTP server with the torch engine, asked by h2load over HTTP/1.1.

Both run float32 on the server's kind of device with the very checkpoint that the artifact comes from. A peer that
is not installed is said to be so, and has no numbers. May import: contenders, harness, texts, model.hub.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contenders import SINGLE_IN_FLIGHT, Contender, Effort, bulk_groups, send_bulk
from harness import MODEL, Target, body_file, send, spent
from model.hub import locate
from texts import TEXT

ENVIRONMENTS = Path(__file__).with_name(".venv-peers")
TORCH = "torch==2.13.0"  # first and by itself, so that pip takes the build that is for this machine
# Versions that were tried together, as pip chose them within what infinity-emb itself allows (click below 8.2, typer
# below 0.13, sentence-transformers below 4 and with it transformers below 5). Its torch engine needs no optimum.
PINS: Mapping[str, tuple[str, ...]] = {
    "sentence-transformers": ("sentence-transformers==6.2.0", "transformers==5.24.0"),
    "infinity": (
        "infinity-emb[server,torch]==0.0.78",
        "sentence-transformers==3.4.1",
        "transformers==4.57.6",
        "typer==0.12.5",
        "click==8.1.8",
        "fastapi==0.165.0",
        "starlette==1.10.0",
        "uvicorn==0.32.1",
        "prometheus-fastapi-instrumentator==8.1.0",
        "numpy==1.26.4",
    ),
}
READY_S = 120.0
DIM = 384  # of MODEL's vectors
QUIET = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


class PeerFailed(Exception):
    """Report a peer that is installed and does not run."""


def executable(peer: str, command: str) -> Path | None:
    """Give a command of a peer's environment; None if the peer is not installed."""
    path = ENVIRONMENTS / peer / "bin" / command
    return path if (ENVIRONMENTS / peer / ".installed").is_file() and path.is_file() else None


def installed(peer: str) -> bool:
    """Make a peer's environment anew; False if pip could not, and said why on stderr."""
    folder = ENVIRONMENTS / peer
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for words in ((TORCH,), (TORCH, *PINS[peer])):
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, *words], check=False).returncode:
            print(f"{peer} could not be installed", file=sys.stderr)
            return False
    (folder / ".installed").write_text("\n".join((TORCH, *PINS[peer])) + "\n", "utf-8")
    return True


class SentenceTransformers:
    """sentence-transformers in a process of its own; it has one call at a time, so nothing is ever in flight."""

    name = "sentence-transformers"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Keep the child, which runs `peer_loop.py`."""
        self._process = process

    def single(self, effort: Effort) -> float:
        """Measure single texts one by one, as a loop that calls `encode` for each does."""
        seconds = self._encode([[TEXT]], max(10, effort.singles // 10))[0]
        return len(seconds) / sum(seconds)

    def latency(self, effort: Effort) -> float:
        """Measure single texts one by one."""
        return float(np.median(self._encode([[TEXT]], effort.latencies)[0]))

    def bulk(self, effort: Effort) -> float:
        """Measure calls with many texts, which it sorts by length itself."""
        groups = bulk_groups()
        seconds = self._encode(groups, max(1, effort.bulks // 4 // len(groups)))[0]
        return len(seconds) * len(groups[0]) / sum(seconds)

    def vectors(self, texts: list[str]) -> NDArray[np.floating]:
        """Encode them."""
        return np.array(self._encode([texts], 1, vectors=True)[1])

    def _encode(
        self, groups: list[list[str]], times: int, *, vectors: bool = False
    ) -> tuple[list[float], list[list[float]]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = json.dumps({"groups": groups, "times": times, "vectors": vectors})
        try:
            print(order, file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerFailed(f"{self.name} ended with exit status {self._process.wait()}") from error
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.name} ended with exit status {self._process.wait()}")
        answer = json.loads(line)
        return answer["seconds"], answer["vectors"]


class Infinity:
    """Infinity's HTTP server on a port of this machine."""

    name = "infinity"

    def __init__(self, port: int, stack: ExitStack) -> None:
        """Write the requests to files, which live as long as the stack."""
        self._url = f"http://127.0.0.1:{port}/embeddings"
        # JSON: no number of a vector is shorter than five characters with its comma, but for rare zeros.
        self._target = Target(self._url, ("content-type: application/json",), http1=True, least_bytes=5 * DIM)
        self._single = stack.enter_context(body_file(self._body([TEXT])))
        self._bulks = [stack.enter_context(body_file(self._body(group))) for group in bulk_groups()]

    def single(self, effort: Effort) -> float:
        """Measure single texts with h2load, a connection for each in flight."""
        return send(self._target, SINGLE_IN_FLIGHT, max(SINGLE_IN_FLIGHT, effort.singles // 4), self._single)

    def latency(self, effort: Effort) -> float:
        """Measure one in flight, as h2load saw it."""
        return float(np.median(spent(self._target, effort.latencies, self._single)))

    def bulk(self, effort: Effort) -> float:
        """Measure bulk requests with h2load."""
        return send_bulk(self._target, effort, self._bulks)

    def vectors(self, texts: list[str]) -> NDArray[np.floating]:
        """Ask once."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url, self._body(texts), headers)  # noqa: S310 - our own child's
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            items = sorted(json.load(answer)["data"], key=lambda item: item["index"])
        return np.array([item["embedding"] for item in items])

    def _body(self, texts: list[str]) -> bytes:
        return json.dumps({"model": "peer", "input": texts}).encode()


@contextmanager
def sentence_transformers(provider: str = "cpu") -> Iterator[Contender | None]:
    """Start the loop on the server's kind of device; None if it is not installed."""
    python = executable("sentence-transformers", "python")
    if python is None:
        yield None
        return
    loop = str(Path(__file__).with_name("peer_loop.py"))
    command = [str(python), loop, str(locate(MODEL).folder), _device(provider)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=_environment(), **pipes) as process:  # type: ignore[call-overload]
        try:
            yield SentenceTransformers(process)
        finally:
            _end(process)


@contextmanager
def infinity(provider: str = "cpu") -> Iterator[Contender | None]:
    """Start the server on our server's kind of device and wait until it answers; None if it is not installed.

    Raises:
        PeerFailed: It ended, or was not ready in time.
    """
    command = executable("infinity", "infinity_emb")
    if command is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = ["--model-id", str(locate(MODEL).folder), "--served-model-name", "peer"]
    engine = ["--engine", "torch", "--device", _device(provider), "--dtype", "float32"]
    engine += ["--no-bettertransformer", "--no-compile"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    words = [str(command), "v2", *model, *engine, *place]
    with ExitStack() as stack:
        process = subprocess.Popen(words, stdout=sys.stderr, env=_environment())
        stack.callback(_end, process)
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health")
        yield Infinity(port, stack)


def _device(provider: str) -> str:
    """Name in torch's words what our server's provider computes on."""
    return "cuda" if provider == "cuda" else "cpu"


def _environment() -> dict[str, str]:
    """Give the environment of a peer: nothing of this project's path, no telemetry, no network."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise PeerFailed(f"infinity ended with exit status {process.returncode}; see what it printed above")
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own child's
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise PeerFailed(f"infinity was not ready within {READY_S:.0f} s")


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


PEERS = {"sentence-transformers": sentence_transformers, "infinity": infinity}


def main() -> None:
    """Install the peers, or try them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("install", "check"))
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}; all if unset")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PEERS)}")
    effort = Effort().times(0.05)
    failures = 0
    for name in arguments.peers:
        if arguments.action == "install":
            print(f"installing {name}: {' '.join((TORCH, *PINS[name]))}", flush=True)
            failures += not installed(name)
            continue
        with PEERS[name]() as peer:
            if peer is None:
                print(f"{name}: not installed")
                continue
            figures = f"{peer.single(effort):.0f} single texts/s, {1e3 * peer.latency(effort):.1f} ms one at a time"
            print(f"{name}: {figures}, {peer.bulk(effort):.0f} bulk texts/s, {peer.vectors([TEXT]).shape}", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
