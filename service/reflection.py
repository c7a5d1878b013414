"""Reflection: gRPC's own, for those who may call. May import: access, calls, errors, grpc, grpc_reflection."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from service.access import Access
from service.calls import abort
from service.errors import Unauthenticated

SERVICE_NAME = reflection.SERVICE_NAME


class GuardedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Answers what services there are, once a call shows a key where keys are wanted."""

    def __init__(self, names: Sequence[str], access: Access) -> None:
        """Store whom to let in; `names` are the services'."""
        super().__init__(names)
        self._access = access

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's name
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """Answer one stream of questions."""
        try:
            async for answer in super().ServerReflectionInfo(self._let_in(requests, context), context):
                yield answer
        except Unauthenticated as error:
            await abort(context, error)

    async def _let_in(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Pass questions on for as long as the call's key is known; nothing is read before it is."""
        self._access.check(context)
        async for request in requests:
            self._access.check(context)
            yield request
