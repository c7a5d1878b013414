"""Ending: how a process ends that can be of no more use and cannot wait for its threads.

May import: logs, errors.
"""

import faulthandler
import logging
import os
import sys
from collections.abc import Awaitable
from typing import NoReturn

from service.errors import ClusterLost, Lost
from service.logs import last_line

LOST_STATUS = 3
"""Exit status of a process whose models are gone for good: no device, a batch that does not end, other weights."""


def end_now(reason: str, status: int = LOST_STATUS) -> NoReturn:
    """End the process at once, with a last line that says why.

    A thread that hangs inside the device's driver can neither be stopped nor waited for, and the interpreter's orderly
    end would do the latter.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.write(last_line(reason, __name__) + "\n")
    sys.stderr.flush()
    os._exit(status)


def show_crashes() -> None:
    """Have a signal that kills, such as the SIGBUS of a mapped file that was cut, name itself and where it struck."""
    try:
        faulthandler.enable(sys.stderr)
    except (OSError, ValueError, AttributeError):  # stderr has no file
        return


def show_threads() -> None:
    """Write to stderr where each thread is: files, lines and functions, no values."""
    try:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    except (OSError, ValueError, AttributeError):  # stderr has no file
        return


async def end_when_lost(life: Awaitable[None]) -> None:
    """Await a server's life; where its models are gone for good, end the process, with 1 where Ray is to blame."""
    try:
        await life
    except Lost as error:
        end_now(str(error), 1 if isinstance(error, ClusterLost) else LOST_STATUS)
