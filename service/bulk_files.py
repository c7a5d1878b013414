"""Bulk files: texts read from .txt, .jsonl and .parquet row by row, and rows of vectors written as a file.

Whatever a file's size, a bounded part of it is in memory. pyarrow is imported for .parquet alone.
May import: errors, numpy.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from service.errors import ConfigError

INPUT_FORMATS = ("txt", "jsonl", "parquet")
OUTPUT_FORMATS = ("npy", "parquet", "jsonl", "safetensors")
STDIN = "-"

_LONGEST_LINE_BYTES = 16 * 2**20
_PARQUET_BATCH_ROWS = 1024
_ROW_GROUP_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One line or row of the input.

    Attributes:
        number: Its place, from 1; in .txt and .jsonl the line's number.
        text: What is to be encoded; None where there is a problem.
        problem: Why there is no text; empty where there is one.
        raw: The bytes that were read, or a digest of very many; they tell one input from another.
    """

    number: int
    text: str | None
    problem: str
    raw: bytes


def input_format(name: str, given: str | None = None) -> str:
    """Tell the format of an input: the one given, else the name's ending; txt for the standard input.

    Raises:
        ConfigError: The name says nothing, or .parquet shall come from the standard input.
    """
    chosen = given or ("txt" if name == STDIN else Path(name).suffix.removeprefix("."))
    if chosen not in INPUT_FORMATS:
        raise ConfigError(
            f"the input {name} must end in .txt, .jsonl or .parquet, or --input-format must say what it is"
        )
    if name == STDIN and chosen == "parquet":
        raise ConfigError("parquet cannot be read from the standard input; give a file")
    return chosen


def output_format(path: Path) -> str:
    """Tell the format of an output by its ending.

    Raises:
        ConfigError: It has none of the four.
    """
    chosen = path.suffix.removeprefix(".")
    if chosen not in OUTPUT_FORMATS:
        raise ConfigError(f"the output {path} must end in .npy, .parquet, .jsonl or .safetensors")
    return chosen


def require_pyarrow() -> tuple[Any, Any]:
    """Give pyarrow and its module for .parquet.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("parquet needs the package pyarrow; install attencode[files]") from error
    return pa, pq


# ---------------------------------------------------------------- reading


def read_rows(name: str, form: str, field: str) -> Iterator[Row]:
    """Read an input's rows in their order.

    Args:
        name: Path of the file, or `STDIN`.
        form: One of `INPUT_FORMATS`.
        field: Key of the text in .jsonl, column in .parquet.

    Raises:
        OSError: The file cannot be read.
        ConfigError: A .parquet file has no such column of strings, or is damaged; or pyarrow is missing.
    """
    if form == "parquet":
        return _read_parquet(name, field)
    return _read_lines(name, field if form == "jsonl" else None)


def count_rows(name: str, form: str) -> int | None:
    """Count a file's rows ahead, for a progress bar; None where that would consume them."""
    if not Path(name).is_file():
        return None
    if form == "parquet":
        _pa, pq = require_pyarrow()
        with pq.ParquetFile(name) as file:
            return int(file.metadata.num_rows)
    lines, last = 0, b"\n"
    with Path(name).open("rb") as file:
        while block := file.read(2**20):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def _read_lines(name: str, field: str | None) -> Iterator[Row]:
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") if name == STDIN else Path(name).open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE_BYTES + 1):
            number += 1
            if len(line) > _LONGEST_LINE_BYTES and not line.endswith(b"\n"):
                problem = f"the line has more than {_LONGEST_LINE_BYTES:,} bytes"
                yield Row(number, None, problem, _digest_rest(file, line))
                continue
            content = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                content = content.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as some editors write
            yield _read_row(number, content, line, field)


def _digest_rest(file: BinaryIO, line: bytes) -> bytes:
    """Read on to the end of a line too long to keep."""
    digest = hashlib.sha256(line)
    while line and not line.endswith(b"\n"):
        line = file.readline(_LONGEST_LINE_BYTES)
        digest.update(line)
    return digest.digest()


def _read_row(number: int, content: bytes, raw: bytes, field: str | None) -> Row:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return Row(number, None, f"invalid UTF-8: {error.reason} at byte {error.start}", raw)
    if field is None:
        return Row(number, text, "", raw) if text else Row(number, None, "the text is empty", raw)
    text, problem = _field_of(text, field)
    return Row(number, text if not problem else None, problem, raw)


def _field_of(line: str, field: str) -> tuple[str, str]:
    """Take a field of a JSON object; gives it and what is wrong with it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"invalid JSON: {error}"
    if not isinstance(value, dict):
        return "", f"no JSON object but {type(value).__name__}"
    if field not in value:
        return "", f"the field {field!r} is missing"
    text = value[field]
    if not isinstance(text, str):
        return "", f"the field {field!r} must be a string, got {type(text).__name__}"
    try:
        text.encode()
    except UnicodeEncodeError:  # an escape may name half a character
        return "", f"the field {field!r} holds a lone surrogate, which is no character"
    return text, "" if text else "the text is empty"


def _read_parquet(name: str, field: str) -> Iterator[Row]:
    pa, pq = require_pyarrow()
    number = 0
    try:
        with pq.ParquetFile(name, buffer_size=2**20, pre_buffer=False) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise ConfigError(f"{name} has no column {field!r}; --field takes one of {', '.join(schema.names)}")
            kind = schema.field(field).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ConfigError(f"the column {field!r} of {name} must hold strings, got {kind}")
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS, columns=[field]):
                for content in batch.column(0).cast(kind).cast(pa.large_binary()).to_pylist():
                    number += 1
                    if content is None:
                        yield Row(number, None, "the text is null", b"\xff")  # a byte that no UTF-8 has
                    else:
                        yield _read_row(number, content, content, None)
    except pa.ArrowException as error:
        raise ConfigError(f"{name} cannot be read after row {number}: {error}") from error


# ---------------------------------------------------------------- writing


def write_vectors(form: str, file: BinaryIO, raw: BinaryIO, shape: tuple[int, int], data_type: str) -> None:
    """Write raw rows as a file of their final format.

    A row of NaN alone stands for an input row without a vector: it stays so in .npy and .safetensors, and is null
    in .jsonl and .parquet.

    Args:
        form: One of `OUTPUT_FORMATS`.
        file: Where the format goes.
        raw: The rows (rows, dim), little-endian, one after the other.
        shape: Rows and dim.
        data_type: float32 or float16.

    Raises:
        ConfigError: .parquet without pyarrow.
        OSError: What the file system says.
    """
    dtype = np.dtype(data_type).newbyteorder("<")
    writer: Callable[[BinaryIO, Iterable[NDArray[np.floating]], tuple[int, int], np.dtype[Any]], None] = {
        "npy": _write_npy,
        "safetensors": _write_safetensors,
        "jsonl": _write_jsonl,
        "parquet": _write_parquet,
    }[form]
    writer(file, _blocks(raw, shape, dtype), shape, dtype)


def final_bytes(form: str, rows: int, width: int, data_type: str) -> int:
    """Tell about how many bytes the rows (rows, dim) take in a final format; JSON has some 20 letters a number."""
    number_bytes = 20 if form == "jsonl" else np.dtype(data_type).itemsize
    return rows * width * number_bytes


def _blocks(raw: BinaryIO, shape: tuple[int, int], dtype: np.dtype[Any]) -> Iterator[NDArray[np.floating]]:
    """Read raw rows some MiB at a time, each block (rows, dim)."""
    rows, width = shape
    row_bytes = width * dtype.itemsize
    step = max(1, _ROW_GROUP_BYTES // row_bytes)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        yield np.frombuffer(raw.read(count * row_bytes), dtype).reshape(count, width)


def _write_npy(
    file: BinaryIO, blocks: Iterable[NDArray[np.floating]], shape: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.writelines(block.tobytes() for block in blocks)


def _write_safetensors(
    file: BinaryIO, blocks: Iterable[NDArray[np.floating]], shape: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    """Write one tensor: the header's length in 8 bytes, the header padded to whole 8 bytes, the data.

    Source: the format's description in the README of huggingface/safetensors.
    """
    tensor = {
        "dtype": {2: "F16", 4: "F32"}[dtype.itemsize],
        "shape": shape,
        "data_offsets": [0, shape[0] * shape[1] * dtype.itemsize],
    }
    header = json.dumps({"embeddings": tensor}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    file.writelines(block.tobytes() for block in blocks)


def _write_jsonl(
    file: BinaryIO, blocks: Iterable[NDArray[np.floating]], _shape: tuple[int, int], _dtype: np.dtype[Any]
) -> None:
    for block in blocks:
        file.writelines(
            json.dumps({"embedding": None if missing else row.tolist()}).encode() + b"\n"
            for row, missing in zip(block, _missing(block), strict=True)
        )


def _write_parquet(
    file: BinaryIO, blocks: Iterable[NDArray[np.floating]], shape: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    pa, pq = require_pyarrow()
    kind = pa.list_(pa.float16() if dtype.itemsize == 2 else pa.float32(), shape[1])
    schema = pa.schema([pa.field("embedding", kind)])
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        for block in blocks:
            values = pa.array(block.reshape(-1).astype(dtype.newbyteorder("=")))
            column = pa.FixedSizeListArray.from_arrays(values, type=kind, mask=pa.array(_missing(block)))
            writer.write_table(pa.table([column], schema=schema), row_group_size=len(block))


def _missing(block: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Tell which rows of (rows, dim) have no vector, (rows,)."""
    missing: NDArray[np.bool_] = np.isnan(block).all(axis=1)
    return missing
