"""Watched: a server process, and what it and the system say of it: metrics, memory, descriptors, threads.

May import: service's words on its ready line, psutil.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Self

import psutil

ROOT = Path(__file__).parents[1]
Series = tuple[str, tuple[tuple[str, str], ...]]
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def read_metrics(page: str) -> dict[Series, float]:
    """Read a page of Prometheus' text: each series' value by its name and its labels, sorted."""
    found = (_LINE.match(line) for line in page.splitlines() if not line.startswith("#"))
    return {(line[1], tuple(sorted(_LABEL.findall(line[2] or "")))): float(line[3]) for line in found if line}


def environment(**variables: str) -> dict[str, str]:
    """Give a child's environment in which the service of this tree is found, whichever one is installed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


class Served:
    """A server process that is ready."""

    def __init__(self, process: subprocess.Popen[str], port: int, metrics_port: int) -> None:
        """Store what the ready line said."""
        self.process = process
        self.port = port
        self._metrics_port = metrics_port
        self._facts = psutil.Process(process.pid)
        self._lines: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def metrics(self) -> dict[Series, float]:
        """Ask for all metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=30) as page:
            return read_metrics(page.read().decode())

    def total(self, name: str, **labels: str) -> float:
        """Sum up the series of a name that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.metrics().items() if found == name and wanted <= set(has))

    def ask(self, number: signal.Signals) -> str:
        """Send a signal and wait for the line with which the server answers it.

        Raises:
            TimeoutError: None came.
        """
        self.process.send_signal(number)
        try:
            return self._lines.get(timeout=30)
        except Empty as error:
            raise TimeoutError(f"the server does not answer {number.name}: its event loop stands still") from error

    def _listen(self) -> None:
        if self.process.stdout is not None:
            with self.process.stdout as lines:
                for line in lines:
                    self._lines.put(line)

    def end(self) -> None:
        """Drain it, and wait until it is gone."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()

    def rss_bytes(self) -> int:
        """Give the resident memory."""
        return int(self._facts.memory_info().rss)

    def descriptors(self) -> int:
        """Count open file descriptors."""
        return int(self._facts.num_fds())

    def kinds(self) -> str:
        """Say of which kinds the open descriptors are, and in which state the connections."""
        links = Counter[str]()
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(OSError):
                links[re.sub(r"\d+", "N", str(path.readlink()))] += 1
        states = Counter(connection.status for connection in self._facts.net_connections())
        return f"{dict(links)}, {dict(states)}"

    def threads(self) -> int:
        """Count threads."""
        return int(self._facts.num_threads())


@contextmanager
def served(
    words: Sequence[str], *, log: Path | None = None, module: Sequence[str] = ("-m", "service"), **variables: str
) -> Iterator[Served]:
    """Start `attencode serve` with these words and give it once it is ready; it is drained in the end.

    Args:
        words: Settings.
        log: File for its stderr; this process's own if None.
        module: What of Python's runs it.
        variables: Of its environment.
    """
    command = [sys.executable, *module, "serve", "--port=0", "--metrics-port=0", *words]
    with (log or Path(os.devnull)).open("ab") as file:
        process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=file if log else None,
            text=True,
        )
    line = process.stdout.readline() if process.stdout else ""
    print(line.strip(), file=sys.stderr)
    match = re.search(r":(\d+), .*metrics on port (\d+)", line)
    if match is None:
        process.kill()
        sys.exit("the server did not start")
    server = Served(process, int(match[1]), int(match[2]))
    try:
        yield server
    finally:
        server.end()


class MemoryCurve:
    """A server's resident memory over time, read while it is entered."""

    def __init__(self, server: Served, every_s: float = 0.05) -> None:
        """Store whose, and the seconds between two readings."""
        self.points: list[tuple[float, int]] = []
        self._server = server
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        """The most, in bytes."""
        return max(size for _, size in self.points)

    def slope(self) -> float:
        """Give the growth over the last half, in bytes an hour, by least squares."""
        half = self.points[len(self.points) // 2 :]
        middle_t = sum(moment for moment, _ in half) / len(half)
        middle = sum(size for _, size in half) / len(half)
        above = sum((moment - middle_t) * (size - middle) for moment, size in half)
        below = sum((moment - middle_t) ** 2 for moment, _ in half)
        return 3600 * above / below if below else 0.0

    def _read(self) -> None:
        while not self._done.wait(self._every_s):
            self.points.append((time.monotonic(), self._server.rss_bytes()))
