"""Device: whether what computes the batches of this process still does.

It is gone when a batch does not end, when a thread that ran batches died, or when a trial batch fails after others did:
single failures are the batches' own. What is gone stays gone. A process whose CUDA context is broken must be started
anew (CUDA Runtime API, cudaErrorLaunchFailure), and so must one whose thread hangs in a driver; so there is no attempt
to open the sessions again.
May import: causes.
"""

import logging
from collections.abc import Callable
from threading import Lock, Timer

from service.causes import cause_of

_LOG = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 5  # before the device is tried, whatever the errors were


class Device:
    """The health of one device, told by the batches that ran on it; calls come from any thread."""

    def __init__(self, end: Callable[[str], object] | None = None, end_after_s: float = 0.0) -> None:
        """Start healthy.

        Args:
            end: Ends the process once the device is gone; None to leave that to who listens.
            end_after_s: How long the process may take to end by itself before.
        """
        self.gone = ""
        """Why it is gone; empty while it is there."""
        self._end = end
        self._end_after_s = end_after_s
        self._failures = 0
        self._lock = Lock()
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have a function called, on whatever thread, with the reason once the device is gone."""
        with self._lock:
            self._listeners.append(listener)
            gone = self.gone
        if gone:
            listener(gone)

    def succeeded(self) -> None:
        """Note that a batch was computed."""
        self._failures = 0

    def failed(self, error: Exception, trial: Callable[[], None]) -> None:
        """Note that a batch failed.

        Args:
            error: What it raised.
            trial: Runs a tiny batch, and raises what goes wrong.
        """
        self._failures += 1
        if cause_of(error) != "device" and self._failures < _FAILURES_IN_A_ROW:
            return
        try:
            trial()
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the device does not compute
            self.lose(f"a trial batch fails on it too: {type(trouble).__name__}: {trouble}")
        else:
            self._failures = 0

    def lose(self, reason: str, *, at_once: bool = False) -> None:
        """Say that the device is gone; only the first reason counts.

        Args:
            reason: Why.
            at_once: Whether the process cannot end by itself, as its event loop is blocked.
        """
        with self._lock:
            if self.gone:
                return
            self.gone = reason
            listeners = list(self._listeners)
        _LOG.critical("THE DEVICE IS GONE, so this process is of no more use and must be started anew: %s", reason)
        for listener in listeners:
            listener(reason)
        if self._end is None:
            return
        if at_once or not self._end_after_s:
            self._end(f"the device is gone: {reason}")
            return
        timer = Timer(self._end_after_s, self._end, [f"the device is gone: {reason}"])
        timer.daemon = True
        timer.start()
