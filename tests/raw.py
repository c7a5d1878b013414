"""Raw: HTTP/2 and gRPC frames by hand, to send a server what no client would. RFC 9113 has the numbers.

May import: hpack.
"""

import socket
import ssl
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from hpack import Decoder, Encoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, COMPRESSION_ERROR, CALM = 1, 3, 9, 11
INITIAL_WINDOW_SIZE = 4
ENCODE = "/attencode.v1.Encoder/Encode"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Write a frame (section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values: int) -> bytes:
    """Write a SETTINGS frame, of the initial window's size or of nothing."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", INITIAL_WINDOW_SIZE, value) for value in values.values()))


def message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """Write gRPC's prefix of a message, true or not, before its bytes."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


def headers(path: str | None = ENCODE, **others: str | None) -> list[tuple[str, str]]:
    """List the headers of a call; others by their names with `_` for `-`, None to leave one out."""
    made: dict[str, str | None] = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    made |= {"te": "trailers", "content-type": "application/grpc"}
    made |= {name.replace("_", "-"): value for name, value in others.items()}
    return [(name, value) for name, value in made.items() if value is not None]


def block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Compress headers without regard to what went before."""
    return Encoder().encode([(name, value, True) for name, value in pairs], huffman=False)


@dataclass
class Seen:
    """What a server said on a connection.

    Attributes:
        statuses: gRPC's status of each stream that has one.
        http: HTTP's, likewise.
        reset: Streams that were reset, and with which error.
        goaway: The connection's own error; None without one.
        data: Bytes of answers.
        closed: Whether the server has closed the connection.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    http: dict[int, str] = field(default_factory=dict)
    reset: dict[int, int] = field(default_factory=dict)
    goaway: int | None = None
    data: int = 0
    closed: bool = False


class Connection:
    """One connection, read only when it is told to."""

    def __init__(self, address: str, *, preface: bool = True, tls: ssl.SSLContext | None = None) -> None:
        """Connect and, unless told not to, begin as HTTP/2 does."""
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=10)
        self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="server.test")
        self.seen = Seen()
        self._decoder = Decoder()
        self._decoder.max_header_list_size = 2**20
        self._unread = b""
        self._begun = b""  # of a block of headers that goes on
        if preface:
            self.send(PREFACE + settings())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> bool:
        """Send bytes; tells whether the server still took them."""
        try:
            self.socket.sendall(b"".join(parts))
        except (OSError, TimeoutError):
            self.seen.closed = True
            return False
        return True

    def call(self, stream: int, body: bytes = b"", *, end: bool = True, **others: str | None) -> bool:
        """Begin a call with these bytes as its body."""
        first = frame(HEADERS, END_HEADERS, stream, block(headers(**others)))
        parts = [body[start : start + 16_384] for start in range(0, len(body), 16_384)] or [b""]
        rest = [frame(DATA, 0, stream, part) for part in parts[:-1]]
        return self.send(first, *rest, frame(DATA, END_STREAM if end else 0, stream, parts[-1]))

    def read(self, *, until: int | None = None, for_s: float = 10.0) -> Seen:
        """Read what comes: until a stream has ended, the connection is closed, or the time is up."""
        end_s = time.monotonic() + for_s
        while not self.seen.closed and (left_s := end_s - time.monotonic()) > 0:
            if until is not None and (until in self.seen.statuses or until in self.seen.reset):
                break
            self.socket.settimeout(left_s)
            try:
                got = self.socket.recv(65_536)
            except TimeoutError:
                break
            except OSError:
                got = b""
            self.seen.closed = not got
            self._unread += got
            self._take()
        return self.seen

    def _take(self) -> None:
        while len(self._unread) >= 9:
            length = int.from_bytes(self._unread[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", self._unread[3:9])
            if kind > 9 or len(self._unread) < 9 + length:
                return
            payload, self._unread = self._unread[9 : 9 + length], self._unread[9 + length :]
            self._note(kind, flags, stream, payload)

    def _note(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        seen = self.seen
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK))
        elif kind == DATA:
            seen.data += len(payload)
        elif kind == RST_STREAM:
            seen.reset[stream] = int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            seen.goaway = seen.goaway or int.from_bytes(payload[4:8], "big")
        elif kind in (HEADERS, CONTINUATION):
            self._begun += payload
            if flags & END_HEADERS:
                found = dict(self._decoder.decode(self._begun))
                self._begun = b""
                if "grpc-status" in found:
                    seen.statuses[stream] = int(found["grpc-status"])
                if ":status" in found:
                    seen.http[stream] = found[":status"]
