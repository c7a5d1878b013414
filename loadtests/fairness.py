"""Measure what small callers notice of a bulk client: their latencies alone, and beside 10,000 texts of another.

    python loadtests/fairness.py [--artifact FOLDER] [--small 8] [--bulk-in-flight 8]

The small callers have a connection each and ask for one short text after another, resting between two; the bulk client
sends 10,000 texts of 8 to 120 words, 32 a request, over a connection and from a process of its own. Both share the
machine with the server.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Awaitable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import grpc
import numpy as np

from arguments import above_zero, one_or_more
from harness import command_line, exported, running_server, serve_words
from texts import bulk_texts, in_groups, short_texts
from wire import CHANNEL_OPTIONS, ENCODE, request_bytes

TEXTS = 10_000
IN_REQUEST = 32


async def small(port: int, callers: int, rest_s: float, until: asyncio.Event) -> list[float]:
    """Let small callers ask until told to end; gives each call's seconds."""
    took: list[float] = []

    async def ask(text: str) -> None:
        message = request_bytes([text])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary(ENCODE)
            await call(message)
            while not until.is_set():
                started = time.perf_counter()
                await call(message)
                took.append(time.perf_counter() - started)
                await asyncio.sleep(rest_s)

    await asyncio.gather(*map(ask, short_texts(callers)))
    return took


async def bulk(port: int, in_flight: int) -> float:
    """Send all texts, so many requests in flight; gives texts a second."""
    bodies = iter([request_bytes(group) for group in in_groups(bulk_texts(TEXTS), IN_REQUEST)])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(ENCODE)
        started = time.perf_counter()

        async def send() -> None:
            for body in bodies:
                await call(body)

        await asyncio.gather(*(send() for _ in range(in_flight)))
        return TEXTS / (time.perf_counter() - started)


def _bulk_process(port: int, in_flight: int) -> float:
    return asyncio.run(bulk(port, in_flight))


async def measure(port: int, arguments: argparse.Namespace) -> None:
    """Measure alone, then beside the bulk client, and print both."""

    async def small_for(work: Awaitable[Any]) -> tuple[list[float], Any]:
        over = asyncio.Event()
        callers = asyncio.create_task(small(port, arguments.small, arguments.rest_ms / 1e3, over))
        result = await work
        over.set()
        return await callers, result

    print("| small callers | calls | p50 ms | p90 ms | p99 ms | bulk texts/s |")
    print("|---|---|---|---|---|---|")
    alone, _ = await small_for(asyncio.sleep(arguments.seconds))
    context = multiprocessing.get_context("spawn")  # a fork would take gRPC's threads along
    with ProcessPoolExecutor(1, context) as pool:
        work = asyncio.get_running_loop().run_in_executor(pool, _bulk_process, port, arguments.bulk_in_flight)
        beside, rate = await small_for(work)
    for name, took, texts in (("alone", alone, ""), ("beside bulk", beside, f"{rate:.0f}")):
        p50, p90, p99 = 1e3 * np.quantile(took, [0.5, 0.9, 0.99])
        print(f"| {name} | {len(took)} | {p50:.1f} | {p90:.1f} | {p99:.1f} | {texts} |")


def main() -> None:
    """Start a server and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--small", type=one_or_more, default=8, help="callers of one text")
    parser.add_argument("--rest-ms", type=float, default=0.0, help="of a small caller between two calls")
    parser.add_argument("--bulk-in-flight", type=one_or_more, default=8, help="requests")
    parser.add_argument("--seconds", type=above_zero, default=8.0, help="for the small callers alone")
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    with running_server(*serve_words(arguments)) as (port, _):
        asyncio.run(measure(port, arguments))


if __name__ == "__main__":
    main()
