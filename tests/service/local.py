"""A server on the test's own event loop, whose parts the test can reach."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from service.artifact import open_artifact
from service.backend import LocalBackend
from service.config import ServiceConfig
from service.server import Server
from tests.service.streams import UNHURRIED

ENCODE, STREAM = "/attencode.v1.Encoder/Encode", "/attencode.v1.Encoder/EncodeStream"


@asynccontextmanager
async def served(artifact: Path, **settings: object) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    """Serve an artifact for as long as the block runs; gives the server, and a channel that reads little ahead."""
    defaults = {"port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32"}
    config = ServiceConfig.model_validate({"model": str(artifact), **defaults, **settings})
    opened = open_artifact(artifact)
    server = Server(config, LocalBackend(config, {opened.model_id: opened}))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=UNHURRIED) as channel:
            yield server, channel
    finally:
        await server.stop()
