"""Simulate the batching policy in virtual time: how near it is to the best packing, and how fair.

    python loadtests/simulate.py [--measure --artifact FOLDER] [--only WORD] [--limits NAME=NUMBER] [--plot FILE.png]

The real queue and policy (`service.batching`) run against a device that is a formula: seconds of a batch = a fixed
part + a part for each token, padding included + a part for each pair of tokens of a row, and a quarter more for a
shape that is not among the last 64. `--measure` takes the constants from the bare session on this machine; without
it they are those below. Nothing else takes time, so the figures compare policies, they promise no speed.

"Of best" holds the device's time against that of packing all the same texts offline: sorted by length and cut into
batches of 400 tokens, at each change of length or regardless of it, whichever is faster. Prints Markdown.
"""

import argparse
import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import count, groupby
from pathlib import Path

import numpy as np

from service.batching import BatchLimits, BatchPlan, Waiting, WaitingList, plan
from service.callers import Caller

LIMITS = BatchLimits(max_batch_tokens=512, few_shapes=True)  # those of a server with two threads and OpenVINO
OFFLINE_TOKENS = 400
TURNAROUND_S = 0.3e-3  # a client and gRPC between an answer and the next request
MEASURED_SHAPES = ((1, 16), (1, 64), (1, 256), (8, 8), (8, 16), (8, 32), (4, 64), (4, 128), (2, 256), (2, 512), (8, 64))

Draw = Callable[[random.Random], int]


def _mixed(draw: random.Random) -> int:
    """Texts of 8 to 120 words, at 1.3 tokens a word."""
    return round(1.3 * draw.randint(8, 120)) + 2


LENGTHS: dict[str, Draw] = {
    "queries": lambda draw: draw.randint(4, 16),
    "passages": lambda draw: draw.randint(60, 256),
    "mixed": _mixed,
}


@dataclass
class Device:
    """What a batch costs. The defaults are near MiniLM-L6 in bfloat16 on two cores.

    Attributes:
        batch_s: Of any batch.
        token_s: Of each token, padding included.
        pair_s: Of each pair of tokens of a row.
        first_share: What the first run of a shape costs more.
        shapes: Shapes that are remembered.
    """

    batch_s: float = 0.44e-3
    token_s: float = 28e-6
    pair_s: float = 35e-9
    first_share: float = 0.24
    shapes: int = 64
    _seen: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)

    def seconds(self, rows: int, length: int) -> float:
        """Run a batch."""
        seconds = self.batch_s + rows * length * (self.token_s + length * self.pair_s)
        if (rows, length) not in self._seen:
            seconds *= 1 + self.first_share
        self._seen[rows, length] = None
        self._seen.move_to_end((rows, length))
        if len(self._seen) > self.shapes:
            self._seen.popitem(last=False)
        return seconds

    def fresh(self) -> "Device":
        """Give the same device before its first batch."""
        return Device(self.batch_s, self.token_s, self.pair_s, self.first_share, self.shapes)


@dataclass
class Sender:
    """One who sends requests.

    Attributes:
        name: What callers are told apart by.
        requests: Token counts of each request's texts.
        in_flight: Requests that it keeps unanswered; the next comes when one is answered.
        times_s: When each request comes instead, whatever is unanswered.
        pause_s: Between an answer and the next request.
        probe: Whether it goes on only while the others do, and is reported apart.
        weight: Its share beside others.
    """

    name: str
    requests: Iterator[list[int]]
    in_flight: int = 1
    times_s: list[float] | None = None
    pause_s: float = TURNAROUND_S
    probe: bool = False
    weight: float = 1.0


@dataclass
class Outcome:
    """What a simulation saw; times in seconds."""

    end_s: float = 0.0
    busy_s: float = 0.0
    lengths: list[int] = field(default_factory=list)
    padded: int = 0
    batches: int = 0
    policy_s: float = 0.0
    latencies: list[tuple[float, float, bool]] = field(default_factory=list)  # end, latency, probe
    tokens_of: dict[str, int] = field(default_factory=dict)

    def latency_ms(self, percent: float, *, probe: bool | None = None) -> float:
        """Give a percentile of the requests' latencies."""
        chosen = [latency for _, latency, is_probe in self.latencies if probe is None or probe == is_probe]
        return float(np.percentile(chosen, percent)) * 1e3


class Simulation:
    """One run of callers against a device with the policy between them."""

    def __init__(self, callers: list[Sender], device: Device, limits: BatchLimits = LIMITS) -> None:
        """Let every caller's first requests come."""
        self._device, self._limits = device.fresh(), limits
        self._waiting, self._numbers, self._order = WaitingList(), count(), count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._open: dict[int, _Request] = {}  # arrival number of a text -> its request
        self._idle, self._left = True, sum(not caller.probe for caller in callers)
        self.outcome = Outcome()
        for caller in callers:
            if caller.times_s is None:
                for _ in range(caller.in_flight):
                    self._at(0.0, lambda now, caller=caller: self._arrive(caller, now))
            else:
                for time_s in caller.times_s:
                    self._at(time_s, lambda now, caller=caller: self._arrive(caller, now))

    def run(self) -> Outcome:
        """Run until nothing is left to do."""
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            self.outcome.end_s = now
            happen(now)
            if self._idle and not (self._events and self._events[0][0] == now):
                self._start(now)
        return self.outcome

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _arrive(self, caller: Sender, now: float) -> None:
        lengths = next(caller.requests, None)
        if lengths is None or (caller.probe and self._left <= 0):
            self._left -= not caller.probe and caller.times_s is None
            return
        request = _Request(caller, now, len(lengths))
        started = time.thread_time()
        for length in lengths:
            number = next(self._numbers)
            self._open[number] = request
            self._waiting.add(Waiting(number, length, now, Caller(caller.name, caller.weight)))
        self.outcome.policy_s += time.thread_time() - started

    def _start(self, now: float) -> None:
        started = time.thread_time()
        planned = plan(self._waiting, self._limits, now)
        items = self._waiting.take(planned, self._limits) if isinstance(planned, BatchPlan) else []
        self.outcome.policy_s += time.thread_time() - started
        if not items:
            if isinstance(planned, float):
                self._at(now + planned, lambda _now: None)
            return
        self._idle = False
        longest = self._limits.padded(max(item.length for item in items))
        seconds = self._device.seconds(len(items), longest)
        self.outcome.busy_s += seconds
        self.outcome.batches += 1
        self.outcome.padded += len(items) * longest
        self.outcome.lengths += [item.length for item in items]
        for item in items:
            self.outcome.tokens_of[item.caller.name] = self.outcome.tokens_of.get(item.caller.name, 0) + item.length
        self._at(now + seconds, lambda end: self._answer(items, end))

    def _answer(self, items: list[Waiting], now: float) -> None:
        self._idle = True
        for item in items:
            request = self._open.pop(item.number)
            request.missing -= 1
            if not request.missing:
                caller = request.caller
                self.outcome.latencies.append((now, now - request.came_s, caller.probe))
                if caller.times_s is None:
                    self._at(now + caller.pause_s, lambda then, caller=caller: self._arrive(caller, then))


@dataclass
class _Request:
    caller: Sender
    came_s: float
    missing: int


def offline_s(lengths: list[int], device: Device) -> float:
    """Give the device's seconds for texts that are all known beforehand."""
    ordered = sorted(lengths)
    cuts = [list(same) for _, same in groupby(ordered)], [ordered]
    best = []
    for runs in cuts:
        fresh, seconds = device.fresh(), 0.0
        for run in runs:
            start = 0
            for end in range(1, len(run) + 1):
                if end == len(run) or (end + 1 - start) * run[end] > OFFLINE_TOKENS:
                    seconds += fresh.seconds(end - start, run[end - 1])
                    start = end
        best.append(seconds)
    return min(best)


def texts(kind: str, requests: int, size: int = 1, seed: int = 0) -> Iterator[list[int]]:
    """Draw requests of so many texts each."""
    draw = random.Random(seed)
    return iter([[LENGTHS[kind](draw) for _ in range(size)] for _ in range(requests)])


def steady(kind: str, load: float, device: Device) -> list[Sender]:
    """Single texts of 64 callers, at random times."""
    lengths = [request[0] for request in texts(kind, 4000)]
    draw, mean_s = random.Random(1), offline_s(lengths, device) / 4000 / load
    callers = []
    for number in range(64):
        own = list(texts(kind, 4000 // 64, seed=number))
        times = [draw.uniform(0, 4000 * mean_s) for _ in own]
        callers.append(Sender(f"c{number}", iter(own), times_s=times))
    return callers


def bursts(kind: str, device: Device) -> list[Sender]:
    """64 callers that send a text each at once, again and again, at 0.8 of what the device can do."""
    lengths = [request[0] for request in texts(kind, 4000)]
    period_s = 64 * offline_s(lengths, device) / 4000 / 0.8
    times = [number * period_s for number in range(60)]
    return [Sender(f"c{number}", texts(kind, 60, seed=number), times_s=times) for number in range(64)]


def closed(kind: str, callers: int) -> list[Sender]:
    """Callers that send a text each as soon as the one before is answered."""
    return [Sender(f"c{number}", texts(kind, 4000 // callers, seed=number)) for number in range(callers)]


def bulk(callers: int, size: int, in_flight: int, total: int = 10_000) -> list[Sender]:
    """Clients that send requests of many mixed texts and keep some in flight."""
    each = total // size // callers
    return [Sender(f"b{n}", texts("mixed", each, size, n), in_flight) for n in range(callers)]


def small(requests: int = 10**6, pause_s: float = TURNAROUND_S) -> list[Sender]:
    """Eight clients that ask for one short text after another."""
    draws = [random.Random(number) for number in range(8)]
    endless = [([LENGTHS["queries"](draw)] for _ in range(requests)) for draw in draws]
    return [Sender(f"s{n}", own, pause_s=pause_s, probe=requests >= 10**6) for n, own in enumerate(endless)]


def scenarios(device: Device) -> dict[str, list[Sender]]:
    """Lay out what is simulated."""
    found: dict[str, list[Sender]] = {}
    for kind in LENGTHS:
        for load in (0.5, 0.8, 0.95):
            found[f"{kind}, steady at {load}"] = steady(kind, load, device)
        found[f"{kind}, bursts of 64"] = bursts(kind, device)
        for callers in (32, 64):
            found[f"{kind}, {callers} in flight"] = closed(kind, callers)
    found["bulk, 8 requests of 32 in flight"] = bulk(1, 32, 8)
    found["bulk, 8 callers of 32"] = bulk(8, 32, 1)
    found["bulk, 1,000 at once"] = bulk(1, 1000, 1, 1000)
    found["8 small callers alone"] = small(1000)
    found["8 small, bulk of 8 x 32"] = small() + bulk(1, 32, 8)
    found["8 small, bulk of 1 x 1,000"] = small() + bulk(1, 1000, 1)
    found["8 small, bulk of 10,000 at once"] = small() + bulk(1, 10_000, 1)
    found["8 small with pauses of 20 ms alone"] = small(1000, 0.02)
    found["8 small with pauses, bulk of 8 x 32"] = small(pause_s=0.02) + bulk(1, 32, 8)
    return found


def row(name: str, outcome: Outcome, device: Device) -> str:
    """Lay out one line of the table; latencies are those of the small callers where there are some."""
    tokens, rows = sum(outcome.lengths), len(outcome.lengths)
    probe = True if any(is_probe for *_, is_probe in outcome.latencies) else None
    cells = [
        name,
        f"{rows / outcome.end_s:.0f}",
        f"{tokens / outcome.end_s / 1000:.1f}k",
        f"{100 * outcome.busy_s / outcome.end_s:.0f} %",
        f"{100 * (1 - tokens / outcome.padded):.1f} %",
        f"{100 * sum(n for who, n in outcome.tokens_of.items() if who[0] == 'b') / tokens:.0f} %",
        f"{outcome.latency_ms(50, probe=probe):.1f}",
        f"{outcome.latency_ms(99, probe=probe):.1f}",
        f"{rows / outcome.batches:.1f}",
        f"{outcome.padded / outcome.batches:.0f}",
        f"{100 * offline_s(outcome.lengths, device) / outcome.busy_s:.0f} %",
        f"{1e6 * outcome.policy_s / rows:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = "| trace | texts/s | tokens/s | busy | padding | of bulk | p50 ms | p99 ms | rows | tokens | of best | plan us |"


def draw_curves(file: Path, device: Device) -> None:
    """Draw packing and padding over the texts in flight, and small callers' latencies beside a bulk client."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (packing, padding, fairness) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    flights = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for kind in LENGTHS:
        outcomes = [Simulation(closed(kind, callers), device).run() for callers in flights]
        best = [100 * offline_s(outcome.lengths, device) / outcome.busy_s for outcome in outcomes]
        packing.plot(flights, best, marker="o", label=kind)
        waste = [100 * (1 - sum(outcome.lengths) / outcome.padded) for outcome in outcomes]
        padding.plot(flights, waste, marker="o", label=kind)
    for axes, title in ((packing, "speed, % of the best packing"), (padding, "pad tokens, %")):
        axes.set(title=title, xlabel="single texts in flight", xscale="log", ylim=(0, None))
        axes.legend()
    for name, callers in (("8 small alone", small(1000)), ("and a bulk client", small() + bulk(1, 32, 8))):
        outcome = Simulation(callers, device).run()
        alone = all(not probe for *_, probe in outcome.latencies)
        latencies = sorted(1e3 * latency for _, latency, probe in outcome.latencies if probe or alone)
        fairness.plot(latencies, 100 * np.arange(len(latencies)) / len(latencies), label=name)
    fairness.set(title="small callers answered within, %", xlabel="ms", xlim=(0, None), ylim=(0, 100))
    fairness.legend()
    figure.savefig(file, dpi=80)


def measure(artifact: Path, provider: str) -> Device:
    """Fit the constants to the bare session's fastest of 20 runs a shape: others may be at work on the machine."""
    from service.artifact import open_artifact
    from service.placement import choose_placement, usable_cores
    from service.session import Session

    session = Session(open_artifact(artifact), choose_placement(provider, "auto"), threads=usable_cores())
    parts, firsts = [], []
    for rows, length in MEASURED_SHAPES:
        batch = session.trial(rows, length)
        times = []
        for _ in range(21):
            started = time.perf_counter()
            session.run(batch)
            times.append(time.perf_counter() - started)
        parts.append(np.array([1, rows * length, rows * length**2]) / min(times[1:]))  # relative errors count alike
        firsts.append(times[0] / min(times[1:]) - 1)
    batch_s, token_s, pair_s = np.linalg.lstsq(np.array(parts), np.ones(len(parts)), rcond=None)[0]
    return Device(max(batch_s, 0.0), token_s, max(pair_s, 0.0), max(float(np.median(firsts)), 0.0))


def main() -> None:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--only", default="", help="traces that have this in their name")
    parser.add_argument("--limits", nargs="*", default=[], metavar="NAME=NUMBER", help="other limits")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.measure and arguments.artifact is None:
        parser.error("--measure wants --artifact FOLDER")
    device = measure(arguments.artifact, arguments.provider) if arguments.measure else Device()
    try:
        changed = {name: float(number) for name, _, number in (words.partition("=") for words in arguments.limits)}
        limits = replace(LIMITS, **{name: int(n) if n.is_integer() else n for name, n in changed.items()})
    except (TypeError, ValueError):
        names = ", ".join(each.name for each in fields(BatchLimits))
        parser.error(f"--limits: expected NAME=NUMBER with NAME one of {names}, got {' '.join(arguments.limits)}")
    every = scenarios(device)
    chosen = {name: callers for name, callers in every.items() if arguments.only in name}
    if not chosen:
        parser.error(f"--only: {arguments.only!r} is in no trace's name; they are {', '.join(every)}")
    print(f"batch {1e3 * device.batch_s:.2f} ms, token {1e6 * device.token_s:.1f} us, ", end="")
    print(f"pair {1e9 * device.pair_s:.1f} ns, first run +{100 * device.first_share:.0f} %\n")
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|")
    for name, callers in chosen.items():
        print(row(name, Simulation(callers, device, limits).run(), device), flush=True)
    if arguments.plot:
        draw_curves(arguments.plot, device)


if __name__ == "__main__":
    main()
