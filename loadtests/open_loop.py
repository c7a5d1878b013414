"""Offer requests at a rate of their own, whatever the server does: an open loop, as independent callers are.

    python loadtests/open_loop.py [--address 127.0.0.1:50051] --rate 500 [--seconds 10] [--texts single]
    python loadtests/open_loop.py --sweep          # 0.5 to 2 times the rate that saturates the server

Arrivals are a Poisson process, drawn with a seed. A request's latency counts from the moment when it should
have been sent: a client that falls behind, or a server that makes it wait, cannot hide that (the omission of
just the slow ones that closed loops are guilty of). How late the client itself was is printed too: where that
is no longer small beside the latencies, the client is the limit. Prints one table in Markdown.
May import: arguments, texts, wire, closed_loop, grpc, numpy.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import grpc
import numpy as np

from arguments import above_zero, errors_as_messages, one_or_more
from closed_loop import Channels, run, saturation
from texts import TEXT, bulk_texts, in_groups, mixed_texts
from wire import request_bytes

SWEEP = (0.5, 0.8, 1.0, 1.5, 2.0)
REFUSED = "RESOURCE_EXHAUSTED"
HEADER = (
    "| offered /s | goodput /s | p50 ms | p90 ms | p99 ms | p99.9 ms | refused | refusal p50 ms | refusal p99 ms "
    "| other failures | sent late p99 ms |"
)


@dataclass
class Outcome:
    """What became of the requests of one run.

    Attributes:
        offered: Requests a second that were offered.
        goodput: Requests a second that were answered, from the first one's arrival to the last answer.
        answered_s: Seconds of each answer, from the scheduled arrival on.
        refused_s: The same of each refusal.
        statuses: How often each gRPC status came.
        late_s: How late the client itself sent each request.
    """

    offered: float = 0.0
    goodput: float = 0.0
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    late_s: list[float] = field(default_factory=list)

    def row(self) -> str:
        """Give the outcome as a row of the table."""
        failures = {name: n for name, n in self.statuses.items() if name not in ("OK", REFUSED)}
        cells = [f"{self.offered:.0f}", f"{self.goodput:.0f}"]
        cells += [_ms(self.answered_s, share) for share in (50, 90, 99, 99.9)]
        cells += [str(len(self.refused_s)), _ms(self.refused_s, 50), _ms(self.refused_s, 99)]
        cells += [", ".join(f"{n} {name}" for name, n in failures.items()) or "0", _ms(self.late_s, 99)]
        return f"| {' | '.join(cells)} |"


def _ms(seconds: list[float], percent: float) -> str:
    return f"{1e3 * np.percentile(seconds, percent):.1f}" if seconds else ""


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw the arrivals of a Poisson process, in seconds from its start."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1 / rate, int(rate * seconds * 1.2) + 100)
    moments = np.cumsum(gaps)
    return [float(moment) for moment in moments[moments < seconds]]


async def offer(
    address: str,
    bodies: list[bytes],
    rate: float,
    *,
    seconds: float,
    channels: int = 4,
    timeout_s: float = 10.0,
    seed: int = 0,
) -> Outcome:
    """Offer requests at a rate and wait for all their answers.

    Args:
        address: Host and port.
        bodies: Messages to send in turn.
        rate: Requests a second.
        seconds: For how long requests arrive.
        channels: Connections, used in turn.
        timeout_s: Deadline of each request, from when it is sent.
        seed: Of the arrivals.
    """
    outcome = Outcome()
    last_answer = 0.0
    running: set[asyncio.Task[None]] = set()

    async def request(encode: Any, body: bytes, due: float) -> None:
        nonlocal last_answer
        outcome.late_s.append(time.perf_counter() - due)
        try:
            await encode(body, timeout=timeout_s)
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        now = time.perf_counter()
        outcome.statuses[status] += 1
        if status == "OK":
            outcome.answered_s.append(now - due)
            last_answer = now
        elif status == REFUSED:
            outcome.refused_s.append(now - due)

    moments = arrivals(rate, seconds, seed)
    async with Channels(address, channels) as methods:
        start = time.perf_counter()
        for moment, encode, body in zip(moments, cycle(methods), cycle(bodies), strict=False):
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            task = asyncio.create_task(request(encode, body, start + moment))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    outcome.offered = len(moments) / seconds
    outcome.goodput = len(outcome.answered_s) / max(seconds, last_answer - start)
    return outcome


def bodies_of(kind: str) -> list[bytes]:
    """Prepare the messages of a kind of texts: `single`, `bulk` (32 a request) or `mixed`."""
    if kind == "bulk":
        return [request_bytes(group) for group in in_groups(bulk_texts(512), 32)]
    if kind == "mixed":
        return [request_bytes([text]) for text in mixed_texts(1000)]
    return [request_bytes([TEXT])]


async def sweep(arguments: argparse.Namespace, bodies: list[bytes]) -> None:
    """Find the rate that saturates the server, and offer shares and multiples of it."""
    closed = {"in_flight": arguments.in_flight, "channels": arguments.channels}
    await saturation(arguments.address, bodies, seconds=1.0, **closed)  # warms up
    most = await saturation(arguments.address, bodies, seconds=arguments.seconds, **closed)
    print(f"closed loop, {arguments.in_flight} in flight: {most:.0f} requests/s\n")
    print(f"| of saturation {HEADER}\n{'|---' * (HEADER.count('|'))}|")
    for share in SWEEP:
        outcome = await _offered(arguments, bodies, share * most)
        print(f"| {share} {outcome.row()}", flush=True)


async def _offered(arguments: argparse.Namespace, bodies: list[bytes], rate: float) -> Outcome:
    return await offer(
        arguments.address,
        bodies,
        rate,
        seconds=arguments.seconds,
        channels=arguments.channels,
        timeout_s=arguments.timeout_s,
        seed=arguments.seed,
    )


def main() -> None:
    """Offer one rate, or sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--rate", type=above_zero, help="requests a second")
    parser.add_argument("--sweep", action="store_true", help="measure the saturation rate first, offer 0.5 to 2 of it")
    parser.add_argument("--seconds", type=above_zero, default=10.0, help="of each rate")
    parser.add_argument("--texts", choices=("single", "bulk", "mixed"), default="single")
    parser.add_argument("--in-flight", type=one_or_more, default=64, help="of the closed loop that finds saturation")
    parser.add_argument("--channels", type=one_or_more, default=4)
    parser.add_argument("--timeout-s", type=above_zero, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.sweep == (arguments.rate is not None):
        sys.exit("give either --rate or --sweep")
    bodies = bodies_of(arguments.texts)
    if arguments.sweep:
        run(sweep(arguments, bodies))
        return
    outcome = run(_offered(arguments, bodies, arguments.rate))
    print(f"{HEADER}\n{'|---' * (HEADER.count('|') - 1)}|\n{outcome.row()}")


if __name__ == "__main__":
    with errors_as_messages():
        main()
