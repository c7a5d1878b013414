"""Measure what others notice of a reader that stops in the middle of large answers, and what it costs the server.

    python loadtests/slow_reader.py [--artifact FOLDER] [--clients 8] [--seconds 30]

The reader asks for all attention of many long texts over one EncodeStream, takes the first message and then nothing,
from a process of its own. The others have a connection each and send one short text after another. They are measured
alone, and from a moment after the reader stopped until its deadline ends its stream. The server's resident memory is
read throughout: before, once such an answer has been streamed and read a few times; at its peak while the reader
stands still; and after its deadline.
"""

import argparse
import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import grpc
import numpy as np

from arguments import above_zero, one_or_more
from fairness import small
from harness import command_line, exported, running_server, serve_words
from streaming import Watch
from wire import CHANNEL_OPTIONS, ENCODE_STREAM, request_bytes, stream_item

LONG = "old man by river " * 64  # 256 tokens, 18.9 MB of attention in MiniLM's 6 layers and 12 heads
ITEMS = 32
SETTLE_S = 2.0
# gRPC reads ahead as far as it reckons the connection carries; a machine's own network carries all of it.
UNHURRIED = ("grpc.http2.bdp_probe", 0)


def read_all(port: int, answers: int) -> None:
    """Ask for large answers and read them."""
    items = [stream_item(number, request_bytes([LONG], attention=True)) for number in range(answers)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        for _ in channel.stream_stream(ENCODE_STREAM)(iter(items)):
            pass


def stand_still(port: int, deadline_s: float) -> str:
    """Ask for large answers and read nothing after the first message; gives how the stream ends and after how long."""
    items = [stream_item(number, request_bytes([LONG], attention=True)) for number in range(ITEMS)]
    started = time.perf_counter()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[*CHANNEL_OPTIONS, UNHURRIED]) as channel:
        answers = channel.stream_stream(ENCODE_STREAM)(iter(items), timeout=deadline_s)
        next(answers)
        time.sleep(deadline_s)
        try:
            for _ in answers:
                pass
        except grpc.RpcError as error:
            return f"{error.code().name} after {time.perf_counter() - started:.1f} s"  # type: ignore[attr-defined]
    return "read to its end"


async def others(port: int, clients: int, seconds: float) -> list[float]:
    """Let the others ask for a while; gives each call's seconds."""
    over = asyncio.Event()
    calls = asyncio.create_task(small(port, clients, 0.0, over))
    await asyncio.sleep(seconds)
    over.set()
    return await calls


async def measure(port: int, pid: int, arguments: argparse.Namespace) -> None:
    """Measure alone, then beside the reader, and print both."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # a fork would take gRPC's threads along
        for _ in range(3):
            await loop.run_in_executor(pool, read_all, port, 8)
        await others(port, arguments.clients, SETTLE_S)
        alone = await others(port, arguments.clients, arguments.seconds)
        with Watch(pid) as watch:
            ending = loop.run_in_executor(pool, stand_still, port, arguments.seconds + 2 * SETTLE_S)
            await asyncio.sleep(SETTLE_S)
            beside = await others(port, arguments.clients, arguments.seconds)
            end = await ending
        await asyncio.sleep(SETTLE_S)
        with Watch(pid) as after:
            pass
    print("| others | calls | p50 ms | p99 ms | server's MB |")
    print("|---|---|---|---|---|")
    megabytes = f"{watch.peak / 1e6:.0f} at most, {after.before / 1e6:.0f} after its end"
    for name, took, memory in (
        ("alone", alone, f"{watch.before / 1e6:.0f}"),
        ("beside a reader that stands still", beside, megabytes),
    ):
        p50, p99 = 1e3 * np.quantile(took, [0.5, 0.99])
        print(f"| {name} | {len(took)} | {p50:.1f} | {p99:.1f} | {memory} |")
    print(f"\nThe reader's stream: {end}.")


def main() -> None:
    """Start a server and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--clients", type=one_or_more, default=8, help="of one short text after another")
    parser.add_argument("--seconds", type=above_zero, default=30.0, help="that the reader stands still, at least")
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    with running_server(*serve_words(arguments)) as (port, pid):
        asyncio.run(measure(port, pid, arguments))


if __name__ == "__main__":
    main()
