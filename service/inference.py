"""Inference: one batch on a session, and what can be saved of one that does not go well.

What holds NaN or infinity is never an answer: its rows run again in float32 where the session computes in less, and
fail alone where that does not help. A batch for which there is no memory runs in halves.
May import: batching, causes, cross, finite, reduce, session, numpy.
"""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch
from service.causes import cause_of
from service.cross import padded_targets
from service.finite import broken_rows
from service.reduce import Look
from service.session import Session


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch yielded.

    Attributes:
        arrays: The batch's outputs by name, padding included.
        inference_s: How long the graph ran.
        looked: What was wanted of rows' attention: row -> arrays by the names of `InputResult`.
        failed: Rows that have no place in the arrays' meaning, each with its error.
        replica: Id of the replica that ran it; empty in this process, or where several did.
        again: Rows that were computed again in float32.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    inference_s: float
    looked: Mapping[int, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    failed: Mapping[int, Exception] = field(default_factory=dict)
    replica: str = ""
    again: int = 0


class NotFinite(ArithmeticError):
    """Report an input for which the model computes NaN or infinity."""


def infer(session: Session, batch: Batch, *, alone: bool) -> BatchResult:
    """Run a batch.

    Args:
        session: Where.
        batch: The batch.
        alone: Whether no other batch runs beside it.

    Raises:
        Exception: Whatever ONNX Runtime raises; of a batch for which there was no memory, what its last row raised
            where no row could be computed.
    """
    started = time.perf_counter()
    try:
        result = _checked(session, batch, alone=alone)
        if not result.again:
            return result
    except Exception as error:
        if cause_of(error) != "memory" or len(batch.lengths) == 1:
            raise
        result = _in_halves(session, batch)
    return replace(result, inference_s=time.perf_counter() - started)


def join(batch: Batch, parts: Iterable[tuple[SequenceOf[int], BatchResult]]) -> BatchResult:
    """Put the results of a batch's parts together; rows that no part has hold zeros.

    Args:
        batch: The whole batch.
        parts: Ascending numbers of rows in it, and what they yielded as a batch of their own.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    looked: dict[int, Mapping[str, NDArray[Any]]] = {}
    failed: dict[int, Exception] = {}
    seconds, again = 0.0, 0
    for numbers, result in parts:
        for name, array in result.arrays.items():
            rows = batch.rows_of(name)
            if name not in arrays:
                arrays[name] = np.zeros((len(rows), *array.shape[1:]), dtype=np.float32)
            arrays[name][np.isin(rows, numbers)] = array
        looked |= {numbers[row]: found for row, found in result.looked.items()}
        failed |= {numbers[row]: error for row, error in result.failed.items()}
        seconds, again = max(seconds, result.inference_s), again + result.again
    return BatchResult(arrays, seconds, looked, failed, again=again)


def _checked(session: Session, batch: Batch, *, alone: bool) -> BatchResult:
    """Run a batch and see whether all that it yields is finite."""
    started = time.perf_counter()
    arrays = session.run(batch, alone=alone)
    looked = _looked(session, batch, arrays, alone=alone) if batch.looks else {}
    wanted = {name: arrays[name] for name in batch.outputs}
    broken = broken_rows(batch, wanted, looked)
    result = BatchResult(wanted, time.perf_counter() - started, looked)
    return _saved(session, batch, result, broken, alone=alone) if broken else result


def _looked(
    session: Session, batch: Batch, arrays: Mapping[str, NDArray[np.float32]], *, alone: bool
) -> dict[int, Mapping[str, NDArray[Any]]]:
    """Compute what is wanted of rows' attention, and of their targets' to them."""
    found: dict[int, Mapping[str, NDArray[Any]]] = {}
    if any(isinstance(look, Look) for look in batch.looks):
        found |= session.look(batch, arrays["hidden_states"], alone=alone)
    if padded_targets(batch.looks):
        found |= session.align(batch, arrays["last_hidden_state"], alone=alone)
    return found


def _saved(session: Session, batch: Batch, result: BatchResult, broken: dict[int, str], *, alone: bool) -> BatchResult:
    """Replace the rows that are not finite by what float32 makes of them, where the session computes in less."""
    rows = sorted(broken)
    exact = session.in_float32()
    if exact is None:
        device = session.placement.device
        failed = {row: NotFinite(f"the model computes NaN or infinity in {broken[row]} ({device})") for row in rows}
        return replace(result, failed=failed)
    try:
        again = _checked(exact, batch.part(rows), alone=alone)
    except Exception as error:  # noqa: BLE001 - the other rows are well
        return replace(result, failed=dict.fromkeys(rows, error), again=len(rows))
    joined = join(batch, [(range(len(batch.lengths)), result), (rows, again)])
    return replace(joined, again=len(rows))


def _in_halves(session: Session, batch: Batch) -> BatchResult:
    """Run a batch for which there was no memory in two parts, one after the other, and each of them likewise."""
    count = len(batch.lengths)
    parts: list[tuple[SequenceOf[int], BatchResult]] = []
    failed: dict[int, Exception] = {}
    for numbers in (range(count // 2), range(count // 2, count)):
        try:
            parts.append((numbers, infer(session, batch.part(numbers), alone=False)))
        except Exception as error:
            if cause_of(error) != "memory":
                raise
            failed |= dict.fromkeys(numbers, error)
    if not parts:
        raise failed[count - 1]
    joined = join(batch, parts)
    return replace(joined, failed={**joined.failed, **failed})
