"""Statuses: what gRPC says of a call that failed, as the error that stands for it, in words of ours.

The client's counterpart of the servicer's `_abort`. May import: errors, grpc.
"""

import math
import re
from dataclasses import dataclass

import grpc

from service.errors import (
    REASON,
    AnswerTooLarge,
    AttencodeError,
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    QueueFull,
    Unauthenticated,
    Unavailable,
)

STATUS_LOST = "Internal error from Core"
"""What gRPC's asyncio client says, as INTERNAL, where a server ends a stream that is written to: the status is lost."""

# gRPC's own words. Those of a limit that this side has set begin with "CLIENT:" and stay as they are.
_REQUEST_TOO_LARGE = re.compile(r"^(?:SERVER: )?Received message larger than max \((\d{1,18}) vs\. (\d{1,18})\)")
_UNRESOLVED = re.compile(r"errors resolving|resolution failed")
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]*)")
_HUNG_UP = re.compile(r"Socket closed|[Cc]onnection reset|Broken pipe")
_UNCONNECTED = re.compile(r"failed to connect")
_REASON = re.compile(r"[a-z0-9_]{1,40}")  # a word for those who count, whoever answers
_SERVERS_TIME = "--max-deadline-s"  # is named where not the caller's own time was up


class RemoteError(AttencodeError):
    """Report a status that none of the other errors stands for."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        """Keep the status beside the message."""
        super().__init__(f"{code.name}: {message}")
        self.code = code


class RequestTooLarge(InvalidRequest):
    """Report a request of more bytes than the server takes."""

    def __init__(self, size: int, most: int) -> None:
        """Keep both, in bytes."""
        super().__init__(
            f"the request has {size:,} bytes, more than this server's {most:,}; send fewer or shorter inputs in one "
            "request, or start the server with a larger --max-request-bytes"
        )
        self.size = size


class Closed(InvalidRequest):
    """Report a call of a client that is closed."""

    def __init__(self) -> None:
        """Write the message."""
        super().__init__("this client is closed; call it before close() and within its with block, or make a new one")


@dataclass(frozen=True, slots=True)
class Callee:
    """Whom a client calls, and how long it waits: what a message must name for its reader to change it.

    Attributes:
        address: As the client was given it.
        timeout_s: Deadline of each call that has one, in seconds; None for none.
        tls: Whether the client speaks TLS.
        shows_certificate: Whether it shows one of its own.
    """

    address: str
    timeout_s: float | None
    tls: bool = False
    shows_certificate: bool = False

    def error(self, error: grpc.RpcError) -> AttencodeError:
        """Turn a call's status into the error that stands for it."""
        code, message = error.code(), error.details() or ""
        if found := _REQUEST_TOO_LARGE.match(message):
            return RequestTooLarge(int(found[1]), int(found[2]))
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unavailable(self._unavailable(message))
        if code == grpc.StatusCode.INTERNAL and message == STATUS_LOST:
            return Unavailable(
                "the server ended the call while more was being sent to it, and gRPC lost its reason; ask again"
            )
        if code == grpc.StatusCode.INVALID_ARGUMENT and _trailing(error, "attencode-fits-stream"):
            return AnswerTooLarge(message, fits_stream=True)
        delay_s, reason = _seconds(_trailing(error, "attencode-retry-delay-seconds")), _trailing(error, REASON)
        return self.typed(code, message, delay_s, reason if _REASON.fullmatch(reason) else "")

    def typed(self, code: grpc.StatusCode, message: str, retry_delay_s: float, reason: str = "") -> AttencodeError:
        """Give the error that stands for a status, of a call or of one item of a stream, which has no reason."""
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED and 0 < retry_delay_s < math.inf:
            return QueueFull(message, retry_delay_s, reason=reason)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(
                f"{message} (with this client: api_key=KEY, or for a command ATTENCODE_API_KEY or --api-key-file FILE)"
            )
        if code == grpc.StatusCode.INTERNAL:
            return InternalFault(message)
        if code == grpc.StatusCode.CANCELLED:  # who cancels a call itself is told otherwise
            code = grpc.StatusCode.UNAVAILABLE
            message = "the server had so much to do that it did not come to see the call; try again later"
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and self.timeout_s is not None and _SERVERS_TIME not in message:
            return DeadlineExceeded(
                f"no answer came from {self.address!r} within the deadline of {self.timeout_s:g} s; give the client a "
                "longer timeout_s, or the command a longer --timeout, or ask for less"
            )
        for kind in (InvalidRequest, DeadlineExceeded, Unavailable):
            if kind.status == code:
                return kind(message)
        return RemoteError(code, message)

    def _unavailable(self, message: str) -> str:
        if _UNRESOLVED.search(message.lower()):
            return (
                f"no server answers: the address {self.address!r} names no host; give HOST:PORT, "
                "for instance 127.0.0.1:50051, or [::1]:50051 for IPv6"
            )
        if _UNCONNECTED.search(message.lower()):
            if told := self._unsecured(message):
                return f"no connection to {self.address!r}: {told} (gRPC says: {message})"
            return (
                f"no server answers at {self.address!r}; start one there, or give another address "
                f"(gRPC says: {message})"
            )
        return message

    def _unsecured(self, message: str) -> str:
        """Say why a server and this client do not agree on TLS, as far as gRPC tells; empty if that is not it."""
        if "WRONG_VERSION_NUMBER" in message:
            return "the server there speaks plaintext; leave tls, or --tls and its like, out"
        if found := _UNTRUSTED.search(message):
            return (
                f"the server's certificate is not trusted, {found[1]}; give the file of its CA, as "
                "tls=attencode.Tls(ca=FILE) or --tls-ca FILE"
            )
        if "Hostname Verification Check failed" in message:
            return (
                "the server's certificate is for other names than this address; call it by one of them, or say which "
                "it is, as tls=attencode.Tls(server_name=NAME) or --tls-server-name NAME"
            )
        return self._hung_up() if _HUNG_UP.search(message) else ""

    def _hung_up(self) -> str:
        """Say why a server ends a connection at its beginning; all that gRPC tells is that it did."""
        full = "or it has as many connections as it may (--max-connections)"
        if not self.tls:
            return (
                f"the server closed the connection, as one that speaks TLS does with plaintext, {full}; if it is TLS, "
                "ask with tls=True, tls=attencode.Tls(ca=FILE) or --tls"
            )
        if self.shows_certificate:
            return (
                "the server closed the connection, as one does that trusts another CA than that of this certificate, "
                f"or by whose clock it is not valid, {full}"
            )
        return (
            f"the server closed the connection, as one does that wants a client's certificate, {full}; for the former "
            "show one, as tls=attencode.Tls(cert=FILE, key=FILE) or --tls-cert FILE --tls-key FILE"
        )


def reached(error: grpc.RpcError) -> bool:
    """Tell whether a call that failed had found a server."""
    message = (error.details() or "").lower()
    return not (_UNCONNECTED.search(message) or _UNRESOLVED.search(message))


def _seconds(words: str) -> float:
    """Read a time that a server gives; 0 where it is none."""
    try:
        return float(words)
    except ValueError:
        return 0.0


def _trailing(error: grpc.RpcError, name: str) -> str:
    """Read what accompanies a status under a name; empty where there is none."""
    return next((str(value) for key, value in error.trailing_metadata() or () if key == name), "")
