"""Callers: who asks, as far as turns and limits are concerned. May import: nothing of the project."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    Attributes:
        name: What tells callers apart: the name of an API key, or the address that a connection comes from.
        weight: Its share of the device beside others that wait, 1 for an ordinary caller.
    """

    name: str
    weight: float = 1.0


NOBODY = Caller("")
"""Who asks where nothing tells callers apart."""
