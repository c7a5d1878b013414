"""Calls: the deadline of a gRPC call, its count by the status with which it ends, and how an error becomes that.

May import: metrics, errors, grpc.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from service import metrics
from service.errors import (
    REASON,
    AnswerTooLarge,
    AttencodeError,
    InternalFault,
    InvalidRequest,
    QueueFull,
    caller_message,
)

_LOG = logging.getLogger(__name__)
_PUNCTUAL_S = 0.005  # by how much a call may be ended early: both sides keep the time, and the one may be ahead
_MOST_METADATA_BYTES = 32_768

Answer = TypeVar("Answer")


def deadline_s(context: grpc.aio.ServicerContext) -> float | None:
    """Give a call's deadline on the clock of `time.monotonic`; None for none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s


def check_metadata(context: grpc.aio.ServicerContext) -> None:
    """Do nothing where a call's metadata are of a usual size.

    gRPC has a limit of its own, 16 KiB, but does not count headers of HPACK's kind "never indexed" (RFC 7541, section
    6.2.3), of which grpcio 1.85 took 4 MB.

    Raises:
        InvalidRequest: They are not.
    """
    size = sum(len(key) + len(value) for key, value in context.invocation_metadata() or ())
    if size > _MOST_METADATA_BYTES:
        raise InvalidRequest(
            f"the call's metadata have {size:,} bytes, and may have {_MOST_METADATA_BYTES:,}; leave some out"
        )


async def counted(method: str, context: grpc.aio.ServicerContext, answer: Awaitable[Answer]) -> Answer:
    """Await an answer, count it with its status, and hide what is not the caller's business.

    At its deadline gRPC cancels what works on a call, as it does when the caller leaves; the time tells them apart.
    """
    started, end_s = time.perf_counter(), deadline_s(context)
    code = "CANCELLED"
    metrics.record_request_started()
    try:
        result = await answer
        code = "OK"
        return result
    except asyncio.CancelledError:
        if end_s is not None and time.monotonic() >= end_s - _PUNCTUAL_S:
            code = "DEADLINE_EXCEEDED"
        raise
    except AttencodeError as error:
        code = error.status.name
        if error.reason:
            metrics.record_refused(error.reason)
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception, and would leave the call unanswered
        fault = InternalFault()
        code = fault.status.name
        _LOG.exception("%s failed (%s)", method, fault.id, extra={"error_id": fault.id})
        raise fault from error
    finally:
        metrics.record_request(method, code, time.perf_counter() - started)


async def veiled(method: str, context: grpc.aio.ServicerContext, life: Awaitable[None]) -> None:
    """Await the life of a stream; a fault of ours ends it with INTERNAL and an id, where gRPC would show its words."""
    try:
        await life
    except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError, grpc.RpcError):
        raise  # gRPC's own, of a call that has its status, or that has ended
    except Exception as error:  # noqa: BLE001 - the caller is told, the log has it
        fault = InternalFault()
        _LOG.error("%s failed (%s)", method, fault.id, exc_info=error, extra={"error_id": fault.id})
        await abort(context, fault)


def turned_away(method: str, error: AttencodeError) -> None:
    """Count a call that is refused before anything of it is begun, so that it has no time."""
    metrics.record_turned_away(method, error.status.name, error.reason)


def bare(error: AttencodeError) -> AttencodeError:
    """Take the way that an error came out of it: gRPC holds errors in cycles, and with the way a request's texts."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


async def abort(context: grpc.aio.ServicerContext, error: AttencodeError) -> None:
    """End a call with an error's status, message and, where trying again helps, its delay.

    Raises:
        asyncio.CancelledError: The call is over already, by its deadline or its caller.
    """
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, QueueFull):
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=delay))
        status = Status(code=error.status.value[0], message=caller_message(error), details=[detail])
        trailing = (
            ("grpc-status-details-bin", status.SerializeToString()),
            ("attencode-retry-delay-seconds", f"{error.retry_delay_s:.3f}"),  # the same for plain eyes
            *(((REASON, error.reason),) if error.reason else ()),
        )
    elif isinstance(error, AnswerTooLarge) and error.fits_stream:
        trailing = (("attencode-fits-stream", "1"),)
    try:
        await context.abort(error.status, caller_message(error), trailing)
    except grpc.aio.InternalError as over:  # it would log each as a fault of ours, with a traceback
        raise asyncio.CancelledError from over
