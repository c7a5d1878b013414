"""Arguments: what the load tests' command lines share: numbers that must be above zero, and errors as messages.

May import: service's errors.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import AttencodeError


def above_zero(text: str) -> float:
    """Read a number above zero."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def one_or_more(text: str) -> int:
    """Read a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """End the program by the message of an error that says what to change, without a traceback."""
    try:
        yield
    except (AttencodeError, ConnectionError) as error:
        sys.exit(str(error))
