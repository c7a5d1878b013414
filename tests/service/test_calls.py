"""Calls that end before their answer is on its way."""

import asyncio
import logging

import grpc
import pytest

from service.calls import abort
from service.errors import QueueFull


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
