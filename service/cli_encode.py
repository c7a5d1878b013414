"""The `attencode encode --input FILE --output FILE` command: flags, progress and report of `service.bulk`.

May import: cli_client, errors; bulk and bulk_files when it runs.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from service.cli_client import open_client
from service.errors import AttencodeError, ConfigError, NotWritten

_FILE_FLAGS = {
    "input_format": None,
    "field": "text",
    "data_type": "float32",
    "batch_size": 32,
    "in_flight": 8,
    "retry_for": 60.0,
    "on_error": "stop",
    "resume": False,
}


def add_file_arguments(encode: argparse.ArgumentParser) -> None:
    """Add the flags of files to the command that encodes texts."""
    files = encode.add_argument_group(
        "files", "pooled vectors of every line of a file, instead of TEXT; a row for each, NaN or null where skipped"
    )
    add = files.add_argument
    add("--input", metavar="FILE", help=".txt (a text a line), .jsonl or .parquet; - for the standard input")
    add("--output", metavar="FILE", help=".npy, .safetensors, .jsonl or .parquet")
    add("--input-format", choices=("txt", "jsonl", "parquet"), help="the name's ending if unset; txt for -")
    add("--field", default="text", metavar="NAME", help="JSON key or parquet column of the text; text if unset")
    add("--data-type", choices=("float32", "float16"), default="float32", help="of the vectors; float32 if unset")
    add("--on-error", choices=("stop", "skip"), default="stop", help="at a line that has no vector; stop if unset")
    add("--resume", action="store_true", help="go on where an earlier run was interrupted")
    add("--batch-size", type=_count, default=32, metavar="TEXTS", help="texts in a request; 32 if unset")
    add("--in-flight", type=_count, default=8, metavar="REQUESTS", help="requests on the way at once; 8 if unset")
    add(
        "--retry-for",
        type=_patience,
        default=60.0,
        metavar="SECONDS",
        help="ask a server that is away or full so long, at the start too; 60 if unset",
    )


def wants_files(parsed: argparse.Namespace) -> bool:
    """Tell whether files are to be encoded, not texts.

    Raises:
        ConfigError: The two are mixed, or one of what each needs is missing.
    """
    if parsed.input is None and parsed.output is None:
        if not parsed.texts:
            raise ConfigError("encode wants texts, or --input FILE and --output FILE")
        given = [name for name, unset in _FILE_FLAGS.items() if getattr(parsed, name) != unset]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ConfigError(f"{flags} goes with --input and --output")
        return False
    if parsed.input is None or parsed.output is None:
        raise ConfigError("--input and --output go together; give both")
    if parsed.texts or parsed.json or parsed.token_embeddings:
        raise ConfigError("texts, --json and --token-embeddings do not go with --input; leave them out")
    return True


def encode_files(parsed: argparse.Namespace) -> int:
    """Encode the input into the output; gives the exit status."""
    from service import bulk, bulk_files  # noqa: PLC0415 - needs gRPC, which other commands may do without

    options = bulk.BulkOptions(
        pooling=parsed.pooling,
        normalize=parsed.normalize,
        dimensions=parsed.dimensions,
        truncation=parsed.truncation,
        prompt_name=parsed.prompt_name,
        model=parsed.model,
        data_type=parsed.data_type,
        batch_size=parsed.batch_size,
        input_format=bulk_files.input_format(parsed.input, parsed.input_format),
        field=parsed.field,
    )
    with (
        _ended_in_order(),
        open_client(parsed) as client,
        _progress(lambda: bulk_files.count_rows(parsed.input, options.input_format)) as (progress, report),
    ):
        try:
            summary = bulk.encode_file(
                client,
                parsed.input,
                parsed.output,
                options,
                resume=parsed.resume,
                on_error=parsed.on_error,
                in_flight=parsed.in_flight,
                retry_s=parsed.retry_for,
                report=report,
                progress=progress,
            )
        except (AttencodeError, OSError, RuntimeError, KeyboardInterrupt, SystemExit) as error:
            if not isinstance(error, (bulk.BadRow, NotWritten)) and bulk.left_rows(parsed.output):
                report("what is done so far is kept; go on with --resume")
            raise signal_behind(error) or error from None
    if summary is None:
        report(
            f"{parsed.output} is complete, and there is no unfinished run to resume; leave --resume out to encode anew"
        )
    else:
        report(_told(summary))
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM, and a terminal that is closed, end the run as Ctrl-C does, with 128 + the signal as exit status."""
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    names = ("SIGTERM", "SIGHUP")
    numbers = [number for name in names if (number := getattr(signal, name, None)) is not None]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def signal_behind(error: BaseException | None) -> KeyboardInterrupt | SystemExit | None:
    """Give the end that a signal asked for, where an error hides it; None where none did.

    One that comes while gRPC waits on a condition may leave it without its lock, whose release then fails.
    """
    while error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
        error = error.__context__
    return error


def _told(summary: Any) -> str:
    skipped = f", {summary.skipped:,} of them skipped" if summary.skipped else ""
    resumed = f", {summary.resumed_rows:,} by an earlier run" if summary.resumed_rows else ""
    return f"{summary.rows:,} rows{skipped}{resumed}"


@contextmanager
def _progress(count: Callable[[], int | None]) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Show a bar with texts a second on a terminal where tqdm is there; gives what advances it and what prints."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 - an extra
    except ImportError:
        tqdm = None  # type: ignore[assignment,misc]
    if tqdm is None or not sys.stderr.isatty():
        yield (lambda _rows: None), (lambda line: _print(f"attencode: {line}"))
        return
    with tqdm(unit=" texts", file=sys.stderr, dynamic_ncols=True) as bar:
        begun = False

        def advance(rows: int) -> None:
            nonlocal begun
            if begun:
                bar.update(rows)
            else:  # what an earlier run did is no part of the speed
                begun = True
                bar.total, bar.initial, bar.n, bar.last_print_n = count(), rows, rows, rows
                bar.unpause()

        yield advance, lambda line: bar.write(f"attencode: {line}", file=sys.stderr)


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _count(word: str) -> int:
    """Read a number from 1 to 65536."""
    if not word.isascii() or not word.isdigit() or not 1 <= int(word) <= 65_536:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 65536, got {word!r}")
    return int(word)


def _patience(word: str) -> float:
    """Read seconds from 0 to a day."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to 86400, got {word!r}")
    return seconds
