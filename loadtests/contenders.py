"""Contenders: what the benchmark measures in turn, all with the same texts: our server, the bare session, peers.

Load on a server comes from h2load, a request with one body again and again; for bulk several at once,
each with a body of its own.
May import: harness, closed_loop, texts, wire, service.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import closed_loop
import harness
from harness import Target, send, spent
from service.artifact import Artifact
from service.batching import Batch
from service.session import Session
from texts import TEXT, bulk_texts, in_groups
from wire import request_bytes

SINGLE_IN_FLIGHT = 64
BULK_TEXTS = 32  # in one request
BULK_IN_FLIGHT = 4  # requests, each with texts of its own
PACKED_ROWS = (8, 16)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much one round measures.

    Attributes:
        singles: Texts sent one a request.
        latencies: Requests sent one after another.
        bulks: Requests of many texts.
    """

    singles: int = 6000
    latencies: int = 300
    bulks: int = 48

    def times(self, factor: float) -> "Effort":
        """Give so many times this effort, not less than what can be measured at all."""
        return Effort(
            max(SINGLE_IN_FLIGHT, int(self.singles * factor)),
            max(10, int(self.latencies * factor)),
            max(2 * BULK_IN_FLIGHT, int(self.bulks * factor)),
        )


class Contender(Protocol):
    """One that turns texts into vectors. Rates are texts a second."""

    name: str

    def single(self, effort: Effort) -> float:
        """Measure single texts, `SINGLE_IN_FLIGHT` at one time; gives texts a second."""
        ...

    def latency(self, effort: Effort) -> float:
        """Measure single texts one after another; gives the median in seconds."""
        ...

    def bulk(self, effort: Effort) -> float:
        """Measure requests of `BULK_TEXTS` texts of 8 to 120 words; gives texts a second."""
        ...

    def vectors(self, texts: list[str]) -> NDArray[np.floating]:
        """Give the vectors (texts, dim) of some texts, to be held against the others'."""
        ...


def bulk_groups() -> list[list[str]]:
    """Give the texts of the bulk requests, one list a request."""
    return in_groups(bulk_texts(BULK_TEXTS * BULK_IN_FLIGHT), BULK_TEXTS)


def send_bulk(target: Target, effort: Effort, bodies: list[Path]) -> float:
    """Send bulk requests, one h2load for each body with one in flight; gives texts a second.

    So what is in flight at one time are different texts, as callers have them: one body many times over would be
    batches of equal lengths, which only flatter.
    """
    each = effort.bulks // len(bodies)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: send(target, 1, each, body, BULK_TEXTS), bodies))
    return each * len(bodies) * BULK_TEXTS / (time.perf_counter() - started)


class OurServer:
    """`attencode serve` on a port of this machine."""

    name = "attencode"

    def __init__(self, port: int, stack: ExitStack, answer_dim: int) -> None:
        """Write the requests to files, which live as long as the stack.

        Args:
            port: The server's.
            stack: Removes the files in the end.
            answer_dim: Width of a vector, by which a right answer is known from an error.
        """
        self._port = port
        self._address = f"127.0.0.1:{port}"
        self._target = harness.encoder(port, least_bytes=4 * answer_dim)
        self._single = stack.enter_context(harness.message_file([TEXT]))
        self._bulks = [stack.enter_context(harness.message_file(group)) for group in bulk_groups()]

    def single(self, effort: Effort) -> float:
        """Measure single texts with h2load."""
        return send(self._target, SINGLE_IN_FLIGHT, effort.singles, self._single)

    def latency(self, effort: Effort) -> float:
        """Measure one in flight, as h2load saw it: no Python on the client's side."""
        return statistics.median(spent(self._target, effort.latencies, self._single))

    def client_latency(self, effort: Effort) -> float:
        """Measure one in flight with the Python client; gives the median in seconds."""
        return statistics.median(harness.latencies(self._port, effort.latencies))

    def bulk(self, effort: Effort) -> float:
        """Measure bulk requests with h2load."""
        return send_bulk(self._target, effort, self._bulks)

    def stream(self, effort: Effort) -> float:
        """Measure single texts on one EncodeStream; the client is Python's and shares the cores."""
        work = closed_loop.stream(
            self._address, [request_bytes([TEXT])], in_flight=SINGLE_IN_FLIGHT, requests=effort.singles
        )
        return float(closed_loop.run(work))

    def vectors(self, texts: list[str]) -> NDArray[np.floating]:
        """Ask with the Python client."""
        return harness.vectors(self._port, texts)


class BareSession:
    """The session that the server runs, without a server: what is left to lose.

    Whatever is best counts: batches one after another on all threads, or side by side on some each.
    """

    name = "bare session"

    def __init__(self, session: Session, artifact: Artifact) -> None:
        """Pack the bulk texts for it, tokenized and sorted, before anything is measured."""
        self._session, self._artifact = session, artifact
        texts = bulk_texts(BULK_TEXTS * BULK_IN_FLIGHT)
        self._packed = {rows: harness.packed(artifact, texts, rows) for rows in PACKED_ROWS}

    def single(self, effort: Effort) -> float:
        """Measure batches that hold as many texts as the server has in flight, together or each."""
        batches = [harness.equal_rows(self._artifact, SINGLE_IN_FLIGHT)] * max(4, effort.singles // 300)
        return self._best([batches], 1)

    def latency(self, effort: Effort) -> float:
        """Measure batches of one text."""
        return statistics.median(harness.bare(self._session, self._artifact, 1, effort.latencies))

    def bulk(self, effort: Effort) -> float:
        """Measure the best of the packings, each over all texts."""
        passes = max(1, effort.bulks // (4 * BULK_IN_FLIGHT * len(PACKED_ROWS)))
        return self._best(list(self._packed.values()), passes)

    def _best(self, works: list[list[Batch]], passes: int) -> float:
        """Run lists of batches in both ways, so many times; gives the texts a second of the best list and way."""
        return max(
            statistics.median(run(self._session, batches) for _ in range(passes))
            for batches in works
            for run in (harness.one_by_one, harness.side_by_side)
        )

    def vectors(self, texts: list[str]) -> NDArray[np.floating]:
        """Run each text alone."""
        batches = [harness.packed(self._artifact, [text], 1)[0] for text in texts]
        return np.concatenate([next(iter(self._session.run(batch).values())) for batch in batches])
