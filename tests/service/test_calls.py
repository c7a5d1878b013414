"""Calls: whatever ends a call's work, the call ends and is counted."""

import asyncio
import logging

import grpc
import pytest

from attencode import InternalFault
from service.calls import abort, counted
from service.errors import QueueFull


class Panic(BaseException):
    """What a library in Rust raises where it panics: no Exception."""


def test_what_is_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    """Its caller gets INTERNAL with an id that is in the log, not silence."""

    async def fail() -> bytes:
        raise Panic("out of bounds")

    async def handle(_data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await counted("Encode", context, fail())
        except InternalFault as error:
            await abort(context, error)
            raise

    async def ask() -> grpc.aio.AioRpcError:
        server = grpc.aio.server()
        methods = {"Do": grpc.unary_unary_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/a.B/Do")(b"", timeout=10)
        await server.stop(None)
        return caught.value

    with caplog.at_level(logging.ERROR):
        ended = asyncio.run(asyncio.wait_for(ask(), 30))
    assert ended.code() == grpc.StatusCode.INTERNAL
    assert any(record.error_id in (ended.details() or "") for record in caplog.records if hasattr(record, "error_id"))


def test_an_error_that_comes_too_late_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """A status for a call whose deadline has passed ends its task like any cancellation, without a word in the log."""
    seen: list[type[BaseException]] = []
    over = asyncio.Event()

    async def answer(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            try:
                await abort(context, QueueFull("too much waits", retry_delay_s=1.0))
            except BaseException as error:
                seen.append(type(error))
                over.set()
                raise
        return b""

    async def call() -> None:
        server = grpc.aio.server()
        method = {"Late": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Test", method),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await channel.unary_unary("/a.Test/Late")(b"", timeout=0.3)
        await over.wait()
        await server.stop(None)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(call(), 20))
    assert seen == [asyncio.CancelledError]
    assert not caplog.records
