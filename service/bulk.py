"""Bulk: a pooled vector for every text of a file, pipelined over EncodeStream, resumable after a kill at any moment.

Rows go to OUTPUT.partial as they come, and OUTPUT.partial.json, the journal, says how many of them count; in the end
they are written in the output's format and take its name at once.
May import: bulk_files, bulk_partial, client, plain, request, errors, numpy.
"""

import contextlib
import hashlib
import itertools
import queue
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from service import bulk_files
from service.bulk_files import Row
from service.bulk_partial import Partial
from service.client import Client
from service.errors import AttencodeError, ConfigError, DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from service.plain import encode_request
from service.request import EncodeRequest, EncodeResult

_CHUNK_BYTES = 2**20  # of text in one request, beside the number of texts; a server takes 4 MiB unless told otherwise
_MOST_ROWS = 4096  # in one chunk, whatever is wrong with them
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0

OnError = Literal["stop", "skip"]


class BadRow(AttencodeError):
    """Report a row of the input that has no vector, by its number."""

    status = grpc.StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """What decides the bytes of the output, beside the input and the model; kept from one run to the next.

    Attributes:
        pooling: cls, mean, max, last or sentence; None for the model's own.
        normalize: Scale vectors to length 1; None for the model's own.
        dimensions: Keep the first so many; None for all.
        truncation: right, left or off.
        prompt_name: Prompt of the model; None for its default.
        model: Name of a served model; empty for the first.
        data_type: float32 or float16.
        batch_size: Texts in a request.
        input_format: One of `bulk_files.INPUT_FORMATS`.
        field: Key of the text in .jsonl, column in .parquet.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    truncation: str = "right"
    prompt_name: str | None = None
    model: str = ""
    data_type: str = "float32"
    batch_size: int = 32
    input_format: str = "txt"
    field: str = "text"

    def request(self) -> dict[str, Any]:
        """Give the keyword arguments of `Client.encode`."""
        names = ("pooling", "normalize", "dimensions", "truncation", "prompt_name", "model", "data_type")
        return {"pooled": True, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: rows of the output, those of them without a vector, and the rows that an earlier run made."""

    rows: int
    skipped: int
    resumed_rows: int


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

    def __init__(self, client: Client, options: BulkOptions, in_flight: int, retry_s: float) -> None:
        """Store what to ask, how many requests are on the way, and the seconds to try a server that fails."""
        self._client = client
        self._request = options.request()
        self._in_flight = in_flight
        self._retry_s = retry_s

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
                answers.append(self._patiently([text for _, text in part]))
            except InvalidRequest as error:
                if len(part) == 1:
                    problems[part[0][0]] = "refused: " + re.sub(r"^input 0\b", "the text", str(error))
                else:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]  # the last is the next
        return chunk, _joined(answers), problems

    def _patiently(self, texts: list[str]) -> EncodeResult:
        end_s, pause_s = time.monotonic() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                return self._client.encode(texts, **self._request)
            except (QueueFull, Unavailable, DeadlineExceeded) as error:
                if isinstance(error, QueueFull):
                    pause_s = max(pause_s, min(error.retry_delay_s, _LONGEST_PAUSE_S))
                if time.monotonic() + pause_s > end_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


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


# ---------------------------------------------------------------- a whole file


def encode_file(
    client: Client,
    source: str,
    output: Path,
    options: BulkOptions,
    *,
    resume: bool = False,
    on_error: OnError = "stop",
    in_flight: int = 8,
    retry_s: float = 60.0,
    report: Callable[[str], None] = lambda _line: None,
    progress: Callable[[int], None] = lambda _rows: None,
) -> Summary:
    """Encode every text of a file into another file, a row (dim,) for each, in order.

    Args:
        client: Of the server.
        source: Path of the input, or `bulk_files.STDIN`.
        output: .npy, .safetensors (tensor `embeddings`), .jsonl (key `embedding`) or .parquet (column `embedding`).
        options: What is asked for.
        resume: Go on with what an earlier run left beside the output, if it left something.
        on_error: A row that has no vector ends the run, or has NaN or null in its place.
        in_flight: Requests on the way at once.
        retry_s: For so many seconds a server that is away or full is asked again.
        report: Takes a line about each row that is skipped.
        progress: Takes the number of rows that are new; first those of the earlier run.

    Raises:
        BadRow: A row has no vector, and on_error is stop.
        InvalidRequest: The server refuses the options themselves.
        ConfigError: The paths or formats do not fit, or what an earlier run left does not go with this one.
        Unavailable: No server answers, or none for longer than retry_s; likewise `QueueFull`, `DeadlineExceeded`.
        OSError: A file cannot be read or written.
    """
    form = _check(source, output, options)
    partial = Partial(output)
    partial.check(resume=resume)
    first = client.encode("text", **options.request())  # the options, the server and the model, before any work
    assert first.pooled is not None
    width = int(first.pooled.shape[1])
    batch_size = min(options.batch_size, client.get_model(options.model).max_inputs)
    dtype = np.dtype(options.data_type).newbyteorder("<")
    with contextlib.closing(partial):
        partial.open({**asdict(options), "model_digest": first.model_digest, "width": width}, width * dtype.itemsize)
        resumed = partial.rows
        progress(resumed)
        try:
            rows = bulk_files.read_rows(source, options.input_format, options.field)
            chunks = read_chunks(rows, batch_size, _skip_rows(rows, partial, source))
            for chunk, answer, refused in Pipeline(client, options, in_flight, retry_s).vectors(chunks):
                _check_model(answer, first)
                problems = {place: row.problem for place, row in enumerate(chunk.rows) if row.problem} | refused
                _report(chunk, problems, on_error, report)
                partial.add(_placed(chunk, problems, answer, width, dtype), len(problems), chunk.digest)
                progress(len(chunk.rows))
        except BaseException:
            partial.leave()
            raise
        partial.finish(form, width, options.data_type)
    return Summary(partial.rows, partial.skipped, resumed)


def _check(source: str, output: Path, options: BulkOptions) -> str:
    """Find what would fail in the end, before the work; gives the output's format."""
    form = bulk_files.output_format(output)
    if "parquet" in (form, options.input_format):
        bulk_files.require_pyarrow()
    if not output.parent.is_dir():
        raise ConfigError(f"the output's folder {output.parent} is not there; make it first")
    if source != bulk_files.STDIN:
        if output.exists() and output.samefile(source):
            raise ConfigError(f"the output {output} is the input; give another name")
        if Path(source).is_file():  # a pipe can be opened only once
            Path(source).open("rb").close()
        elif not Path(source).exists() or Path(source).is_dir():
            raise ConfigError(f"the input {source} is not a file")
    return form


def _skip_rows(rows: Iterator[Row], partial: Partial, source: str) -> Any:
    """Read past the rows that an earlier run made; gives the digest of what was read.

    Raises:
        ConfigError: They are not what that run had read.
    """
    digest, count = hashlib.sha256(), 0
    for row in itertools.islice(rows, partial.rows):
        add_to_digest(digest, row)
        count += 1
    if count < partial.rows or digest.hexdigest() != partial.digest:
        name = "the standard input" if source == bulk_files.STDIN else source
        raise ConfigError(
            f"the first {partial.rows} rows of {name} are not those that the earlier run encoded; "
            f"give the same input again, or {partial.anew}"
        )
    return digest


def _check_model(answer: EncodeResult | None, first: EncodeResult) -> None:
    if answer is not None and answer.model_digest != first.model_digest:
        raise ConfigError(
            f"the server has begun to answer from another model, {answer.model_digest} after {first.model_digest}; "
            "serve the first one and go on with --resume, or begin anew"
        )


def _report(chunk: Chunk, problems: dict[int, str], on_error: OnError, report: Callable[[str], None]) -> None:
    """Report the rows that have no vector.

    Raises:
        BadRow: There is one, and on_error is stop.
    """
    for place in sorted(problems):
        problem = f"line {chunk.rows[place].number}: {problems[place]}"
        if on_error == "stop":
            raise BadRow(f"{problem}; correct it or add --on-error skip, and go on with --resume")
        report(f"{problem}; skipped")


def _placed(
    chunk: Chunk, problems: dict[int, str], answer: EncodeResult | None, width: int, dtype: np.dtype[Any]
) -> NDArray[np.floating]:
    """Put a chunk's vectors beside NaN for what has none, (rows, dim)."""
    placed = np.full((len(chunk.rows), width), np.nan, dtype)
    if answer is not None:
        assert answer.pooled is not None
        placed[[place for place in range(len(chunk.rows)) if place not in problems]] = answer.pooled
    return placed


def left_rows(output: Path) -> bool:
    """Tell whether a run that ended early left rows beside its output."""
    return Partial(output).exists
