"""Measure the server against the bare session that it runs and, with --peers, against other ways to the vectors.

    python loadtests/bench.py [--artifact FOLDER] [--provider auto] [--precision auto] [--rounds 5] [--peers]

All share the machine and take turns in one run, round by round, so the ratios hold where absolute numbers
drift. Prints one table in Markdown, then holds the ratios against `gate.json`; exit status 1 if one has
fallen below. A ratio is always how many times as fast the server is; `peers.py` says how peers are installed.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

import closed_loop
import gate
import harness
import open_loop
from arguments import above_zero, errors_as_messages, one_or_more
from contenders import (
    BULK_IN_FLIGHT,
    BULK_TEXTS,
    SINGLE_IN_FLIGHT,
    BareSession,
    Contender,
    Effort,
    OurServer,
)
from harness import MODEL, exported, running_server
from peers import PEERS, PeerFailed
from service.artifact import Artifact, open_artifact
from service.placement import Placement, choose_placement, streams_for, usable_cores
from service.session import Session
from texts import TEXT, short_texts
from wire import request_bytes

# Name in the gate, and what the table calls it. Latency counts in seconds, the others in texts a second.
MEASURES = {
    "single": f"single texts/s, {SINGLE_IN_FLIGHT} in flight",
    "latency": "p50 ms, 1 in flight",
    "client latency": "p50 ms, 1 in flight, Python client",
    "bulk": f"texts/s in requests of {BULK_TEXTS}, {BULK_IN_FLIGHT} in flight",
    "stream": f"texts/s on one EncodeStream, {SINGLE_IN_FLIGHT} in flight",
}
COMPARED_WITH = {"client latency": "latency", "stream": "single"}  # what the others are measured by there
OVERLOAD = 1.5
LEAST_COSINE = 0.999  # between a contender's vectors and ours; bfloat16 keeps 0.9999

Figures = dict[tuple[str, str], list[float]]  # (measure, contender) to a figure a round


def measures_of(contender: Contender) -> dict[str, Callable[[Effort], float]]:
    """Give what can be measured of a contender, by the measures' names."""
    found: dict[str, Callable[[Effort], float]] = {
        "single": contender.single,
        "latency": contender.latency,
        "bulk": contender.bulk,
    }
    if isinstance(contender, OurServer):
        found |= {"client latency": contender.client_latency, "stream": contender.stream}
    return found


def rounds(contenders: list[Contender], count: int, effort: Effort) -> Figures:
    """Measure so many rounds after one that warms everything up; within a measure the contenders take turns."""
    figures: Figures = {}
    for number in range(count + 1):
        for measure in MEASURES:
            for contender in contenders:
                work = measures_of(contender).get(measure)
                figure = work(effort if number else effort.times(0.2)) if work else None
                if number and figure is not None:
                    figures.setdefault((measure, contender.name), []).append(figure)
        print(f"round {number} of {count}", file=sys.stderr)
    return figures


def ratios(figures: Figures, others: list[str]) -> dict[str, float]:
    """Give how many times as fast the server is, as the median over rounds, for each measure and each other.

    Names are those of the gate: `bulk to infinity`.
    """
    found = {}
    for measure in MEASURES:
        ours = figures[measure, OurServer.name]
        for other in others:
            theirs = figures[COMPARED_WITH.get(measure, measure), other]
            pairs = [(a, b) if "latency" not in measure else (b, a) for a, b in zip(ours, theirs, strict=True)]
            found[f"{measure} to {other}"] = statistics.median(a / b for a, b in pairs)
    return found


def table(figures: Figures, others: list[str], absent: list[str], times: dict[str, float]) -> str:
    """Write the table: a row for each measure, of each contender its figure and how many times as fast we are."""
    columns = "".join(f" {name} | times |" for name in (*others, *absent))
    lines = [f"| measure | attencode |{columns}", "|---" * (2 + columns.count("|")) + "|"]
    for measure, title in MEASURES.items():
        cells = [title, _figure(measure, figures[measure, OurServer.name])]
        for other in others:
            theirs = _figure(measure, figures[COMPARED_WITH.get(measure, measure), other])
            cells += [theirs, f"{times[f'{measure} to {other}']:.2f}"]
        cells += ["not installed", ""] * len(absent)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(measure: str, values: list[float]) -> str:
    middle = statistics.median(values)
    return f"{1e3 * middle:.2f}" if "latency" in measure else f"{middle:.0f}"


def overload(address: str, seconds: float) -> tuple[float, open_loop.Outcome]:
    """Offer more than the server can do; gives goodput over what it can do, and what became of the requests."""
    bodies = [request_bytes([TEXT])]
    most = closed_loop.run(closed_loop.saturation(address, bodies, in_flight=SINGLE_IN_FLIGHT, seconds=seconds))
    outcome = closed_loop.run(open_loop.offer(address, bodies, OVERLOAD * most, seconds=seconds))
    return outcome.goodput / most, outcome


def check_vectors(contenders: list[Contender]) -> None:
    """Stop unless all contenders give the same vectors: who computes something else is not compared."""
    texts = [TEXT, *short_texts(7)]
    ours = contenders[0].vectors(texts)
    for other in contenders[1:]:
        theirs = other.vectors(texts)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        least = float(((ours * theirs).sum(axis=1) / lengths).min())
        if not least >= LEAST_COSINE:
            sys.exit(f"{other.name} gives other vectors: cosine {least:.4f}, expected at least {LEAST_COSINE}")


def measure(arguments: argparse.Namespace, artifact: Artifact, placement: Placement) -> dict[str, float]:
    """Start all contenders, run the rounds, print the table; gives the ratios."""
    cores = usable_cores()
    session = Session(artifact, placement, threads=cores, streams=streams_for(placement.provider, cores))
    effort = Effort().times(arguments.effort)
    absent = []
    with ExitStack() as stack:
        port, _ = stack.enter_context(running_server(*harness.serve_words(arguments), *arguments.serve))
        server = OurServer(port, stack, artifact.pooled_size(artifact.pooling))
        contenders: list[Contender] = [server, BareSession(session, artifact)]
        for name in arguments.peers:
            peer = stack.enter_context(PEERS[name](placement.provider))
            absent += [name] if peer is None else []
            contenders += [] if peer is None else [peer]
        check_vectors(contenders)
        others = [contender.name for contender in contenders[1:]]
        figures = rounds(contenders, arguments.rounds, effort)
        times = ratios(figures, others)
        print(f"{placement.device}, {usable_cores()} cores, medians of {arguments.rounds} rounds\n")
        print(table(figures, others, absent, times))
        if arguments.overload:
            times["overload"], outcome = overload(f"127.0.0.1:{port}", arguments.overload)
            print(f"\n{OVERLOAD} times saturation offered: goodput {times['overload']:.2f} of it\n")
            print(f"{open_loop.HEADER}\n{'|---' * (open_loop.HEADER.count('|') - 1)}|\n{outcome.row()}")
    print(json.dumps({" / ".join(key): values for key, values in figures.items()}), file=sys.stderr)
    return times


def main() -> None:
    """Measure, and hold the ratios against the gate."""
    parser = harness.command_line(__doc__)
    parser.add_argument("--rounds", type=one_or_more, default=5)
    parser.add_argument("--effort", type=above_zero, default=1.0, help="of a round; 0.1 for a tenth of its requests")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="all if none is named")
    parser.add_argument("--overload", type=above_zero, metavar="SECONDS", help="also offer more than the server can do")
    parser.add_argument("--no-gate", action="store_true", help="print the ratios and judge none")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="last: flags of `attencode serve`")
    arguments = parser.parse_args()
    arguments.peers = list(PEERS) if arguments.peers == [] else arguments.peers or []
    if shutil.which("h2load") is None:
        sys.exit("h2load is not installed; on Debian: apt-get install nghttp2-client")
    arguments.artifact = exported(arguments.artifact)
    artifact = open_artifact(arguments.artifact)
    placement = choose_placement(arguments.provider, arguments.precision, artifact)
    if arguments.peers and artifact.model_id != MODEL:
        sys.exit(f"the peers run {MODEL}; measure an artifact of that, not of {artifact.model_id}")
    try:
        times = measure(arguments, artifact, placement)
    except PeerFailed as error:
        sys.exit(str(error))
    if arguments.no_gate:
        return
    verdict = gate.judge(gate.read(), artifact.model_id, placement.device, times)
    for line in (*verdict.notes, *verdict.fallen):
        print(line, file=sys.stderr)
    sys.exit(bool(verdict.fallen))


if __name__ == "__main__":
    with errors_as_messages():
        main()
