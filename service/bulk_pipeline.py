"""Bulk pipeline: rows of texts out to a server, chunk by chunk, and their vectors back, whatever fails on the way.

May import: bulk_files, client, plain, request, errors, numpy.
"""

import contextlib
import queue
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from service.bulk_files import Row
from service.client import Client
from service.errors import AttencodeError, DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from service.plain import encode_request
from service.request import EncodeRequest, EncodeResult

_CHUNK_BYTES = 2**20  # of text in one request, beside the number of texts; a server takes 4 MiB unless told otherwise
_MOST_ROWS = 4096  # in one chunk, whatever is wrong with them
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0

_Answer = TypeVar("_Answer")


# ---------------------------------------------------------------- chunks


@dataclass(slots=True)
class Chunk:
    """Rows of the input that one request asks for.

    Attributes:
        rows: The rows, those with a problem included.
        digest: SHA-256 of all that was read up to the last of them.
    """

    rows: list[Row] = field(default_factory=list)
    digest: str = ""

    @property
    def texts(self) -> list[tuple[int, str]]:
        """Give the texts to encode, each with its place among the rows."""
        return [(place, row.text) for place, row in enumerate(self.rows) if row.text is not None]


def read_chunks(rows: Iterator[Row], batch_size: int, digest: Any) -> Iterator[Chunk]:
    """Gather rows into chunks of batch_size texts, fewer where these are long.

    Args:
        rows: The input.
        batch_size: Most texts in a chunk.
        digest: A hashlib object that has seen what was read before; goes on with what is read.
    """
    chunk, texts, size = Chunk(), 0, 0
    for row in rows:
        add_to_digest(digest, row)
        chunk.rows.append(row)
        if row.text is not None:
            texts, size = texts + 1, size + len(row.raw)
        if texts == batch_size or size >= _CHUNK_BYTES or len(chunk.rows) == _MOST_ROWS:
            chunk.digest = digest.hexdigest()
            yield chunk
            chunk, texts, size = Chunk(), 0, 0
    if chunk.rows:
        chunk.digest = digest.hexdigest()
        yield chunk


def add_to_digest(digest: Any, row: Row) -> None:
    """Add a row to a digest, so that no other rows give the same."""
    digest.update(len(row.raw).to_bytes(8, "little"))
    digest.update(row.raw)


# ---------------------------------------------------------------- the pipeline


class Pipeline:
    """Chunks out over one stream and their vectors back, in order, with a bounded number on the way."""

    def __init__(self, client: Client, request: dict[str, Any], in_flight: int, patience: "Patience") -> None:
        """Store the options of `Client.encode`, how many requests are on the way, and the patience with the server."""
        self._client = client
        self._request = request
        self._in_flight = in_flight
        self._patience = patience

    def vectors(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodeResult | None, dict[int, str]]]:
        """Give each chunk, the answer for its texts, and why those at some places have none.

        The answer's pooled vectors (texts, dim) are those of the texts that have one, in order; None for no answer.

        Raises:
            AttencodeError: The server failed for longer than it may.
        """
        waiting: deque[Chunk] = deque()
        ended = False
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(contextlib.closing(_Stream(self._client)))
            while True:
                while not ended and len(waiting) < self._in_flight:
                    chunk = next(chunks, None)
                    ended = chunk is None
                    if chunk is not None:
                        waiting.append(chunk)
                        if chunk.texts:
                            stream.send(encode_request([text for _, text in chunk.texts], **self._request))
                if not waiting:
                    return
                if not waiting[0].texts:
                    yield waiting.popleft(), None, {}
                    continue
                try:
                    answer = stream.receive()
                except AttencodeError:  # whatever it was, asking for each alone tells
                    stream.close()
                    stream = stack.enter_context(contextlib.closing(_Stream(self._client)))
                    while waiting:
                        yield self._alone(waiting.popleft())
                    continue
                chunk = waiting.popleft()
                yield (chunk, answer, {}) if isinstance(answer, EncodeResult) else self._alone(chunk)

    def _alone(self, chunk: Chunk) -> tuple[Chunk, EncodeResult | None, dict[int, str]]:
        """Ask for a chunk in requests of its own, ever smaller ones around a text that is refused."""
        answers: list[EncodeResult] = []
        problems: dict[int, str] = {}
        parts = [chunk.texts] if chunk.texts else []
        while parts:
            part = parts.pop()
            try:
                texts = [text for _, text in part]
                answers.append(self._patience.ask(partial(self._client.encode, texts, **self._request)))
            except InvalidRequest as error:
                if len(part) == 1:
                    problems[part[0][0]] = "refused: " + re.sub(r"^input 0\b", "the text", str(error))
                else:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]  # the last is the next
        return chunk, _joined(answers), problems


class Patience:
    """Asks a server that is away or full again, for so long."""

    def __init__(self, retry_s: float, report: Callable[[str], None]) -> None:
        """Store the seconds, and what takes a line about each kind of waiting, once."""
        self._retry_s = retry_s
        self._report = report
        self._reported: set[type[AttencodeError]] = set()

    def ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Call until there is an answer, the time is over, or something is wrong with the call itself.

        Raises:
            Unavailable: The server is away, likewise at the end of the time; likewise `QueueFull`, `DeadlineExceeded`.
        """
        end_s, pause_s = time.monotonic() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except (QueueFull, Unavailable, DeadlineExceeded) as error:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise
                if isinstance(error, QueueFull):
                    pause_s = max(pause_s, min(error.retry_delay_s, _LONGEST_PAUSE_S))
                self._tell(error)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _tell(self, error: AttencodeError) -> None:
        if type(error) not in self._reported:
            self._reported.add(type(error))
            self._report(f"{error}; asking again for up to {self._retry_s:g} s")


class _Stream:
    """One EncodeStream, fed request by request."""

    def __init__(self, client: Client) -> None:
        """Store the client; the stream begins with the first answer that is asked for."""
        self._requests: queue.SimpleQueue[EncodeRequest | None] = queue.SimpleQueue()
        self._answers = client.encode_stream(iter(self._requests.get, None))

    def send(self, request: EncodeRequest) -> None:
        """Send a request when the server takes it."""
        self._requests.put(request)

    def receive(self) -> EncodeResult | AttencodeError:
        """Wait for the next answer."""
        return next(self._answers)

    def close(self) -> None:
        """End the stream, and let gRPC's thread that reads the requests go."""
        self._requests.put(None)
        if isinstance(self._answers, Generator):
            self._answers.close()


def _joined(answers: list[EncodeResult]) -> EncodeResult | None:
    if not answers:
        return None
    pooled = np.concatenate([answer.pooled for answer in answers if answer.pooled is not None])
    digests = {answer.model_digest for answer in answers}
    last = answers[-1]
    results = [result for answer in answers for result in answer.results]
    digest = last.model_digest if len(digests) == 1 else " and ".join(sorted(digests))
    return EncodeResult(pooled, results, model=last.model, model_digest=digest)
