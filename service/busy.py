"""Busy: how much of one core this process uses. May import: nothing of the project."""

import time

_WINDOW_S = 0.1


class BusyShare:
    """How much of one core this process has lately used."""

    def __init__(self) -> None:
        """Begin to count."""
        self._since = (time.monotonic(), time.process_time())
        self._share = 0.0

    def share(self) -> float:
        """Give the share over the last tenth of a second, 1 for a whole core."""
        now = time.monotonic()
        if now - self._since[0] >= _WINDOW_S:
            used = time.process_time()
            self._share = (used - self._since[1]) / (now - self._since[0])
            self._since = (now, used)
        return self._share
