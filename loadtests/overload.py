"""Offer ten times of what a server can do over 500 connections, and see whether it keeps its promises.

    python loadtests/overload.py [--artifact FOLDER] [--times 10] [--seconds 60] [--connections 500] [--deadline-s 2]

The server has one core to itself and the clients another one, so that the server's capacity does not depend on what
the clients do. One run: a single caller's normal latency; the capacity, by 64 callers in a closed loop; then Poisson
arrivals at so many times of it, each call with a deadline, each connection used in turn; and from the last arrival on a
single caller again. Accepted is what the server counts and did not refuse with RESOURCE_EXHAUSTED. Unheard are calls
that ended before the server came to see them: a refusal has its price as well, and what is more than the server can
refuse waits within gRPC. Prints one table, and ends with 1 unless
  * the server's resident memory stayed under 1 GiB,
  * 99 % of the accepted calls were answered within their deadline,
  * the single caller's latency was normal again 2 s after the last arrival,
  * the server's counters agree with what the clients saw.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np

from arguments import above_zero, one_or_more
from frames import REFUSED, Crowd, Ended
from harness import command_line, exported, serve_words
from open_loop import arrivals
from texts import TEXT, bulk_texts
from watched import MemoryCurve, Served, served
from wire import request_bytes

MOST_BYTES = 2**30
LEAST_MET = 0.99
RECOVERED_S = 2.0
_NORMAL = 1.5  # times the median before; two runs of one quiet machine differ by a fifth
_WINDOW = 15  # calls of the single caller that must be normal in the median
_CALLERS = 64
_SETTLE_S = 1.0


@dataclass(frozen=True)
class Figures:
    """What one run showed.

    Attributes:
        capacity: Answers a second in a closed loop.
        offered: Calls a second that were due.
        ended: What the clients saw.
        goodput: Answers within their deadline a second.
        peak_bytes: The server's resident memory, at most.
        normal_s: A single caller's median before.
        recovered_s: From the last arrival until its latency was normal again; infinite if it never was.
        accepted: Calls that the server counted as anything but refused.
        astray: What the server counted other than the clients.
    """

    capacity: float
    offered: float
    ended: Ended
    goodput: float
    peak_bytes: int
    normal_s: float
    recovered_s: float
    accepted: int
    astray: list[str]

    @property
    def met(self) -> float:
        """Of the accepted calls, the share that was answered in time."""
        return len(self.ended.seconds.get("OK", ())) / max(self.accepted, 1)

    @property
    def unheard(self) -> int:
        """Calls of which the server never came to know."""
        return max(0, self.ended.calls - self.accepted - len(self.ended.seconds.get(REFUSED, ())))

    def table(self) -> str:
        """Write it as Markdown."""
        seconds = self.ended.seconds
        others = ", ".join(f"{len(took)} {status}" for status, took in seconds.items() if status not in ("OK", REFUSED))
        cells = {
            "capacity /s": f"{self.capacity:.0f}",
            "offered /s": f"{self.offered:.0f}",
            "accepted": str(self.accepted),
            "in time": f"{self.met:.2%}",
            "unheard": str(self.unheard),
            "ends but OK and refused": others or "none",
            "goodput /s": f"{self.goodput:.0f}",
            "p50 ms": _ms(seconds.get("OK"), 50),
            "p99 ms": _ms(seconds.get("OK"), 99),
            "refused": str(len(seconds.get(REFUSED, ()))),
            "refusal p50 ms": _ms(seconds.get(REFUSED), 50),
            "refusal p99 ms": _ms(seconds.get(REFUSED), 99),
            "peak MB": f"{self.peak_bytes / 1e6:.0f}",
            "normal ms": f"{1e3 * self.normal_s:.1f}",
            "normal again after s": f"{self.recovered_s:.1f}",
            "sent late p99 ms": _ms(self.ended.late_s, 99),
        }
        return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|\n| {' | '.join(cells.values())} |"

    def broken(self) -> list[str]:
        """Say which promises were not kept."""
        said = list(self.astray)
        if self.peak_bytes >= MOST_BYTES:
            said.append(
                f"resident memory reached {self.peak_bytes / 1e6:.0f} MB, expected under {MOST_BYTES / 1e6:.0f}"
            )
        if self.met < LEAST_MET:
            said.append(f"{self.met:.2%} of the accepted calls were answered in time, expected {LEAST_MET:.0%}")
        if self.recovered_s > RECOVERED_S:
            said.append(f"latency was normal {self.recovered_s:.1f} s after the load, expected within {RECOVERED_S} s")
        return said


def _ms(seconds: list[float] | None, percent: float) -> str:
    return f"{1e3 * np.percentile(seconds, percent):.1f}" if seconds else ""


def recovery(began: list[float], took: list[float], end_s: float, normal_s: float) -> float:
    """Give the seconds from `end_s` on after which a caller's latency was normal for some calls on end.

    Args:
        began: When each of its calls began.
        took: The seconds of each.
        end_s: When the load ended, on the same clock.
        normal_s: Its median without load.
    """
    for place in range(len(took) - _WINDOW + 1):
        if median(took[place : place + _WINDOW]) <= _NORMAL * normal_s:
            return max(0.0, began[place] - end_s)
    return float("inf")


def halves(after: Ended, end_s: float) -> str:
    """Write the median latency of each half second after the load."""
    parts: dict[int, list[float]] = {}
    for began, took in zip(after.began.get("OK", []), after.seconds.get("OK", []), strict=True):
        parts.setdefault(int((began - end_s) * 2), []).append(took)
    return ", ".join(f"{1e3 * median(took):.1f}" for _, took in sorted(parts.items()))


def single(port: int, seconds: float) -> Ended:
    """Let a single caller ask for a while, one call after another."""
    crowd = Crowd(port, 1, request_bytes([TEXT]), 30.0)
    crowd.closed_loop(1, seconds)
    crowd.close()
    return crowd.ended


def crowded(port: int, message: bytes, connections: int, moments: list[float], deadline_s: float) -> Ended:
    """Offer a process's part of the load."""
    crowd = Crowd(port, connections, message, deadline_s)
    crowd.offer(moments)
    crowd.close()
    print(f"the client used {1e6 * time.process_time() / max(len(moments), 1):.0f} us a call", file=sys.stderr)
    return crowd.ended


def astray(counted: dict[str, float], ended: Ended) -> list[str]:
    """Compare the server's counters with what the clients saw.

    Answers and refusals that left the server when the client's time was up are the only ones that the server has more.
    """
    late = sum(len(took) for status, took in ended.seconds.items() if status not in ("OK", REFUSED))
    said = []
    for status in ("OK", REFUSED):
        server, seen = counted.get(status, 0), len(ended.seconds.get(status, ()))
        if not seen <= server <= seen + late:
            said.append(f"the server counted {server:.0f} {status}, the clients saw {seen}, and {late} ended otherwise")
    return said


def counts(server: Served) -> Counter[str]:
    """Give how many Encode calls ended with each status."""
    found: Counter[str] = Counter()
    for (name, labels), value in server.metrics().items():
        if name == "attencode_requests_total" and ("method", "Encode") in labels:
            found[dict(labels)["code"]] += int(value)
    return found


def measure(server: Served, arguments: argparse.Namespace, processes: int) -> Figures:
    """Do the run."""
    message = request_bytes(bulk_texts(1) if arguments.texts == "passages" else [TEXT])
    single(server.port, _SETTLE_S)
    normal_s = median(single(server.port, 2.0).seconds["OK"])
    crowd = Crowd(server.port, _CALLERS, message, 30.0)
    crowd.closed_loop(_CALLERS, _SETTLE_S)
    capacity = crowd.closed_loop(_CALLERS, 5.0)
    crowd.close()
    time.sleep(_SETTLE_S)
    before = counts(server)
    rate = arguments.times * capacity
    print(f"{capacity:.0f} answers/s at most; offering {rate:.0f}/s for {arguments.seconds:g} s", file=sys.stderr)
    ended = Ended()
    with (
        MemoryCurve(server) as memory,
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
    ):
        list(pool.map(_ready, range(processes)))
        start_s = time.perf_counter() + _SETTLE_S  # one clock for all processes of a machine
        parts = []
        for number in range(processes):
            moments = [start_s + moment for moment in arrivals(rate / processes, arguments.seconds, number)]
            each = arguments.connections // processes
            parts.append(pool.submit(crowded, server.port, message, each, moments, arguments.deadline_s))
        end_s = start_s + arguments.seconds
        time.sleep(end_s - time.perf_counter())
        after = single(server.port, RECOVERED_S + 4.0)
        for part in parts:
            ended.merge(part.result())
    print(f"a single caller's median, each half second from then on: {halves(after, end_s)} ms", file=sys.stderr)
    recovered_s = recovery(after.began.get("OK", []), after.seconds.get("OK", []), end_s, normal_s)
    ended_ok = len(ended.seconds.get("OK", ()))
    time.sleep(_SETTLE_S)
    counted = counts(server)
    counted.subtract(before)
    counted.subtract({status: len(took) for status, took in after.seconds.items()})  # the single caller's
    left = server.total("attencode_requests_in_flight") + server.total("attencode_queue_inputs")
    told = [f"{left:.0f} requests or inputs are left in the server, expected none"] * bool(left)
    return Figures(
        capacity,
        ended.calls / arguments.seconds,
        ended,
        ended_ok / arguments.seconds,
        memory.peak,
        normal_s,
        recovered_s,
        counted.total() - counted[REFUSED],
        told + astray(counted, ended),
    )


def _ready(_number: int) -> int:
    """Do nothing, in a process that has imported all this."""
    time.sleep(0.2)
    return os.getpid()


def main() -> None:
    """Run it, print the table, and say what was not kept."""
    parser = command_line(__doc__)
    parser.add_argument("--times", type=above_zero, default=10.0, help="of the capacity")
    parser.add_argument("--seconds", type=above_zero, default=60.0)
    parser.add_argument("--connections", type=one_or_more, default=500)
    parser.add_argument("--deadline-s", type=above_zero, default=2.0)
    parser.add_argument("--texts", choices=("single", "passages"), default="single", help="13 tokens, or some 60")
    arguments, further = parser.parse_known_args()
    arguments.artifact = exported(arguments.artifact)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:  # inherited by what is started from here
        os.sched_setaffinity(0, cores[:1])
    with served([*serve_words(arguments), *further]) as server:
        os.sched_setaffinity(0, cores[1:] or cores)
        figures = measure(server, arguments, max(1, len(cores) - 1))
    print(figures.table())
    broken = figures.broken()
    for line in broken:
        print(line, file=sys.stderr)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
