"""Kill replicas under load and count what the clients notice.

    python loadtests/kills.py [--replicas 2] [--clients 32] [--seconds 120] [--every 10] [--victim replica]

Starts a server on Ray, learns the right answer to each of some texts, then lets clients ask for them one after
another while a replica's process is killed (SIGKILL) every so many seconds; with `--victim gateway` it is the
gateway itself, which is started anew at once on the cluster that outlives it. Prints one table in Markdown.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from harness import exported

import attencode

WORDS = "time flies like an arrow fruit banana the old man was sleepy attention is all you need".split()
DEADLINE_S = 30.0
RAY_PORT = 50180


class Service:
    """A server on Ray: this process's child, or, for gateways that die, one of a cluster that stays."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Store the command line."""
        self._gateway_dies = arguments.victim == "gateway"
        self._command = [sys.executable, "-m", "service", "serve", str(arguments.artifact), "--ray"]
        self._command += ["--replicas", str(arguments.replicas), "--port", str(arguments.port)]
        self._command += [
            "--metrics-port",
            "none",
            *(["--address", f"127.0.0.1:{RAY_PORT}"] if self._gateway_dies else []),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._head: psutil.Popen | None = None

    def start(self) -> None:
        """Start the cluster, if it is to outlive gateways, and a gateway."""
        if self._gateway_dies:
            line = [_ray(), "start", "--head", "--block", "--include-dashboard=false", f"--port={RAY_PORT}"]
            self._head = psutil.Popen([*line, "--min-worker-port=0", "--max-worker-port=0"], stdout=sys.stderr)
            time.sleep(10)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Start a gateway and wait until it is ready."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout else ""
        print(line.strip(), file=sys.stderr)
        if "ready after" not in line:
            sys.exit("the server did not start")

    def kill(self, victim: str) -> None:
        """Kill a replica, or the gateway and start it anew."""
        if victim == "gateway" and self._process is not None:
            self._process.kill()
            self._process.wait()
            self.start_gateway()
            return
        if self._process is not None and (replicas := replicas_of(self._process.pid)):
            os.kill(random.choice(replicas).pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop what was started."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=90)
        if self._head is not None:
            for process in [self._head, *self._head.children(recursive=True)]:
                process.terminate()
            self._head.wait()


def _ray() -> str:
    return str(Path(sys.executable).with_name("ray"))


def replicas_of(pid: int) -> list[psutil.Process]:
    """List the replicas that a server's own cluster runs."""
    return [process for process in psutil.Process(pid).children(recursive=True) if _is_replica(process)]


def _is_replica(process: psutil.Process) -> bool:
    words = process.cmdline()
    return bool(words) and "ServeReplica:attencode-" in words[0]


async def client(arguments: argparse.Namespace, texts: dict[str, np.ndarray], end_s: float, seen: list) -> None:
    """Ask for texts until the end; notes each call's seconds and outcome."""
    draw = random.Random(len(seen))
    address = f"127.0.0.1:{arguments.port}"
    async with attencode.AsyncClient(address, timeout_s=DEADLINE_S, wait_for_ready=True) as asker:
        while time.monotonic() < end_s:
            text = draw.choice(list(texts))
            started = time.monotonic()
            try:
                answer = await asker.encode(text)
                right = np.allclose(answer.pooled, texts[text], atol=1e-5)
                outcome = "right" if right else "WRONG"
            except attencode.AttencodeError as error:
                outcome = f"failed: {type(error).__name__}: {error}"
            seen.append((time.monotonic() - started, outcome))


async def run(arguments: argparse.Namespace, service: Service) -> tuple[list[tuple[float, str]], int]:
    """Run the clients and the killings side by side."""
    draw = random.Random(0)
    chosen = {" ".join(draw.choices(WORDS, k=draw.choice((1, 3, 8, 20)))) for _ in range(40)}
    async with attencode.AsyncClient(f"127.0.0.1:{arguments.port}") as asker:
        texts = {text: (await asker.encode(text)).pooled for text in sorted(chosen)}
    seen: list[tuple[float, str]] = []
    end_s = time.monotonic() + arguments.seconds
    clients = [asyncio.create_task(client(arguments, texts, end_s, seen)) for _ in range(arguments.clients)]
    kills = 0
    while time.monotonic() + arguments.every < end_s:
        await asyncio.sleep(arguments.every)
        await asyncio.to_thread(service.kill, arguments.victim)
        kills += 1
    await asyncio.gather(*clients)
    return seen, kills


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="exported from the default model if unset")
    parser.add_argument("--replicas", default="2")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--victim", choices=("replica", "gateway"), default="replica")
    parser.add_argument("--port", type=int, default=50171)
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    service = Service(arguments)
    service.start()
    try:
        seen, kills = asyncio.run(run(arguments, service))
    finally:
        service.stop()
    outcomes = Counter(outcome for _, outcome in seen)
    seconds = sorted(spent for spent, _ in seen)
    quantiles = statistics.quantiles(seconds, n=1000)
    print("| replicas | killed | calls | right | wrong or failed | p50 ms | p99 ms | p99.9 ms | slowest s |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {arguments.replicas} | {kills} {arguments.victim} | {len(seen)} | {outcomes['right']} "
        f"| {len(seen) - outcomes['right']} | {1e3 * quantiles[499]:.0f} | {1e3 * quantiles[989]:.0f} "
        f"| {1e3 * quantiles[998]:.0f} | {seconds[-1]:.1f} |"
    )
    for outcome, count in outcomes.most_common():
        if outcome != "right":
            print(f"{count} {outcome}", file=sys.stderr)
    sys.exit(outcomes["right"] != len(seen))


if __name__ == "__main__":
    main()
