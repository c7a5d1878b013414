"""Measure what growth costs: tokens a second by length and by batch, latency by the number of clients.

    python loadtests/growth.py [--artifact FOLDER] [--provider auto] [--precision auto] [--output loadtests]

Draws `growth_tokens.png` (the bare session on batches without padding) and `growth_clients.png` (clients with a
connection of their own, each asking for one short text after another), and prints both as Markdown. Needs
matplotlib (attencode[viz]).
"""

import asyncio
import statistics
import time
from pathlib import Path

import grpc
import numpy as np
from arguments import above_zero, errors_as_messages
from harness import command_line, exported, running_server, serve_words

from service.artifact import Artifact, open_artifact
from service.batching import Batch
from service.placement import choose_placement, usable_cores
from service.session import Session
from texts import TEXT
from wire import CHANNEL_OPTIONS, ENCODE, request_bytes

LENGTHS = (16, 32, 64, 128, 256, 512)
ROWS = (1, 2, 4, 8, 16, 32, 64)
CLIENTS = (1, 3, 10, 30, 100, 300, 1000)
_MOST_TOKENS = 16_384


def tokens_a_second(session: Session, artifact: Artifact, rows: int, length: int, seconds: float) -> float:
    """Measure one shape of batch, without padding, for about so many seconds; gives the median's rate."""
    ids = np.random.default_rng(0).integers(1000, artifact.vocab_size, (rows, length))
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    batch = Batch((f"pooled_{artifact.pooling}",), (length,) * rows, ids, ones, zeros, ones)
    session.run(batch, alone=True)  # compiles the shape
    runs: list[float] = []
    while sum(runs) < seconds or len(runs) < 3:
        started = time.perf_counter()
        session.run(batch, alone=True)
        runs.append(time.perf_counter() - started)
    return rows * length / statistics.median(runs)


async def clients(port: int, count: int, seconds: float) -> tuple[list[float], float]:
    """Let so many clients ask one after another, each over its own connection; gives each call's seconds, and all's."""
    message = request_bytes([TEXT])
    took: list[float] = []
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) for _ in range(count)]
    calls = [channel.unary_unary(ENCODE) for channel in channels]
    for first in range(0, count, 50):  # connect, not all at once
        await asyncio.gather(*(call(message) for call in calls[first : first + 50]))
    begun = time.perf_counter()
    end = begun + seconds

    async def ask(call: grpc.aio.UnaryUnaryMultiCallable) -> None:
        while (started := time.perf_counter()) < end:
            await call(message)
            took.append(time.perf_counter() - started)

    await asyncio.gather(*map(ask, calls))
    all_s = time.perf_counter() - begun  # longer than asked for: the last answers count too
    await asyncio.gather(*(channel.close() for channel in channels))
    return took, all_s


def draw_tokens(rates: dict[tuple[int, int], float], path: Path, title: str) -> None:
    """Draw a line for each number of rows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for rows in ROWS:
        points = [(length, rates[rows, length]) for length in LENGTHS if (rows, length) in rates]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{rows} rows")
    axes.set(xscale="log", xlabel="tokens of a row", ylabel="tokens/s", title=title)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_clients(rows: list[tuple[int, float, float, float]], path: Path, title: str) -> None:
    """Draw median and 99th percentile over the number of clients, and the rate beside them."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    counts = [row[0] for row in rows]
    for place, name in ((2, "p50"), (3, "p99")):
        axes.plot(counts, [1e3 * row[place] for row in rows], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="clients, one call each in flight", ylabel="ms", title=title)
    beside = axes.twinx()
    beside.plot(counts, [row[1] for row in rows], marker="s", color="gray", label="texts/s")
    beside.set(ylabel="texts/s", ylim=(0, None))
    figure.legend(loc="upper left", bbox_to_anchor=(0.12, 0.88))
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """Measure both and print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=8.0, help="for each number of clients")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.artifact = exported(arguments.artifact)
    artifact = open_artifact(arguments.artifact)
    placement = choose_placement(arguments.provider, arguments.precision, artifact)
    title = f"{artifact.model_id.rpartition('/')[2]}, {placement.device}, {usable_cores()} cores"

    session = Session(artifact, placement, threads=usable_cores())
    rates = {
        (rows, length): tokens_a_second(session, artifact, rows, length, arguments.seconds / 16)
        for rows in ROWS
        for length in LENGTHS
        if rows * length <= _MOST_TOKENS and length <= artifact.max_tokens
    }
    draw_tokens(rates, arguments.output / "growth_tokens.png", title)
    print("| rows \\ tokens | " + " | ".join(map(str, LENGTHS)) + " |")
    print("|---" * (len(LENGTHS) + 1) + "|")
    for rows in ROWS:
        cells = [f"{rates[rows, length] / 1e3:.1f}k" if (rows, length) in rates else "" for length in LENGTHS]
        print(f"| {rows} | " + " | ".join(cells) + " |")

    table = []
    with running_server(*serve_words(arguments)) as (port, _):
        asyncio.run(clients(port, 8, 2.0))  # warms up
        for count in CLIENTS:
            took, all_s = asyncio.run(clients(port, count, arguments.seconds))
            middle, high = np.quantile(took, [0.5, 0.99])
            table.append((count, len(took) / all_s, float(middle), float(high)))
    draw_clients(table, arguments.output / "growth_clients.png", title)
    print("\n| clients | texts/s | p50 ms | p99 ms |")
    print("|---|---|---|---|")
    for count, rate, middle, high in table:
        print(f"| {count} | {rate:.0f} | {1e3 * middle:.1f} | {1e3 * high:.1f} |")


if __name__ == "__main__":
    with errors_as_messages():
        main()
