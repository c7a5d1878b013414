"""Watchdog: notices work that does not end.

A thread of its own looks every so often, so that it sees an event loop that is blocked too. It counts the time in which
it has lived itself: while the whole process stands still, as after SIGSTOP or in a paused container, none passes.
May import: nothing of the project.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from threading import Event, Thread

_LOOKS = 10  # within the time that work may take
_LONGEST_TICK_S = 1.0
_PLAIN_TOKENS = 2048


def patience(tokens: int) -> float:
    """Give how many times as long as others a batch of so many tokens, padding included, may take."""
    return max(1.0, tokens / _PLAIN_TOKENS)


@dataclass(frozen=True, slots=True)
class _Work:
    since_s: float
    may_s: float
    stuck: Callable[[], None]


class Watchdog:
    """Calls back, once and on its own thread, for each piece of work that takes longer than it may."""

    def __init__(self, stuck_after_s: float) -> None:
        """Store how long work may take; `start` starts."""
        self.stuck_after_s = stuck_after_s
        self._tick_s = min(_LONGEST_TICK_S, stuck_after_s / _LOOKS)
        self._lived_s = 0.0
        self._numbers = count()
        self._works: dict[int, _Work] = {}  # from several threads; single operations of a dict are whole
        self._stopped = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to look, if it does not look yet."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = Thread(target=self._watch, name="attencode-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            thread.join()

    def begin(self, stuck: Callable[[], None], times: float = 1.0) -> int:
        """Note that work begins; gives its number.

        Args:
            stuck: Called if it does not end in time.
            times: How many times as long as other work it may take.
        """
        number = next(self._numbers)
        self._works[number] = _Work(self._lived_s, self.stuck_after_s * times, stuck)
        return number

    def end(self, number: int) -> None:
        """Note that work has ended."""
        self._works.pop(number, None)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            self._lived_s += min(now - before, 2 * self._tick_s)
            before = now
            for number, work in self._works.copy().items():
                late = self._lived_s - work.since_s > work.may_s
                if late and self._works.pop(number, None) is not None:  # it may just have ended
                    work.stuck()
