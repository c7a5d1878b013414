"""Calls: the deadline of a gRPC call, and its count by the status with which it ends.

May import: metrics, errors, grpc.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from service import metrics
from service.errors import AttencodeError, InternalFault

_LOG = logging.getLogger(__name__)
_PUNCTUAL_S = 0.005  # by how much a call may be ended early: both sides keep the time, and the one may be ahead

Answer = TypeVar("Answer")


def deadline_s(context: grpc.aio.ServicerContext) -> float | None:
    """Give a call's deadline on the clock of `time.monotonic`; None for none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s


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
        raise
    except Exception as error:
        fault = InternalFault()
        code = fault.status.name
        _LOG.exception("%s failed (%s)", method, fault.id, extra={"error_id": fault.id})
        raise fault from error
    finally:
        metrics.record_request(method, code, time.perf_counter() - started)
