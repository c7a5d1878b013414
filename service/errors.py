"""Everything that can go wrong, each with the gRPC status that a caller sees.

    AttencodeError
    ├── InvalidRequest     INVALID_ARGUMENT     the request must change; the message says how
    │   └── AnswerTooLarge                      for its way, and whether a stream takes it
    ├── QueueFull          RESOURCE_EXHAUSTED   carries when to try again
    │   └── Stalled                             nobody reads a stream's answers; it may be begun anew
    ├── Unauthenticated    UNAUTHENTICATED      no API key, or none that is known
    ├── DeadlineExceeded   DEADLINE_EXCEEDED    the caller's deadline passed
    ├── Unavailable        UNAVAILABLE          starting, draining, or no replica
    │   ├── Outdated                            the model was replaced; the servicer begins anew
    │   └── Lost                                the models are gone for good; the process ends
    │       ├── ClusterLost                     Ray is gone
    │       ├── DeviceLost                      what computes is gone, or hangs
    │       ├── ArtifactChanged                 its files were written into
    │       └── TaskLost                        a part of the server cannot be kept up
    ├── InternalFault      INTERNAL             our fault; carries an id that is in the log
    ├── NotWritten         (no status)          a file that a command shall make; also an OSError
    └── StartupError       (no status)          the server does not start
        ├── ConfigError      a setting
        ├── ArtifactError    the artifact folder
        └── ProviderError    the execution provider

May import: grpc.
"""

import secrets

import grpc

_MOST_CHARS = 500


class AttencodeError(Exception):
    """Base of every error that attencode raises on purpose."""

    status = grpc.StatusCode.INTERNAL
    reason = ""
    """Why a request was not taken in, in one word for those who count; empty for any other error."""


def caller_message(error: AttencodeError) -> str:
    """Give an error's message, cut to what fits into a status beside a caller's own long words.

    gRPC carries it in a header, percent-encoded, and breaks the call beyond some 8 KiB.
    """
    message = str(error)
    return message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]}... ({len(message)} characters)"


REASON = "attencode-refused-reason"
"""The trailing metadata by which a refused call tells its reason."""


class InvalidRequest(AttencodeError):
    """Report a request that cannot be answered as it is."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class AnswerTooLarge(InvalidRequest):
    """Report an answer that is too large for the way that it would go."""

    def __init__(self, message: str, *, fits_stream: bool) -> None:
        """Keep whether EncodeStream would take it."""
        super().__init__(message)
        self.fits_stream = fits_stream


class QueueFull(AttencodeError):
    """Report that no more work is taken in at the moment."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_delay_s: float, *, reason: str = "") -> None:
        """Keep the time, in seconds, after which trying again may succeed, and the reason's name."""
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.reason = reason


class Stalled(QueueFull):
    """Report that a stream ends because its reader does not read."""

    def __init__(self, stalled_s: float) -> None:
        """Write the message for a reader that has taken nothing for so many seconds."""
        super().__init__(
            f"nothing of this stream's answers was read for {stalled_s:g} s; read them as they come, "
            "and begin a new stream with what is unanswered",
            retry_delay_s=0.1,
        )


class Unauthenticated(AttencodeError):
    """Report a call that does not show an API key which the server knows."""

    status = grpc.StatusCode.UNAUTHENTICATED
    reason = "unauthenticated"


class DeadlineExceeded(AttencodeError):
    """Report that the caller's deadline passed before the answer was there."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(AttencodeError):
    """Report that this server does not take requests now; another one may."""

    status = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, reason: str = "") -> None:
        """Write the message; keep the reason's name where a request was not taken in."""
        super().__init__(message)
        self.reason = reason


class Outdated(Unavailable):
    """Report that the version which took a request in is no longer served; its successor can answer it."""

    def __init__(self) -> None:
        """Write the message, which a caller sees only if versions follow each other too fast."""
        super().__init__("the model was replaced while the request waited; try again")


class Lost(Unavailable):
    """Report that the models of this process are gone for good, so that it must be started anew."""


class ClusterLost(Lost):
    """Report that the Ray cluster is gone."""


class DeviceLost(Lost):
    """Report that the device does not compute any more, or that a batch on it does not end."""


class ArtifactChanged(Lost):
    """Report that a file that is mapped into memory was written into."""


class TaskLost(Lost):
    """Report that a part of the server failed again and again."""


class InternalFault(AttencodeError):
    """Report a fault of ours without its details; the id finds them in the log."""

    status = grpc.StatusCode.INTERNAL

    def __init__(self, message: str = "") -> None:
        """Draw an id and write the message; a client passes the message that it was sent."""
        self.id = secrets.token_hex(6)
        super().__init__(message or f"internal error {self.id}; the server's log has the details under this id")


class NotWritten(AttencodeError, OSError):
    """Report a file that cannot be written, in words; `errno` is the cause's."""


class StartupError(AttencodeError):
    """Report what keeps the server from starting."""


class ConfigError(StartupError):
    """Report a setting that is unknown, malformed or at odds with another one."""


class ArtifactError(StartupError):
    """Report an artifact folder that is not whole."""


class ProviderError(StartupError):
    """Report an execution provider that was asked for and cannot run."""


def is_for_callers(error: BaseException) -> bool:
    """Tell whether a caller may read an error's message; not that of a start, late as it may come."""
    return isinstance(error, AttencodeError) and not isinstance(error, StartupError)
