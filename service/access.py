"""Access: who may call, and how much one key and one connection may have open and in work.

A call is refused here before a byte of its message is read. May import: callers, keyring, metrics, errors.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from service import metrics
from service.callers import Caller
from service.errors import AttencodeError, QueueFull, Unauthenticated
from service.keyring import Grant, KeyRing, Metadata

_RETRY_S = 0.1


class CallContext(Protocol):
    """What gRPC says of a call."""

    def peer(self) -> str:
        """Give the address that its connection comes from."""

    def invocation_metadata(self) -> Metadata | None:
        """Give its metadata."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may have at a time.

    Attributes:
        max_requests: Unanswered requests, items of streams among them.
        max_streams: Open calls of EncodeStream.
    """

    max_requests: int
    max_streams: int


@dataclass(slots=True)
class _Held:
    """What one connection has."""

    requests: int = 0
    streams: int = 0


class Connections:
    """What each connection has open and in work; one that has nothing is forgotten."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """Start with none."""
        self._limits = limits
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Count the connections that have something."""
        return len(self._held)

    def take(self, peer: str, *, requests: int = 0, streams: int = 0) -> None:
        """Count a request, or a stream, that begins.

        Raises:
            QueueFull: The connection has as many as it may.
        """
        held = self._held.get(peer) or _Held()
        if held.requests + requests > self._limits.max_requests:
            raise QueueFull(
                f"this connection has {held.requests} unanswered requests, as many as it may; wait for answers, or "
                "start the server with a larger --max-connection-requests",
                retry_delay_s=_RETRY_S,
                reason="connection_requests",
            )
        if held.streams + streams > self._limits.max_streams:
            raise QueueFull(
                f"this connection has {held.streams} open streams, as many as it may; send more over each, or start "
                "the server with a larger --max-connection-streams",
                retry_delay_s=_RETRY_S,
                reason="connection_streams",
            )
        held.requests += requests
        held.streams += streams
        self._held[peer] = held

    def give_back(self, peer: str, *, requests: int = 0, streams: int = 0) -> None:
        """Count a request, or a stream, that has ended."""
        held = self._held[peer]
        held.requests -= requests
        held.streams -= streams
        if not held.requests and not held.streams:
            del self._held[peer]


class Session:
    """One call of somebody who may call. Entering it puts one request in work, leaving it takes that out again."""

    def __init__(
        self, method: str, peer: str, connections: Connections, keys: KeyRing | None, grant: Grant | None
    ) -> None:
        """Store the parts."""
        self._method, self._peer, self._connections = method, peer, connections
        self._keys, self._grant = keys, grant

    @property
    def most_requests(self) -> int | None:
        """How many requests its key may have in work; None for any number."""
        return None if self._grant is None else self._grant.key.max_concurrent

    def __enter__(self) -> Caller:
        """Put a request in work, and say whose it is.

        Raises:
            Unauthenticated: The key is known no more.
            QueueFull: The connection, or the key, has as much as it may.
        """
        try:
            return self._begin()
        except AttencodeError as error:
            _turned_away(self._method, error)
            raise

    def __exit__(self, *_exception: object) -> None:
        """Take it out."""
        self._connections.give_back(self._peer, requests=1)
        if self._grant is not None:
            self._grant.end()

    def _begin(self) -> Caller:
        now = time.monotonic()
        if self._grant is None or self._keys is None:
            self._connections.take(self._peer, requests=1)
            return Caller(self._peer)
        self._keys.check(self._grant)
        self._connections.take(self._peer, requests=1)
        try:
            self._grant.begin(now)
        except QueueFull:
            self._connections.give_back(self._peer, requests=1)
            raise
        return self._grant.caller

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream for as long as the block runs.

        Raises:
            QueueFull: The connection has as many as it may.
        """
        try:
            self._connections.take(self._peer, streams=1)
        except QueueFull as error:
            _turned_away(self._method, error)
            raise
        try:
            yield
        finally:
            self._connections.give_back(self._peer, streams=1)


class Access:
    """Lets calls in."""

    def __init__(self, limits: ConnectionLimits, keys: KeyRing | None = None) -> None:
        """Store the parts; without `keys` everybody may call."""
        self.connections = Connections(limits)
        self._keys = keys

    def session(self, method: str, context: CallContext) -> Session:
        """Let a call in.

        Raises:
            Unauthenticated: It shows no key that is known.
        """
        try:
            grant = self._find(context)
        except Unauthenticated as error:
            _turned_away(method, error)
            raise
        return Session(method, context.peer(), self.connections, self._keys, grant)

    def check(self, context: CallContext) -> None:
        """See that a call of another service than the encoder's may be answered.

        Raises:
            Unauthenticated: It shows no key that is known.
        """
        try:
            self._find(context)
        except Unauthenticated as error:
            metrics.record_refused(error.reason)
            raise

    def _find(self, context: CallContext) -> Grant | None:
        if self._keys is None:
            return None
        return self._keys.find(context.invocation_metadata() or ())


def _turned_away(method: str, error: AttencodeError) -> None:
    """Count a request that is not taken in."""
    metrics.record_turned_away(method, error.status.name, error.reason)
