"""KeyRing: the API keys of a running server, whose file may be replaced while it serves, and what each has in work.

`look` reads the file anew, on a thread that is not the calls'. A call reads no file, and what it sends is in no log
line and no error.
May import: callers, keys, errors.
"""

import logging
import stat
from collections.abc import Iterable
from hmac import compare_digest
from math import inf
from pathlib import Path

from service.callers import Caller
from service.errors import ConfigError, QueueFull, Unauthenticated
from service.keys import Key, digest_of, read_keys

_LOG = logging.getLogger(__name__)

_RETRY_S = 0.1  # nobody knows when a request that is in work will be done
_HEADER = "authorization"
_SEND = "send it as metadata, `authorization: Bearer KEY`"

Metadata = Iterable[tuple[str, str | bytes]]


class Bucket:
    """Requests that may come: so many a second, and so many at once. Pure: `now` is an argument, in seconds."""

    def __init__(self, rate: float, burst: float) -> None:
        """Start full."""
        self.rate, self.burst = rate, burst
        self._tokens, self._at_s = burst, -inf

    def take(self, now: float) -> float:
        """Take one request; gives 0.0, or after how many seconds there will be one to take."""
        if self.rate == inf:
            return 0.0
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at_s) * self.rate)
        self._at_s = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self.rate
        self._tokens -= 1.0
        return 0.0


class Grant:
    """A key in use."""

    def __init__(self, key: Key) -> None:
        """Start with nothing in work."""
        self.digest = key.digest
        self.in_work = 0
        self._bucket = Bucket(key.requests_per_second, key.burst)
        self.update(key)

    def update(self, key: Key) -> None:
        """Take over what the file now says of this key."""
        self.key = key
        self.caller = Caller(key.name, key.weight)
        if (self._bucket.rate, self._bucket.burst) != (key.requests_per_second, key.burst):
            self._bucket = Bucket(key.requests_per_second, key.burst)

    def begin(self, now: float) -> None:
        """Put one request in work.

        Raises:
            QueueFull: The key has as much in work as it may, or asks too often.
        """
        key = self.key
        if key.max_concurrent is not None and self.in_work >= key.max_concurrent:
            raise QueueFull(
                f"the API key {key.name!r} has {self.in_work} requests in work, as many as it may; wait for an answer "
                "before you send the next",
                retry_delay_s=_RETRY_S,
                reason="key_concurrency",
            )
        if wait_s := self._bucket.take(now):
            raise QueueFull(
                f"the API key {key.name!r} may ask {key.requests_per_second:g} times a second, {key.burst:g} times at "
                "once; send requests at a lower rate, or more inputs in each",
                retry_delay_s=wait_s,
                reason="key_rate",
            )
        self.in_work += 1

    def end(self) -> None:
        """Note that one request is answered, or gone."""
        self.in_work -= 1


def match(digest: bytes, grants: Iterable[Grant]) -> Grant | None:
    """Find the key of a hash; takes as long whichever it is, and however much of a hash is right."""
    found = None
    for grant in grants:
        if compare_digest(grant.digest, digest):
            found = grant  # and on to the end: where it stands is nobody's business
    return found


class KeyRing:
    """The keys of one file."""

    def __init__(self, path: str) -> None:
        """Keep where it is; `load` reads it."""
        self._path = Path(path)
        self._seen: tuple[int, ...] = ()
        self._usable = True
        self._grants: dict[bytes, Grant] = {}  # replaced as a whole: calls read it meanwhile

    def load(self) -> None:
        """Read the file; one that others may change is a warning.

        Raises:
            ConfigError: It cannot be read, is malformed, or holds no key.
        """
        self._seen = self._state()
        self._take_over(read_keys(str(self._path)))
        # Who reads hashes of random keys has nothing; who writes them lets in whom they like.
        if self._path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _LOG.warning(
                "others than its owner may change %r, and so let themselves in; chmod go-w it", str(self._path)
            )

    def find(self, metadata: Metadata) -> Grant:
        """Find the key that the metadata of a call show.

        Raises:
            Unauthenticated: They show none, or none that is known.
        """
        shown = [value for name, value in metadata if name == _HEADER]
        if not shown:
            raise Unauthenticated(f"this server wants an API key; {_SEND}")
        scheme, _, key = str(shown[0]).partition(" ")
        if len(shown) > 1 or scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(f"the API key is not where it should be; {_SEND}, once")
        grant = match(digest_of(key.strip()), self._grants.values())
        if grant is None:
            raise Unauthenticated("this server does not know the API key; ask whoever runs it for one")
        return grant

    def check(self, grant: Grant) -> None:
        """See that a key which a call showed at its beginning is still known.

        Raises:
            Unauthenticated: It was taken out of the file.
        """
        if self._grants.get(grant.digest) is not grant:
            raise Unauthenticated("this server does not know the API key any more; ask whoever runs it for one")

    def look(self) -> bool:
        """Read the file anew where it changed; one that cannot be used changes nothing, and is False."""
        state = self._state()
        if state == self._seen:
            return self._usable
        self._seen = state
        try:
            keys = read_keys(str(self._path))
        except ConfigError as error:
            _LOG.warning("the new file of API keys cannot be used, so the keys of before stay: %s", error)
            self._usable = False
            return False
        self._usable = True
        before = self._grants.keys()
        self._take_over(keys)
        added, removed = len(self._grants.keys() - before), len(before - self._grants.keys())
        _LOG.info("API keys read anew: %d added, %d removed, %d in all", added, removed, len(keys))
        return True

    def _take_over(self, keys: Iterable[Key]) -> None:
        grants: dict[bytes, Grant] = {}
        for key in keys:
            grant = self._grants.get(key.digest)
            if grant is None:
                grant = Grant(key)
            else:
                grant.update(key)
            grants[key.digest] = grant
        self._grants = grants

    def _state(self) -> tuple[int, ...]:
        """Tell one version of the file from another; empty where there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino  # chmod changes ctime alone
