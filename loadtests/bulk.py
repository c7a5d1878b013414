"""Encode a file of short lines in bulk, once without a break, once killed at a random point and resumed; compare.

    python loadtests/bulk.py [--artifact FOLDER] [--lines 100000] [--kills 1] [--precision float32]

Both runs are `attencode encode --input FILE --output FILE.npy` in a process of its own, against one server that does
nothing else. The resident memory of client and server is read throughout. The run that is killed gets SIGKILL once a
share of its rows is there that the seed draws, and is then started anew with --resume. Printed are the speed, the
memory, and in how many rows the two outputs differ, by how much at most. With --again there is a further run without a
break, which shows how far two of these differ: what a kill is to blame for is only what goes beyond that.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arguments import one_or_more
from harness import command_line, exported, running_server, serve_words
from service.client import Client
from streaming import Watch
from texts import WORDS


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command, or several of which the last one ended well.

    Attributes:
        seconds: All of them together.
        killed_at: Rows that were there at each kill.
        client_bytes: Resident memory of the client at its peak.
        server_bytes: Of the server at its peak.
        server_before: Of the server before.
    """

    seconds: float
    killed_at: list[int]
    client_bytes: int
    server_bytes: int
    server_before: int


def write_lines(path: Path, lines: int, seed: int) -> None:
    """Write lines of 3 to 12 words, each drawn with the seed."""
    draw = random.Random(seed)
    with path.open("w") as file:
        file.writelines(" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + "\n" for _ in range(lines))


def encoded(words: list[str], output: Path, row_bytes: int, kill_at: list[int], pid: int) -> Run:
    """Encode a file.

    Args:
        words: Of the command, beside the output.
        output: Where to.
        row_bytes: Bytes of a row.
        kill_at: The run is killed when so many rows are there, and goes on, for each number.
        pid: Of the server.
    """
    command = [sys.executable, "-m", "service", "encode", *words, "--output", str(output), "--resume"]
    partial = output.with_name(output.name + ".partial")
    started, client_bytes, killed = time.perf_counter(), 0, []
    with Watch(pid, every_s=0.1) as server:
        for rows in [*kill_at, None]:
            with subprocess.Popen(command) as process, Watch(process.pid, every_s=0.1) as client:
                while process.poll() is None:
                    time.sleep(0.02)
                    there = partial.stat().st_size // row_bytes if partial.exists() else 0
                    if rows is not None and there >= rows:
                        process.send_signal(signal.SIGKILL)
                        killed.append(there)
                        break
            client_bytes = max(client_bytes, client.peak)
            if rows is None and process.returncode:
                sys.exit(f"attencode encode ended with status {process.returncode}")
    return Run(time.perf_counter() - started, killed, client_bytes, server.peak, server.before)


def compared(first: Path, second: Path) -> str:
    """Say in a cell how two outputs differ."""
    if first.read_bytes() == second.read_bytes():
        return "none: the same bytes"
    a, b = np.load(first, mmap_mode="r"), np.load(second, mmap_mode="r")
    rows, most, least_cosine = 0, 0.0, 1.0
    for start in range(0, len(a), 2**16):
        x, y = a[start : start + 2**16], b[start : start + 2**16]
        differ = (x != y).any(axis=1)
        if differ.any():
            rows += int(differ.sum())
            most = max(most, float(np.abs(x - y).max()))
            norms = np.linalg.norm(x[differ], axis=1) * np.linalg.norm(y[differ], axis=1)
            least_cosine = min(least_cosine, float(((x[differ] * y[differ]).sum(axis=1) / norms).min()))
    return f"{rows:,} ({rows / len(a):.2%}), by at most {most:.1e}, cosine at least {least_cosine:.6f}"


def measure(port: int, pid: int, folder: Path, arguments: argparse.Namespace) -> None:
    """Run it without a break and with kills, and print a table."""
    source, whole = folder / "lines.txt", folder / "whole.npy"
    write_lines(source, arguments.lines, arguments.seed)
    draw = random.Random(arguments.seed)
    words = ["--input", str(source), f"--address=127.0.0.1:{port}", "--in-flight", str(arguments.in_flight)]
    with Client(f"127.0.0.1:{port}") as client:
        row_bytes = 4 * client.get_model().pooled_size
    print("| run | killed at row | texts/s | client's MB, at most | server's MB before | at most | rows that differ |")
    print("|---|---|---|---|---|---|---|", flush=True)
    runs = [("without a break", whole, [])]
    runs += [("again", folder / "again.npy", [])] * arguments.again
    kills = sorted(int(draw.uniform(0.1, 0.9) * arguments.lines) for _ in range(arguments.kills))
    runs += [("killed and resumed", folder / "resumed.npy", kills)]
    for name, output, kill_at in runs:
        run = encoded(words, output, row_bytes, kill_at, pid)
        difference = "" if output == whole else compared(whole, output)
        killed = ", ".join(f"{rows:,}" for rows in run.killed_at)
        memory = f"{run.client_bytes / 1e6:.0f} | {run.server_before / 1e6:.0f} | {run.server_bytes / 1e6:.0f}"
        print(f"| {name} | {killed} | {arguments.lines / run.seconds:.0f} | {memory} | {difference} |", flush=True)


def main() -> None:
    """Start a server and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--lines", type=one_or_more, default=100_000)
    parser.add_argument("--kills", type=one_or_more, default=1)
    parser.add_argument("--in-flight", type=one_or_more, default=8, help="requests, as the command has it")
    parser.add_argument("--again", action="store_true", help="a second run without a break")
    parser.add_argument("--seed", type=int, default=0, help="of the lines and of the kills")
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    with tempfile.TemporaryDirectory() as folder, running_server(*serve_words(arguments)) as (port, pid):
        measure(port, pid, Path(folder), arguments)


if __name__ == "__main__":
    main()
