"""Ledger: each call that a client began, and how it ended; and what a server must have counted if all is well.

A line is written before a call and one after it, so that a client that is killed leaves its ledger behind.
May import: nothing of the project.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

GONE = "gone: "
"""Begins an outcome that the client knows of by itself: its deadline, its cancellation, its connection."""
WRONG = "WRONG: "
"""Begins an outcome that must not be."""
ANSWERS = ("OK", "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED")
"""Outcomes that are the server's own word, so that it has counted them as well."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call, or one item of a stream.

    Attributes:
        method: Encode, EncodeStream and so on.
        kind: Which mischief it was part of.
        outcomes: How it ended, each time that it did.
        note: What came with the first of them.
    """

    method: str
    kind: str
    outcomes: tuple[str, ...]
    note: str = ""


class Ledger:
    """A client's calls, in a file."""

    def __init__(self, path: Path) -> None:
        """Open the file; each line reaches it at once."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._number = 0

    def begin(self, method: str, kind: str) -> int:
        """Note a call that is about to begin; gives its number."""
        self._number += 1
        self._write("begun", self._number, method, kind)
        return self._number

    def end(self, number: int, outcome: str, note: str = "") -> None:
        """Note how a call ended."""
        self._write("ended", number, outcome, note)

    def _write(self, *words: object) -> None:
        line = "\t".join(str(word).replace("\t", " ").replace("\n", " ") for word in words)
        os.write(self._file, f"{line}\n".encode())


def read(path: Path) -> list[Entry]:
    """Read a ledger.

    Raises:
        ValueError: A call ended that never began.
    """
    begun: dict[str, tuple[str, str]] = {}
    ended: dict[str, list[tuple[str, str]]] = {}
    text = path.read_bytes().decode(errors="replace")
    for line in text[: text.rfind("\n") + 1].splitlines():  # the last one may be cut
        word, number, first, second = line.split("\t")
        if word == "begun":
            begun[number] = (first, second)
        elif number in begun:
            ended.setdefault(number, []).append((first, second))
        else:
            raise ValueError(f"{path} has the end of call {number}, which never began")
    entries = []
    for number, (method, kind) in begun.items():
        ends = ended.get(number, [])
        entries.append(Entry(method, kind, tuple(outcome for outcome, _ in ends), ends[0][1] if ends else ""))
    return entries


def faults(entries: Iterable[Entry], *, killed: bool) -> list[str]:
    """List what must not be: wrong outcomes, calls that ended twice, and, unless their client was killed, never."""
    found: Counter[str] = Counter()
    for entry in entries:
        if len(entry.outcomes) > 1:
            found[f"{entry.kind}: ended {len(entry.outcomes)} times: {', '.join(entry.outcomes)}"] += 1
        if not entry.outcomes and not killed:
            found[f"{entry.kind}: never ended"] += 1
        for outcome in entry.outcomes:
            if outcome.startswith(WRONG):
                found[f"{entry.kind}: {outcome} ({entry.note})"] += 1
    return [f"{count} times {fault}" for fault, count in found.items()]


def reconcile(entries: Iterable[Entry], counted: Mapping[tuple[str, str], float]) -> list[str]:
    """Compare what clients saw with what the server counted; gives what cannot be.

    An answer that the client did not wait for is one that the server may have counted under any status, or, if it never
    heard of the call, not at all. All others must be there.

    Args:
        entries: Of all clients.
        counted: Ended requests by method and status.
    """
    seen: Counter[tuple[str, str]] = Counter()
    open_ends: Counter[str] = Counter()
    for entry in entries:
        outcome = entry.outcomes[0] if entry.outcomes else GONE
        if outcome in ANSWERS:
            seen[entry.method, outcome] += 1
        else:
            open_ends[entry.method] += 1
    said = []
    for method in sorted({method for method, _ in (*seen, *counted)}):
        unknown = open_ends[method]
        for status in ANSWERS:
            server, clients = counted.get((method, status), 0), seen[method, status]
            if not clients <= server <= clients + unknown:
                said.append(
                    f"{method}: the server counted {server:.0f} {status}, the clients saw {clients}, {unknown} are open"
                )
        known = sum(number for (of, _), number in seen.items() if of == method)
        total = sum(number for (of, _), number in counted.items() if of == method)
        if not known <= total <= known + unknown:
            said.append(f"{method}: the server counted {total:.0f} requests, the clients began {known + unknown}")
    return said
