"""Do to a server at random whatever clients, and the system under it, do to one; then see that nothing is lost or left.

    python loadtests/chaos.py [--artifact FOLDER] [--seconds 600] [--seed N] [--clients 4] [--callers 12]
    python loadtests/chaos.py --ray                # on two replicas, of which one is killed now and then

Client processes (`mischief.py`) call with deadlines of all lengths, cancel, leave, read slowly, ask for large answers
and for what is wrong, end streams half-way; now and then one of them is killed (SIGKILL) and another takes its place.
The model fails, yields NaN or is slow at random (`faulty.py`). The server's process is stopped for 5 s (SIGSTOP). Ends
with 1 and says why unless
  * every call and every item of a stream ended exactly once, with its right answer or an error that is due,
  * the server's counters add up, and agree with the clients' ledgers,
  * each INTERNAL has an id that is in the log, and the log tells of no task or exception that nobody looked after,
  * nothing is left when the clients are gone: tasks, futures, streams, descriptors, threads, memory,
  * memory does not grow in the second half of the run.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from arguments import above_zero, one_or_more
from attencode import Client
from harness import command_line, exported, serve_words
from kills import replicas_of
from ledger import GONE, Entry, faults, read, reconcile
from mischief import Known
from texts import short_texts
from watched import MemoryCurve, Served, environment, served

HERE = Path(__file__).parent
MOST_REQUEST_BYTES = 2**20
SETTINGS = (
    "--max-queue-size=1000",
    f"--max-request-bytes={MOST_REQUEST_BYTES}",
    "--max-answer-bytes=268435456",
    "--stalled-after-s=2",
)
_WARM = 0.1  # of the run's time, before it: every shape and every graph of two sessions is made once
_GROWTH = 0.05  # of memory that the second half may add
_SLACK_BYTES = 150_000_000  # of memory that may stay: what allocators keep of the largest answers
_SLACK = 5  # threads and descriptors that gRPC's pool may have more at one time than at another
_LARGE_BYTES = 4_000_000
_NOT_IN_THE_LOG = ("never retrieved", "was destroyed but it is pending", "CRITICAL", "never awaited")
_GAUGES = ("requests_in_flight", "open_streams", "unsent_bytes", "queue_inputs", "queue_tokens", "batches_in_flight")


@dataclass
class Left:
    """What is alive in a server and its process.

    Attributes:
        tasks: By what they run.
        objects: Unanswered futures, and what lives as long as a request.
        gauges: The metrics that must be 0 when nobody asks.
        descriptors: Open ones; 0 if not looked at, as the next.
        threads: Of the process.
        rss_bytes: Resident memory.
    """

    tasks: dict[str, int]
    objects: dict[str, int]
    gauges: dict[str, float]
    descriptors: int
    threads: int
    rss_bytes: int

    @classmethod
    def of(cls, server: Served) -> "Left":
        """Look, once a call of another kind has come: gRPC keeps the last one until the next."""
        with grpc.insecure_channel(server.address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        time.sleep(0.2)
        alive = json.loads(server.ask(signal.SIGUSR1))
        gauges = {name: server.total(f"attencode_{name}") for name in _GAUGES}
        return cls(alive["tasks"], alive["objects"], gauges, server.descriptors(), server.threads(), server.rss_bytes())

    def beyond(self, before: "Left", *, process: bool) -> list[str]:
        """List what there is more of than before; what is the `process`'s own where it is said."""
        said = [f"{value:g} {name}" for name, value in self.gauges.items() if value]
        for kind, now, then in (("task", self.tasks, before.tasks), ("object", self.objects, before.objects)):
            said += [
                f"{number - then.get(name, 0)} more of {kind} {name}"
                for name, number in now.items()
                if number > then.get(name, 0)
            ]
        if process:
            for name, now, then in (
                ("descriptors", self.descriptors, before.descriptors),
                ("threads", self.threads, before.threads),
            ):
                said += [f"{now} {name}, {then} before"] * (now > then + _SLACK)
        if self.rss_bytes > before.rss_bytes + _SLACK_BYTES:
            said.append(f"{self.rss_bytes / 1e6:.0f} MB of memory, {before.rss_bytes / 1e6:.0f} before")
        return said


@dataclass
class Outcome:
    """What a run showed.

    Attributes:
        seed: Draws the same mischief again, as far as the machine's pace allows.
        entries: Of all clients.
        deeds: How often what was done to processes.
        broken: What must not be.
        growth_bytes: Of memory over the second half, by its slope.
        peak_bytes: Of memory.
        before: Of memory, once all was warm.
        after: Of memory, once the clients were gone.
    """

    seed: int
    entries: list[Entry] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    growth_bytes: float = 0.0
    peak_bytes: int = 0
    before: int = 0
    after: int = 0

    def table(self) -> str:
        """Write the outcomes by kind of mischief, and a line for the server, as Markdown."""
        kinds: dict[str, Counter[str]] = {}
        for entry in self.entries:
            kinds.setdefault(entry.kind, Counter())[entry.outcomes[0] if entry.outcomes else f"{GONE}killed"] += 1
        lines = ["| what clients did | calls | answered | refused or failed | given up |", "|---|---|---|---|---|"]
        for kind, outcomes in sorted(kinds.items()):
            given_up = {name.removeprefix(GONE): n for name, n in outcomes.items() if name.startswith(GONE)}
            failed = {name: n for name, n in outcomes.items() if name != "OK" and not name.startswith(GONE)}
            cells = [kind, f"{outcomes.total()}", f"{outcomes['OK']}", _listed(failed), _listed(given_up)]
            lines.append(f"| {' | '.join(cells)} |")
        done = ", ".join(f"{number} times {deed}" for deed, number in self.deeds.items())
        sizes = f"{self.before / 1e6:.0f} MB before, {self.peak_bytes / 1e6:.0f} at most, {self.after / 1e6:.0f} after"
        growth = f"{self.growth_bytes / 1e6:+.1f} MB in the second half"
        return "\n".join([*lines, "", f"Done to processes: {done or 'nothing'}. Memory: {sizes}, {growth}."])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


class Clients:
    """Client processes, and their ledgers."""

    def __init__(self, server: Served, folder: Path, arguments: argparse.Namespace) -> None:
        """Store where they call, and where their files are."""
        self._server = server
        self._folder = folder
        self._arguments = arguments
        self._begun: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._killed: set[int] = set()

    def start(self, seconds: float) -> None:
        """Start one more."""
        number = len(self._begun)
        ledger = self._folder / f"ledger-{number}"
        words = ["--address", self._server.address, "--known", self._folder / "known.npz", "--ledger", ledger]
        words += ["--seed", self._arguments.seed * 100 + number, "--seconds", seconds]
        command = [sys.executable, HERE / "mischief.py", *words, "--callers", self._arguments.callers]
        variables = environment(GRPC_VERBOSITY="NONE")
        self._begun.append((subprocess.Popen(list(map(str, command)), env=variables), ledger))

    def kill(self, draw: random.Random) -> None:
        """Kill one of those that run."""
        running = [process for process, _ in self._begun if process.poll() is None]
        if running:
            victim = draw.choice(running)
            victim.kill()
            self._killed.add(victim.pid)

    def entries(self, within_s: float) -> tuple[list[Entry], list[str]]:
        """Wait for their ends; gives all entries, and what is wrong with them."""
        end_s = time.monotonic() + within_s
        entries, said = [], []
        for process, ledger in self._begun:
            try:
                code = process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
                said.append("a client process did not come to its end")
            killed = process.pid in self._killed
            if code and not killed:
                said.append(f"a client process ended with {code}")
            if ledger.exists():
                own = read(ledger)
                entries += own
                said += faults(own, killed=killed)
        return entries, said


def learn(server: Served) -> Known:
    """Ask for the right answers, before anything fails."""
    texts = sorted(set(short_texts(60)))
    with Client(server.address, timeout_s=60) as client:
        info = client.get_model()
        answers = [client.encode(text).pooled for text in texts]
        large = info.num_hidden_layers * info.num_attention_heads * info.max_tokens**2 * 4
        long = "a b c d " * (info.max_tokens // 4)
        if large > 5 * _LARGE_BYTES:  # of a real model, half of its length does
            long = long[: len(long) // 2]
    vectors, lone = [], []
    for text, answer in zip(texts, answers, strict=True):  # only those that cannot be taken for one another
        if answer is not None and all(np.linalg.norm(answer[0] - other) > 0.1 for other in vectors):
            vectors.append(answer[0])
            lone.append(text)
    return Known(lone, np.stack(vectors), long, max(1, min(40, _LARGE_BYTES // large)), MOST_REQUEST_BYTES)


def rampage(server: Served, clients: Clients, arguments: argparse.Namespace, deeds: Counter[str]) -> None:
    """Let clients live, and stop and kill processes meanwhile."""
    draw = random.Random(arguments.seed)
    end_s = time.monotonic() + arguments.seconds
    for _ in range(arguments.clients):
        clients.start(arguments.seconds)
    plans = {"stopped": arguments.stop_every_s, "client killed": arguments.kill_every_s}
    plans |= {"replica killed": arguments.kill_every_s} if arguments.ray else {}
    due = {deed: time.monotonic() + draw.uniform(0.3, 0.8) * every_s for deed, every_s in plans.items()}
    while (now := time.monotonic()) < end_s:
        deed = min(due, key=lambda name: due[name])
        if due[deed] > now:
            time.sleep(min(0.1, end_s - now))
            continue
        due[deed] = now + draw.uniform(0.5, 1.5) * plans[deed]
        if now > end_s - arguments.stop_s:
            continue
        deeds[deed] += 1
        if deed == "stopped":
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(arguments.stop_s)
            server.process.send_signal(signal.SIGCONT)
        elif deed == "client killed":
            clients.kill(draw)
            clients.start(max(1.0, end_s - now))
        elif victims := replicas_of(server.process.pid):
            os.kill(draw.choice(victims).pid, signal.SIGKILL)


def settled(server: Served, before: Left, within_s: float, *, process: bool) -> tuple[Left, list[str]]:
    """Wait until nothing is left that was not there before, or for as long as is fair; gives what is left."""
    end_s = time.monotonic() + within_s
    while True:
        after = Left.of(server)
        said = after.beyond(before, process=process)
        if not said or time.monotonic() > end_s:
            return after, [*said, f"descriptors are {server.kinds()}"] if said else []
        time.sleep(0.5)


def counted(server: Served) -> dict[tuple[str, str], float]:
    """Give the ended requests by method and status."""
    return {
        (dict(labels)["method"], dict(labels)["code"]): value
        for (name, labels), value in server.metrics().items()
        if name == "attencode_requests_total"
    }


def told_of(log: Path, entries: list[Entry]) -> list[str]:
    """Look for each INTERNAL's id in the log, and for what must not be in it."""
    text = log.read_text(errors="replace")
    ids = set(re.findall(r"\b[0-9a-f]{12}\b", text))
    unknown = [entry.note for entry in entries if entry.outcomes[:1] == ("INTERNAL",) and entry.note not in ids]
    said = [f"{len(unknown)} ids of INTERNAL are not in the log, {unknown[0]!r} for one"] if unknown else []
    for words in _NOT_IN_THE_LOG:
        if words in text:
            place = text.index(words)
            said.append(f"the log has {words!r}: ...{text[max(0, place - 200) : place + 600]}")
    return said


def right_again(server: Served, known: Known) -> list[str]:
    """Ask for all known texts once more."""
    with Client(server.address, timeout_s=60) as client:
        pooled = client.encode(known.texts).pooled
    same = pooled is not None and np.allclose(pooled, known.vectors, atol=0.05)
    return [] if same else ["after the run, known texts have other vectors than before"]


def warm(server: Served, folder: Path, arguments: argparse.Namespace) -> list[Entry]:
    """Let one client do a little of everything, so that what is made once is there; gives its entries."""
    ledger = folder / "ledger-warm"
    words = ["--address", server.address, "--known", folder / "known.npz", "--ledger", ledger]
    words += ["--seed", arguments.seed, "--seconds", max(4.0, _WARM * arguments.seconds), "--callers", 24]
    subprocess.run(list(map(str, [sys.executable, HERE / "mischief.py", *words])), env=environment(), check=True)
    return read(ledger)


def run(arguments: argparse.Namespace) -> Outcome:
    """Do the whole run."""
    outcome = Outcome(arguments.seed)
    words = [*serve_words(arguments), *SETTINGS, *(["--ray", "--replicas=2"] if arguments.ray else [])]
    with tempfile.TemporaryDirectory() as name, _log(Path(name), arguments.log) as log:
        folder = Path(name)
        entry = (str(HERE / "faulty.py"),)
        with served(words, log=log, module=entry, CHAOS_SEED=str(arguments.seed)) as server:
            known = learn(server)
            known.save(folder / "known.npz")
            own = Counter(counted(server))
            if not arguments.ray:
                server.ask(signal.SIGUSR2)
            entries = warm(server, folder, arguments)  # with faults, after which there is a session in float32 too
            time.sleep(3.0)
            before, _ = settled(server, Left.of(server), arguments.settle_s, process=not arguments.ray)
            clients = Clients(server, folder, arguments)
            with MemoryCurve(server, 0.2) as memory:
                rampage(server, clients, arguments, outcome.deeds)
            further, outcome.broken = clients.entries(within_s=120.0)
            outcome.entries = entries + further
            if not arguments.ray:
                server.ask(signal.SIGUSR2)
            after, left = settled(server, before, arguments.settle_s, process=not arguments.ray)
            outcome.broken += left
            ended = Counter(counted(server))
            ended.subtract(own)
            outcome.broken += reconcile(outcome.entries, ended)
            outcome.broken += right_again(server, known)
            outcome.growth_bytes = memory.slope() * arguments.seconds / 2 / 3600
            outcome.peak_bytes, outcome.before, outcome.after = memory.peak, before.rss_bytes, after.rss_bytes
        outcome.broken += told_of(log, outcome.entries)
    if arguments.seconds >= 120 and outcome.growth_bytes > _GROWTH * outcome.before:
        outcome.broken.append(f"memory grew by {outcome.growth_bytes / 1e6:.0f} MB in the second half")
    return outcome


@contextmanager
def _log(folder: Path, kept: Path | None) -> Iterator[Path]:
    """Give the file that the server logs to, one that is kept if asked for."""
    yield kept or folder / "log"


def command() -> argparse.ArgumentParser:
    """Give the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if unset")
    parser.add_argument("--clients", type=one_or_more, default=4, help="processes")
    parser.add_argument("--callers", type=one_or_more, default=12, help="of each")
    parser.add_argument("--stop-every-s", type=above_zero, default=60.0, help="on average")
    parser.add_argument("--stop-s", type=above_zero, default=5.0, help="for which the server is stopped")
    parser.add_argument("--kill-every-s", type=above_zero, default=15.0, help="on average")
    parser.add_argument("--settle-s", type=above_zero, default=60.0, help="for what is left to go")
    parser.add_argument("--ray", action="store_true", help="run the model on replicas, and kill some")
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    return parser


def main() -> None:
    """Run it and print what came of it."""
    arguments = command().parse_args()
    arguments.artifact = exported(arguments.artifact)
    arguments.seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {arguments.seed}", file=sys.stderr)
    outcome = run(arguments)
    print(outcome.table())
    for line in outcome.broken:
        print(line, file=sys.stderr)
    sys.exit(bool(outcome.broken))


if __name__ == "__main__":
    main()
