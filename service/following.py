"""Following: files that are looked at again and again while a server runs; a disk that hangs holds up nobody.

May import: metrics.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from service import metrics

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.5
_SLOW_S = 10.0


async def follow(file: str, look: Callable[[], bool]) -> None:
    """Look at files for ever, and tell the metrics whether what is on the disk is in use.

    Args:
        file: What they are, for the metric, the log and the thread's name.
        look: Takes over what is new, on a thread of its own; False if it cannot be used.
    """
    while True:
        found = _apart(file, look)
        if not (await asyncio.wait({found}, timeout=_SLOW_S))[0]:
            metrics.record_file(file, rejected=True)
            _LOG.warning("the disk with the files of %s has not answered for %g s; what was read stays", file, _SLOW_S)
        metrics.record_file(file, rejected=not await found)
        await asyncio.sleep(_LOOK_S)


def _apart(name: str, work: Callable[[], bool]) -> asyncio.Future[bool]:
    """Run work on a thread that the end of the process does not wait for, as it does for those of a pool."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bool] = loop.create_future()

    def settle(result: bool, error: Exception | None) -> None:  # noqa: FBT001
        if found.done():
            return
        if error is None:
            found.set_result(result)
        else:
            found.set_exception(error)

    def run() -> None:
        result, failed = False, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whoever awaits gets it
            failed = error
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name=f"look-{name}", daemon=True).start()
    return found
