"""Admission: whether a request is taken in, by what waits and how fast it goes.

Pure: no clock, no I/O, no tasks; `now` is an argument, in seconds on the clock of the deadlines. What is refused is
refused at once, with the time after which trying again may help; who counts it finds the reason in the error.
May import: batching, callers, errors.
"""

from dataclasses import dataclass
from math import exp, inf
from typing import NoReturn

from service.batching import WaitingList
from service.callers import Caller
from service.errors import Outdated, QueueFull, Unavailable

# A request that waits is refused at once when what is before it will probably take more than this share of its time;
# less than a third, so that who is taken in is still answered in time when the pace falls to a third, as it does when
# ten times too much begins: of 60 s of it 99.95 % were in time, and with 0.45 98.7 %, at the same goodput.
_DEADLINE_SHARE = 0.3
# Who has had its share waits for those that come later, too, at most so many times as long as for those that wait now.
# Without it some of 20 callers' requests, five times too many in virtual time, had their turn after 5 s.
_NEWCOMERS = 3.0
_RATE_MEMORY_S = 2.0
_SHORTEST_RETRY_S = 0.05
_ROUND_BATCHES = 64
# A sequence of more tokens than so many full batches is a long one: it holds its stream for seconds. On two cores those
# begin at 2,048 tokens.
_LONG_BATCHES = 4


class DrainRate:
    """How many tokens a second leave the queue while there are any: an average over the last seconds of work.

    Pure: `now` is an argument, in seconds.
    """

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._tokens = self._seconds = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Note that a batch begins to run; idle time before it does not count."""
        if self._since is None:
            self._since = now

    def end(self, tokens: int, now: float, *, idle: bool, queue: bool = True) -> None:
        """Note that a batch of so many tokens came back, whether nothing else runs, and whether others wait.

        A batch that leaves no queue behind may have been a small one, which says little of full ones.
        A longer pause than is remembered was a fault, such as a dead replica: it says little of what comes.
        """
        since, self._since = self._since, None if idle else now
        if not queue:
            return
        passed_s = min(now - (now if since is None else since), _RATE_MEMORY_S)
        kept = exp(-passed_s / _RATE_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + passed_s

    def seconds_for(self, tokens: float) -> float:
        """Estimate how long so many tokens will take; 0 before anything is known."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class FastestPace:
    """How long so many tokens take at the very least: as long as in the fastest of the last batches."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._now = self._before = inf  # seconds a token, in this round of batches and in the one before it
        self._batches = 0

    def note(self, tokens: int, seconds: float) -> None:
        """Note that a batch of so many tokens, padding included, took so long."""
        self._now = min(self._now, seconds / tokens)
        self._batches += 1
        if self._batches == _ROUND_BATCHES:
            self._now, self._before, self._batches = inf, self._now, 0

    def seconds_for(self, tokens: int) -> float:
        """Give how long so many tokens will take at least; 0 before anything is known."""
        fastest = min(self._now, self._before)
        return 0.0 if fastest == inf else tokens * fastest


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait for a batch, over all callers of one model.

    Attributes:
        max_inputs: Inputs. A request that is larger by itself is still taken into an empty queue.
        max_tokens: Their tokens; likewise.
    """

    max_inputs: int
    max_tokens: int


class QueueAdmission:
    """Whether one engine takes a request in: by its queue, its pace, and whether it takes any."""

    def __init__(self, waiting: WaitingList, limits: QueueLimits, *, ahead: int) -> None:
        """Store the parts; nothing is taken in before `accepting` is set.

        Args:
            waiting: The queue; it is not changed.
            limits: What may be in it.
            ahead: Tokens that one caller may be ahead of another, those of a full batch.
        """
        self._long = 0  # long batches that run
        self.drain = DrainRate()
        self.fastest = FastestPace()
        self.accepting = False
        self.outdated = False
        self._waiting = waiting
        self._limits = limits
        self._ahead = ahead

    def longest(self, capacity: int) -> float:
        """Give the most tokens of a sequence that may begin to run: one stream of several is left to short ones."""
        return inf if self._long < max(1, capacity - 1) else _LONG_BATCHES * self._ahead

    def begin(self, tokens: int, now: float) -> None:
        """Note that a batch of so many tokens begins to run."""
        self._long += tokens > _LONG_BATCHES * self._ahead
        self.drain.begin(now)

    def end(self, tokens: int, now: float, *, idle: bool, queue: bool) -> None:
        """Note that it came back, as `DrainRate.end` takes it."""
        self._long -= tokens > _LONG_BATCHES * self._ahead
        self.drain.end(tokens, now, idle=idle, queue=queue)

    def check_accepting(self) -> None:
        """Do nothing while requests are taken in.

        Raises:
            Unavailable: The engine is not started, or is stopping.
        """
        if not self.accepting:
            raise not_accepting()

    def check_room(self, size: int, deadline_s: float | None, caller: Caller, tokens: int, now: float) -> None:
        """Do nothing while so many more sequences may wait and can be run in time.

        Args:
            size: Sequences of one request.
            deadline_s: On the clock of `now`; None for none.
            caller: Who asks; of what others have waiting only what comes before it counts.
            tokens: Of the request; 0 if they are not known yet.
            now: The present.

        Raises:
            Unavailable: The engine is not started, or is stopping.
            QueueFull: Too much waits already.
            Outdated: The model was replaced meanwhile.
        """
        self.check_accepting()
        if self.outdated:
            raise Outdated
        if not len(self._waiting):
            return
        wait_s = self.drain.seconds_for(self._waiting.tokens)
        self._check_size(size, tokens, max(wait_s, _SHORTEST_RETRY_S))
        if deadline_s is not None:
            self._check_deadline(wait_s, deadline_s - now, caller, tokens)

    def _check_size(self, size: int, tokens: int, delay_s: float) -> None:
        if len(self._waiting) + size > self._limits.max_inputs:
            told, reason = f"{len(self._waiting)} inputs wait already, at most {self._limits.max_inputs}", "queue_full"
        elif self._waiting.tokens + tokens > self._limits.max_tokens:
            told, reason = (
                f"{self._waiting.tokens:,} tokens wait already, at most {self._limits.max_tokens:,}",
                "queue_tokens",
            )
        else:
            return
        raise QueueFull(f"{told} may; try again in {delay_s:.1f} s", retry_delay_s=delay_s, reason=reason)

    def _check_deadline(self, wait_s: float, rest_s: float, caller: Caller, tokens: int) -> None:
        most_s, whole_s = _DEADLINE_SHARE * rest_s, wait_s
        if wait_s > most_s:  # and that is as if all who wait had their turn first
            wait_s = self.drain.seconds_for(self._waiting.before(caller, tokens, self._ahead))
        if _NEWCOMERS * whole_s > most_s:
            owed_s = self.drain.seconds_for(self._waiting.owed(caller))
            wait_s = max(wait_s, min(owed_s, _NEWCOMERS * whole_s))
        if wait_s > most_s or wait_s + self.drain.seconds_for(tokens) > rest_s:
            delay_s = max(wait_s, _SHORTEST_RETRY_S)
            own = "" if wait_s > most_s else f" and the request itself {self.drain.seconds_for(tokens):.1f} s"
            raise QueueFull(
                f"what comes before it will take about {wait_s:.1f} s{own}, and the deadline is in "
                f"{max(rest_s, 0):.1f} s; try again in {delay_s:.1f} s, or allow more time",
                retry_delay_s=delay_s,
                reason="deadline",
            )


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """What may be in work at one time, over all models and callers.

    Attributes:
        max_requests: Requests that were let in and are not answered, those of streams among them.
        max_bytes: What they take. One that takes more by itself passes alone.
        max_streams: Open EncodeStream calls.
    """

    max_requests: int
    max_bytes: int
    max_streams: int


class Door:
    """Counts what is in work, and lets no more in than may be."""

    def __init__(self, limits: WorkLimits) -> None:
        """Start with nothing in work."""
        self._limits = limits
        self._pace = DrainRate()  # of requests
        self._requests = self._bytes = self._streams = 0

    def enter(self, now: float) -> None:
        """Count a request that begins.

        Raises:
            QueueFull: As many as may be are in work.
        """
        if self._requests >= self._limits.max_requests:
            self._refuse(
                f"{self._requests} requests are in work already, at most {self._limits.max_requests}", "requests"
            )
        self._pace.begin(now)
        self._requests += 1

    def weigh(self, amount: int, held: int) -> None:
        """Count bytes of a request that was let in and has `held` some already.

        Raises:
            QueueFull: They are more than there is room for.
        """
        if self._bytes > held and self._bytes + amount > self._limits.max_bytes:
            told = f"requests of {self._bytes:,} bytes are in work already, at most {self._limits.max_bytes:,}"
            self._refuse(told, "request_bytes")
        self._bytes += amount

    def leave(self, amount: int, now: float) -> None:
        """Count a request that has ended, and take its bytes out."""
        self._requests -= 1
        self._bytes -= amount
        self._pace.end(1, now, idle=not self._requests)

    def open_stream(self) -> None:
        """Count a stream that begins.

        Raises:
            QueueFull: As many as may be are open.
        """
        if self._streams >= self._limits.max_streams:
            self._refuse(f"{self._streams} streams are open already, at most {self._limits.max_streams}", "streams")
        self._streams += 1

    def close_stream(self) -> None:
        """Count a stream that has ended."""
        self._streams -= 1

    def _refuse(self, told: str, reason: str) -> NoReturn:
        """Say that there is too much, and when what is here now will probably be done."""
        delay_s = max(self._pace.seconds_for(self._requests), _SHORTEST_RETRY_S)
        raise QueueFull(f"{told} may be; try again in {delay_s:.1f} s", retry_delay_s=delay_s, reason=reason)


def not_accepting() -> Unavailable:
    """Make the error for who comes before the start, or while the server drains."""
    return Unavailable("the server is starting or draining; try another one, or try again", reason="not_accepting")
