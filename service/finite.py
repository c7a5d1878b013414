"""Finite: which rows of a batch's outputs hold NaN or infinity.

Pure: no clock, no I/O. May import: batching, numpy.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.batching import Batch, unpad


def is_finite(array: NDArray[Any]) -> bool:
    """Tell whether every number is finite; numbers of any kind.

    The scalar product with itself is finite only if all are, and takes one pass without another array. Where it is not,
    which large numbers do too, each is looked at.
    """
    if array.dtype.kind != "f":
        return True
    flat = array.reshape(-1)
    return bool(np.isfinite(np.vdot(flat, flat))) or bool(np.isfinite(flat).all())


def broken_rows(
    batch: Batch, arrays: Mapping[str, NDArray[Any]], looked: Mapping[int, Mapping[str, NDArray[Any]]]
) -> dict[int, str]:
    """Find the rows of which some output is not finite; what stands in padded places does not count.

    Args:
        batch: The batch.
        arrays: Its outputs by name.
        looked: What was wanted of rows' attention.

    Returns:
        Row -> name of the first such output.
    """
    broken: dict[int, str] = {}
    for name, array in arrays.items():
        if not is_finite(array):
            for row in batch.rows_of(name).tolist():
                if not is_finite(unpad(batch, name, array, row)):
                    broken.setdefault(row, name)
    for row, found in looked.items():
        for name, array in found.items():
            if not is_finite(array):
                broken.setdefault(row, name)
    return broken
