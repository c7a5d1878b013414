"""Measure the server against the bare session that it runs: single texts of 13 tokens.

    python loadtests/bench.py [--artifact FOLDER] [--provider auto] [--precision auto] [--rounds 5]

Server, load program and bare session share the machine and take turns in one run, so the ratios hold where
absolute numbers drift. The load program is h2load (Debian's nghttp2-client), which speaks gRPC's unary
calls and costs next to nothing itself. Prints one table in Markdown.
"""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from service.artifact import Artifact, open_artifact
from service.batching import Batch
from service.client import Client
from service.codec import encode_encode_request
from service.request import encode_request
from service.placement import choose_placement, usable_cores
from service.session import Session

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXT = "the old man sat by the river and watched the boats"  # 11 words, 13 tokens
TOKENS = 13
IN_FLIGHT = (1, 64)
REQUESTS = {1: 600, 64: 6000}


@contextmanager
def running_server(*words: str) -> Iterator[tuple[int, int]]:
    """Start `attencode serve` with these words and give its port and process id; it is drained in the end."""
    command = [sys.executable, "-m", "service", "serve", *words, "--port", "0", "--metrics-port", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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


def exported(artifact: Path | None) -> Path:
    """Give the artifact, or that of the default model, exported now."""
    if artifact is not None:
        return artifact
    folder = Path(tempfile.mkdtemp()) / "artifact"
    command = [sys.executable, "-m", "service", "export", MODEL, "-o", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


@contextmanager
def message_file(texts: list[str]) -> Iterator[Path]:
    """Write a request with gRPC's length prefix, as h2load sends it, to a file."""
    message = encode_encode_request(encode_request(texts)).SerializeToString()
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0" + len(message).to_bytes(4, "big") + message)
        body.flush()
        yield Path(body.name)


def load(port: int, in_flight: int, requests: int, body: Path) -> tuple[float, float]:
    """Send requests with h2load; gives requests a second and the mean seconds of one."""
    command = ["h2load", "-n", str(requests), "-c", "1", "-m", str(in_flight), "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{port}/attencode.v1.Encoder/Encode"
    printed = subprocess.run([*command, url], check=True, capture_output=True, text=True).stdout
    rate = re.search(r"([\d.]+) req/s", printed)
    done = re.search(r"(\d+) succeeded, (\d+) failed", printed)
    if rate is None or done is None or int(done[1]) != requests:
        sys.exit(f"h2load could not finish its requests:\n{printed}")
    return float(rate[1]), in_flight / float(rate[1])


def latencies(port: int, count: int) -> list[float]:
    """Send one request after another from Python; gives the seconds of each."""
    seconds = []
    with Client(f"127.0.0.1:{port}") as client:
        for _ in range(count):
            started = time.perf_counter()
            client.encode(TEXT)
            seconds.append(time.perf_counter() - started)
    return seconds


def bare(session: Session, artifact: Artifact, rows: int, runs: int) -> list[float]:
    """Run the bare session on batches of the same length; gives the seconds of each run."""
    ids = np.random.default_rng(0).integers(1000, artifact.vocab_size, (rows, TOKENS))
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    batch = Batch("encode", (f"pooled_{artifact.pooling}",), (TOKENS,) * rows, ids, ones, zeros, ones)
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        session.run(batch)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="exported from the default model if unset")
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs="*", default=[], help="further flags of `attencode serve`")
    arguments = parser.parse_args()
    if shutil.which("h2load") is None:
        sys.exit("h2load is not installed; on Debian: apt-get install nghttp2-client")
    arguments.artifact = exported(arguments.artifact)
    artifact = open_artifact(arguments.artifact)
    placement = choose_placement(arguments.provider, arguments.precision)
    session = Session(artifact, placement, threads=usable_cores())
    figures: dict[str, list[float]] = {name: [] for name in ("rate_1", "rate_64", "bare_1", "bare_64", "p50")}
    words = [str(arguments.artifact), "--provider", arguments.provider, "--precision", arguments.precision]
    with message_file([TEXT]) as body, running_server(*words, *arguments.serve) as (port, _):
        for number in range(arguments.rounds + 1):  # the first round warms everything up
            bare_1, bare_64 = bare(session, artifact, 1, 200), bare(session, artifact, 64, 20)
            rates = {count: load(port, count, REQUESTS[count], body)[0] for count in IN_FLIGHT}
            p50 = statistics.median(latencies(port, 300))
            if number:
                figures["bare_1"].append(statistics.median(bare_1))
                figures["bare_64"].append(64 / statistics.median(bare_64))
                figures["rate_1"].append(rates[1])
                figures["rate_64"].append(rates[64])
                figures["p50"].append(p50)
    middle = {name: statistics.median(values) for name, values in figures.items()}
    share = statistics.median(a / b for a, b in zip(figures["rate_64"], figures["bare_64"], strict=True))
    slower = statistics.median(1 / a / b for a, b in zip(figures["rate_1"], figures["bare_1"], strict=True))
    slower_p50 = statistics.median(a / b for a, b in zip(figures["p50"], figures["bare_1"], strict=True))
    print(f"{placement.provider} {placement.precision}, {usable_cores()} cores, medians of {arguments.rounds} rounds\n")
    print("| measure | server | bare session | ratio |")
    print("|---|---|---|---|")
    print(f"| texts/s, 64 in flight, h2load | {middle['rate_64']:.0f} | {middle['bare_64']:.0f} | {share:.2f} |")
    print(f"| ms, 1 in flight, h2load | {1e3 / middle['rate_1']:.2f} | {1e3 * middle['bare_1']:.2f} | {slower:.2f} |")
    print(
        f"| p50 ms, 1 in flight, Client | {1e3 * middle['p50']:.2f} | {1e3 * middle['bare_1']:.2f} | {slower_p50:.2f} |"
    )
    print(json.dumps(figures), file=sys.stderr)


if __name__ == "__main__":
    main()
