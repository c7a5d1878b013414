"""Supervision: no task, callback or thread of a server ends unnoticed.

May import: metrics, errors.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from service import metrics
from service.errors import TaskLost

_LOG = logging.getLogger(__name__)
_MOST_CRASHES = 5  # in a row
_CALM_S = 60.0  # after which a crash is the first one again
_FIRST_PAUSE_S = 0.1  # doubled with each crash in a row


async def keep(name: str, work: Callable[[], Coroutine[Any, Any, None]], lost: asyncio.Future[None]) -> None:
    """Run work that is to go on as long as the server, and again when it fails; at last the server is lost.

    Args:
        name: What it is, for the log and the metric.
        work: Makes the coroutine.
        lost: Fails when the work cannot be kept up.
    """
    loop, crashes = asyncio.get_running_loop(), 0
    while True:
        began_s = loop.time()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the work is to go on
            crashes = 1 if loop.time() - began_s > _CALM_S else crashes + 1
            metrics.record_crash(name)
            _LOG.critical("%s failed, %d times in a row now", name, crashes, exc_info=error)
            if crashes >= _MOST_CRASHES:
                if not lost.done():
                    lost.set_exception(TaskLost(f"{name} failed {crashes} times in a row; the log says why"))
                return
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (crashes - 1))
        else:
            return


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Log and count what fails on a loop where nobody awaits it: callbacks, and tasks that nobody asks."""

    def unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        metrics.record_crash("event loop")
        what = re.split(r"[(<]", context.get("message") or "no message")[0]  # behind it there are values
        _LOG.critical("what nobody awaits has failed: %s", what.strip(), exc_info=context.get("exception"))

    loop.set_exception_handler(unhandled)


def watch_threads() -> None:
    """Log and count threads that end by an error."""

    def ended(told: threading.ExceptHookArgs) -> None:
        if told.exc_type is SystemExit:
            return
        metrics.record_crash("thread")
        name = told.thread.name if told.thread is not None else "unknown"
        told_of = (told.exc_type, told.exc_value or told.exc_type(), told.exc_traceback)
        _LOG.critical("the thread %s ended by an error", name, exc_info=told_of)

    threading.excepthook = ended
