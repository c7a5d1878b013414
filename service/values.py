"""Values: what one option may be, and what is said when it is not: its name, what was expected, what came.

Whole numbers and truth values of numpy are as good as Python's own. May import: errors, numpy.
"""

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from service.errors import InvalidRequest

MOST_UNSIGNED = 2**32 - 1
"""Largest whole number that the contract's uint32 carries."""
LEAST_SIGNED, MOST_SIGNED = -(2**31), 2**31 - 1
"""Bounds of the contract's sint32."""

_SHOWN = 80  # letters of a value


def shown(value: object) -> str:
    """Write a value, cut where it is long."""
    try:
        written = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a value that cannot even be written is told by its kind
        written = f"a {type(value).__name__}"
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."


def is_whole(value: object) -> bool:
    """Tell whether something is one whole number; True and False are none."""
    dimensions: Any = getattr(value, "ndim", 0)
    if isinstance(value, bool | np.bool_) or dimensions:
        return False
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def flag(name: str, value: Any) -> bool:
    """Read an option that is on or off.

    Raises:
        InvalidRequest: It is neither.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InvalidRequest(f"{name} must be True or False, got {shown(value)}")


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Read a whole number.

    Raises:
        InvalidRequest: It is none, or beyond its bounds.
    """
    if is_whole(value) and least <= index(value) <= most:
        return index(value)
    raise InvalidRequest(f"{name} must be a whole number from {least} to {most}, got {shown(value)}")


def wholes(name: str, values: Any, least: int = LEAST_SIGNED, most: int = MOST_SIGNED) -> tuple[int, ...]:
    """Read a list of whole numbers.

    Raises:
        InvalidRequest: It is none, or one of them is beyond its bounds.
    """
    expected = f"{name} must hold whole numbers from {least} to {most}, got "
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(expected + shown(values))
    numbers = []
    for value in values:
        if not is_whole(value) or not least <= index(value) <= most:
            raise InvalidRequest(expected + shown(value))
        numbers.append(index(value))
    return tuple(numbers)


def text(name: str, value: Any) -> str:
    """Read a text that goes over the wire.

    Raises:
        InvalidRequest: It is none, or holds what UTF-8 has not.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} cannot be written as UTF-8: character {error.start} is {value[error.start]!r}, half of a pair of "
            "surrogates; repair it, for instance with text.encode('utf-8', 'replace').decode()"
        ) from error
    return value
