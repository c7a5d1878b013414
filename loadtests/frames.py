"""Frames: unary gRPC calls as HTTP/2 frames (RFC 9113) made beforehand, over many connections from one thread.

A client of grpc.aio costs more a call than a server that refuses, so it cannot overload one on the same machine; h2load
does not say with which status a call ended. This client costs about 30 us a call, sees each status, keeps a deadline as
gRPC's clients do (it tells the server, and resets the stream when the time is up), and its calls wait for nobody.
May import: wire.
"""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wire import ENCODE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_CANCEL = 8
_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream
_MOST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65_535
_READ_BYTES = 2**18
_STATUSES = {0: "OK", 1: "CANCELLED", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 8: "RESOURCE_EXHAUSTED"} | {
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}
REFUSED, LATE = "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Give a frame's bytes."""
    return _HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Write a header that is in no table (RFC 7541, 6.2.2)."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def request_headers(timeout_s: float) -> bytes:
    """Write the headers of an Encode call; POST and http are in HPACK's own table."""
    named = {":path": ENCODE, ":authority": "127.0.0.1", "content-type": "application/grpc", "te": "trailers"}
    named["grpc-timeout"] = f"{1e3 * timeout_s:.0f}m"
    return b"\x83\x86" + b"".join(_literal(name.encode(), value.encode()) for name, value in named.items())


def opening() -> bytes:
    """Give what a connection begins with: no table of headers, so that each block can be read by itself."""
    settings = ((1, 0), (2, 0), (4, _MOST_WINDOW))  # header table, push, window of each stream
    payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
    return (
        _PREFACE
        + frame(_SETTINGS, 0, 0, payload)
        + frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST_WINDOW - _FIRST_WINDOW))
    )


def grpc_status(block: bytes) -> str | None:
    """Read the status in a block of headers; None if it has none."""
    place = block.find(b"grpc-status")
    if place < 0:
        return None
    length, digits = block[place + 11], block[place + 12 :]
    return _STATUSES.get(int(digits[:length]), f"status {digits[:length]!r}")


@dataclass(slots=True)
class Ended:
    """How calls ended.

    Attributes:
        seconds: By status: seconds of each call, from when it was due.
        began: By status: when each was due, on the clock of `time.perf_counter`.
        late_s: How late the client itself was to send each call.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    began: dict[str, list[float]] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)

    def add(self, status: str, due: float, now: float) -> None:
        """Note one call."""
        self.seconds.setdefault(status, []).append(now - due)
        self.began.setdefault(status, []).append(due)

    def merge(self, other: "Ended") -> None:
        """Take in what another process saw."""
        for status, seconds in other.seconds.items():
            self.seconds.setdefault(status, []).extend(seconds)
            self.began.setdefault(status, []).extend(other.began[status])
        self.late_s.extend(other.late_s)

    @property
    def calls(self) -> int:
        """All that ended."""
        return sum(map(len, self.seconds.values()))


class Connection:
    """One connection with its calls; never waits."""

    def __init__(self, port: int, timeout_s: float, deadlines: deque[tuple[float, "Connection", int]]) -> None:
        """Connect to a port of this machine; each call's deadline, in order, goes to `deadlines`."""
        self._timeout_s = timeout_s
        self._deadlines = deadlines
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)  # noqa: FBT003 - the library's own way
        self.open: dict[int, float] = {}  # stream -> when its call was due
        self.lost = False
        self._next = 1
        self._window = _FIRST_WINDOW
        self._held: deque[tuple[float, bytes, bytes]] = deque()  # calls for which the server has no window
        self._unsent = bytearray()
        self._unread = b""
        self.send(opening())

    def ask(self, due: float, headers: bytes, body: bytes) -> None:
        """Begin a call, or let it wait for the server's window."""
        self._held.append((due, headers, body))
        self._begin()

    def _begin(self) -> None:
        while self._held and self._window >= len(self._held[0][2]):
            due, headers, body = self._held.popleft()
            stream, self._next = self._next, self._next + 2
            self._window -= len(body)
            self.open[stream] = due
            self._deadlines.append((time.perf_counter() + self._timeout_s, self, stream))
            self.send(frame(_HEADERS, _END_HEADERS, stream, headers) + frame(_DATA, _END_STREAM, stream, body))

    def reset(self, stream: int) -> None:
        """Take a call back."""
        self.open.pop(stream)
        self.send(frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))

    def send(self, data: bytes) -> None:
        """Send as much as the socket takes, and keep the rest."""
        self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.lost = True

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for the socket."""
        return bool(self._unsent)

    def read(self) -> Iterator[tuple[int, str]]:
        """Read what has come; gives the streams that ended, each with its status."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.lost = True
            return
        buffer, place = self._unread + data, 0
        while len(buffer) - place >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(buffer, place)
            end = place + 9 + (high << 8) + low
            if end > len(buffer):
                break
            status = self._frame(kind, flags, stream, buffer[place + 9 : end])
            if status is not None:
                yield stream, status
            place = end
        self._unread = buffer[place:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        """Take in one frame; gives the status with which its stream ended, if it did."""
        if kind == _HEADERS and flags & _END_STREAM:
            return grpc_status(payload) or "no status"
        if kind == _RST_STREAM:
            return "CANCELLED" if payload == struct.pack(">I", _CANCEL) else f"reset {payload!r}"
        if kind == _GOAWAY:
            self.lost = True
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += struct.unpack(">I", payload)[0]
            self._begin()
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.send(frame(kind, _ACK, 0, b"" if kind == _SETTINGS else payload))
        return None


class Crowd:
    """Many connections to one server, driven by one thread."""

    def __init__(self, port: int, connections: int, message: bytes, timeout_s: float) -> None:
        """Connect.

        Args:
            port: Of a server on this machine.
            connections: How many.
            message: The request of each call, serialized.
            timeout_s: The deadline of each call.
        """
        self.ended = Ended()
        self._headers = request_headers(timeout_s)
        self._body = b"\0" + len(message).to_bytes(4, "big") + message
        self._timeout_s = timeout_s
        self._deadlines: deque[tuple[float, Connection, int]] = deque()
        self._epoll = select.epoll()
        self._connections: list[Connection] = []
        self._by_number: dict[int, Connection] = {}
        for _ in range(connections):
            connection = Connection(port, timeout_s, self._deadlines)
            self._connections.append(connection)
            self._by_number[connection.socket.fileno()] = connection
            self._epoll.register(connection.socket.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Close all connections."""
        self._epoll.close()
        for connection in self._connections:
            connection.socket.close()

    def offer(self, moments: Sequence[float]) -> None:
        """Begin a call at each moment, over the connections in turn, and wait until all have ended.

        Args:
            moments: On the clock of `time.perf_counter`, ascending.
        """
        for number, due in enumerate(moments):
            while (rest_s := due - time.perf_counter()) > 0:
                self._turn(rest_s)
            self._ask(self._connections[number % len(self._connections)], due)
            if number % 32 == 0:
                self._turn(0.0)
        self._finish()

    def closed_loop(self, callers: int, seconds: float) -> float:
        """Keep so many calls in flight for a while; gives answers a second."""
        started = time.perf_counter()
        before = len(self.ended.seconds.get("OK", ()))
        number = 0
        while (now := time.perf_counter()) < started + seconds:
            while self.in_flight < callers:
                self._ask(self._connections[number % len(self._connections)], time.perf_counter())
                number += 1
            self._turn(min(0.01, started + seconds - now))
        rate = (len(self.ended.seconds.get("OK", ())) - before) / (time.perf_counter() - started)
        self._finish()
        return rate

    def _finish(self) -> None:
        """Wait until all calls have ended; none is open for longer than its deadline."""
        end = time.perf_counter() + self._timeout_s + 1.0
        while self.in_flight and time.perf_counter() < end:
            self._turn(0.01)
        for _ in range(self.in_flight):
            self.ended.add("never sent", end, end)

    @property
    def in_flight(self) -> int:
        """Calls in flight, by what was begun and what has ended; cheaper than counting them."""
        return len(self.ended.late_s) - self.ended.calls

    def _ask(self, connection: Connection, due: float) -> None:
        if connection.lost:
            self.ended.add("no connection", due, time.perf_counter())
            self.ended.late_s.append(0.0)
            return
        connection.ask(due, self._headers, self._body)
        self.ended.late_s.append(time.perf_counter() - due)
        if connection.has_unsent:
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _turn(self, wait_s: float) -> None:
        """Wait for what comes, take it in, and end what is too late."""
        for number, events in self._epoll.poll(wait_s):
            connection = self._by_number[number]
            if events & select.EPOLLOUT:
                connection.send(b"")
                if not connection.has_unsent:
                    self._epoll.modify(number, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                self._read(connection)
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] < now:
            _, connection, stream = self._deadlines.popleft()
            if stream in connection.open:
                self.ended.add(LATE, connection.open[stream], now)
                connection.reset(stream)

    def _read(self, connection: Connection) -> None:
        for stream, status in connection.read():
            due = connection.open.pop(stream, None)
            if due is not None:
                self.ended.add(status, due, time.perf_counter())
        if connection.lost:
            self._epoll.unregister(connection.socket.fileno())
            for due in connection.open.values():
                self.ended.add("connection lost", due, time.perf_counter())
            connection.open.clear()
