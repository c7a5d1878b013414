"""Calls: whatever ends a call's work, the call ends and is counted."""

import asyncio
import logging

import grpc
import pytest

from attencode import InternalFault
from service.calls import abort, counted


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
