"""Bulk: a pooled vector for every text of a file, pipelined over EncodeStream, resumable after a kill at any moment.

Rows go to OUTPUT.partial as they come, and OUTPUT.partial.json, the journal, says how many of them count; in the end
they are written in the output's format and take its name at once.
May import: bulk_files, bulk_partial, bulk_pipeline, client, destination, request, errors, numpy.
"""

import contextlib
import errno
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from service import bulk_files, destination
from service.bulk_files import Row
from service.bulk_partial import COMPANIONS, Partial
from service.bulk_pipeline import Chunk, Patience, Pipeline, add_to_digest, read_chunks
from service.client import Client
from service.errors import AttencodeError, ConfigError, NotWritten
from service.request import EncodeResult, ModelInfo

_REMEDIES = {  # for what the server decides, by what it was
    "model_digest": "serve that artifact again",
    "provider": "serve it with --provider {} again",
    "precision": "serve it with --precision {} again",
}

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


def encode_file(
    client: Client,
    source: str,
    output: str | Path,
    options: BulkOptions,
    *,
    resume: bool = False,
    on_error: OnError = "stop",
    in_flight: int = 8,
    retry_s: float = 60.0,
    report: Callable[[str], None] = lambda _line: None,
    progress: Callable[[int], None] = lambda _rows: None,
) -> Summary | None:
    """Encode every text of a file into another file, a row (dim,) for each, in order.

    Args:
        client: Of the server.
        source: Path of the input, or `bulk_files.STDIN`.
        output: .npy, .safetensors (tensor `embeddings`), .jsonl (key `embedding`) or .parquet (column `embedding`).
        options: What is asked for.
        resume: Go on with what an earlier run left beside the output, if it left something.
        on_error: A row that has no vector ends the run, or has NaN or null in its place.
        in_flight: Requests on the way at once.
        retry_s: For so many seconds a server that is away or full is asked again, at the start too.
        report: Takes a line about each row that is skipped, and about waiting for the server.
        progress: Takes the number of rows that are new; first those of the earlier run.

    Returns:
        How it ended; None where resume found the output complete and did nothing.

    Raises:
        BadRow: A row has no vector, and on_error is stop.
        InvalidRequest: The server refuses the options themselves.
        ConfigError: The paths or formats do not fit, or what an earlier run left does not go with this one.
        Unavailable: No server answers, or none for longer than retry_s; likewise `QueueFull`, `DeadlineExceeded`.
        NotWritten: The disk is full, or takes the output no more for another reason; what is done is kept.
        OSError: The input cannot be read.
    """
    form = _check(source, output, options)
    partial, patience = Partial(Path(output)), Patience(retry_s, report)
    if resume and partial.is_over:
        return None
    partial.check(resume=resume)
    request, noun = options.request(), "row" if options.input_format == "parquet" else "line"
    first = patience.ask(lambda: client.encode("text", **request))  # options, server and model, before any work
    assert first.pooled is not None
    server, width = _Server(client, options.model, patience), int(first.pooled.shape[1])
    dtype = np.dtype(options.data_type).newbyteorder("<")
    facts = {**asdict(options), "model_digest": first.model_digest, **server.facts, "width": width}
    with contextlib.closing(partial), _advised(partial, source, options, form, width):
        partial.open(facts, width * dtype.itemsize, _REMEDIES)
        resumed = partial.rows
        progress(resumed)
        try:
            rows = bulk_files.read_rows(source, options.input_format, options.field)
            chunks = read_chunks(rows, min(options.batch_size, server.max_inputs), _skip_rows(rows, partial, source))
            for chunk, answer, refused in Pipeline(client, request, in_flight, patience).vectors(chunks):
                _check_model(answer, first)
                problems = {place: row.problem for place, row in enumerate(chunk.rows) if row.problem} | refused
                _report(chunk, problems, noun, on_error, report)
                partial.add(_placed(chunk, problems, answer, width, dtype), len(problems), chunk.digest)
                progress(len(chunk.rows))
                if partial.is_checkpoint_due:
                    server.check()
                    partial.checkpoint()
            server.check()
            partial.finish(form, width, options.data_type)
        except BaseException as error:
            partial.leave(count=isinstance(error, Exception) and server.is_same())
            raise
    return Summary(partial.rows, partial.skipped, resumed)


def _check(source: str, output: str | Path, options: BulkOptions) -> str:
    """Find what would fail in the end, before the work; gives the output's format."""
    path = Path(output)
    form = bulk_files.output_format(path)
    if "parquet" in (form, options.input_format):
        bulk_files.require_pyarrow()
    if found := destination.trouble(output, COMPANIONS):
        raise ConfigError(found)
    if source != bulk_files.STDIN:
        for place in (path, *(path.with_name(path.name + ending) for ending in COMPANIONS)):
            if place.exists() and place.samefile(source):
                raise ConfigError(f"the output {place} is the input; give another name")
        if Path(source).is_file():  # a pipe can be opened only once
            Path(source).open("rb").close()
        elif not Path(source).exists() or Path(source).is_dir():
            raise ConfigError(f"the input {source} is not a file")
    return form


class _Server:
    """What of a server, beside its model, decides the bytes; no answer carries it, so it is asked for now and then."""

    def __init__(self, client: Client, model: str, patience: Patience) -> None:
        """Ask for what it is at the start."""
        self._client = client
        self._model = model
        self._patience = patience
        info = patience.ask(lambda: client.get_model(model))
        self.max_inputs = info.max_inputs
        self.facts = _facts(info)

    def check(self) -> None:
        """Check that it has stayed what it was; all rows until now are its own then.

        Raises:
            ConfigError: It was started anew in another way.
        """
        facts = _facts(self._patience.ask(lambda: self._client.get_model(self._model)))
        if facts != self.facts:
            now, before = ("{precision} on {provider}".format(**each) for each in (facts, self.facts))
            raise ConfigError(
                f"the server has begun to answer in {now}, after {before}; serve it with --provider "
                f"{self.facts['provider']} --precision {self.facts['precision']} again and go on with --resume, "
                "or begin anew"
            )

    def is_same(self) -> bool:
        """Tell whether it is there and what it was."""
        try:
            return _facts(self._client.get_model(self._model)) == self.facts
        except AttencodeError:
            return False


def _facts(info: ModelInfo) -> dict[str, str]:
    return {"provider": info.provider, "precision": info.precision}


@contextlib.contextmanager
def _advised(partial: Partial, source: str, options: BulkOptions, form: str, width: int) -> Iterator[None]:
    """Add to the report of a file that cannot be written what is kept, how much room the rest takes, and what to do."""
    try:
        yield
    except NotWritten as error:
        kept, parts, way = partial.counted, [], "go on with --resume" if partial.counted else "begin anew"
        total = bulk_files.count_rows(source, options.input_format)
        of_all = "" if total is None else f" of {total:,}"
        parts.append(f"{kept:,}{of_all} rows are kept" if kept else "no row is kept")
        if destination.is_no_room(error):
            if total is not None:
                row_bytes = width * np.dtype(options.data_type).itemsize
                more = (total - kept) * row_bytes + bulk_files.final_bytes(form, total, width, options.data_type)
                parts.append(f"what is missing takes about {destination.in_words(more)} in all")
            way = f"{'raise the limit' if error.errno == errno.EFBIG else 'make room'} and {way}"
        told = NotWritten("; ".join((str(error), *parts, way)))
        told.errno = error.errno
        raise told from error


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


def _report(
    chunk: Chunk, problems: dict[int, str], noun: str, on_error: OnError, report: Callable[[str], None]
) -> None:
    """Report the rows that have no vector.

    Raises:
        BadRow: There is one, and on_error is stop.
    """
    for place in sorted(problems):
        problem = f"{noun} {chunk.rows[place].number}: {problems[place]}"
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


def left_rows(output: str | Path) -> bool:
    """Tell whether a run that ended early left rows beside its output."""
    try:
        return Partial(Path(output)).exists
    except (OSError, ValueError):  # no name that a file could have
        return False
