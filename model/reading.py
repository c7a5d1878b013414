"""Reading: single fields of a `config.json`, each held to what it must be, by its name.

May import: config, errors.
"""

import sys
from collections.abc import Mapping
from typing import Any

from model.config import ACTIVATIONS
from model.errors import CheckpointError

Raw = Mapping[str, Any]
"""A parsed `config.json`."""


def head_dim(size_name: str, size: int, heads_name: str, heads: int) -> int:
    """Give the width of one head, of a width that must be a multiple of the heads."""
    if heads < 1 or size % heads:
        raise CheckpointError(f"config field {size_name}={size} is not divisible by {heads_name}={heads}")
    return size // heads


def activation(raw: Raw, name: str) -> str:
    """Read the name of an activation that the encoder has."""
    value = raw.get(name)
    if not isinstance(value, str):
        raise CheckpointError(f"config field {name} must name an activation, got {value!r}")
    return supported(name, value, "silu" if value == "swish" else value)  # one function of two names


def supported(name: str, value: str, activation: str) -> str:
    """Give an activation that the encoder has; `name` and `value` are what the config says."""
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"config field {name}={value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return activation


def integer(raw: Raw, name: str, default: int | None = None) -> int:
    """Read a whole number."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config field {name} must be a whole number, got {value!r}")
    return value


def positive(raw: Raw, name: str, default: int | None = None) -> int:
    """Read a whole number of at least 1."""
    value = integer(raw, name, default)
    if value < 1:
        raise CheckpointError(f"config field {name} must be at least 1, got {value}")
    return value


def whole(raw: Raw, name: str, default: int) -> int:
    """Read a whole number that is not below 0."""
    value = integer(raw, name, default)
    if value < 0:
        raise CheckpointError(f"config field {name} must not be below 0, got {value}")
    return value


def number(raw: Raw, name: str, default: float) -> float:
    """Read a finite number that is not below 0."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config field {name} must be a number, got {value!r}")
    if not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"config field {name} must be finite and not below 0, got {value}")
    return float(value)


def flag(raw: Raw, name: str, *, default: bool) -> bool:
    """Read true or false."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config field {name} must be true or false, got {value!r}")
    return value


def mapping(raw: Raw, name: str) -> Mapping[str, Any]:
    """Read an object, an empty one where there is none."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config field {name} must be an object, got {value!r:.200}")
    return value or {}


def above_zero(name: str, value: object) -> float:
    """Give a number that must be finite and above 0; `name` is where the config has it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config field {name} must be a finite number above 0, got {value!r}")
    return float(value)
