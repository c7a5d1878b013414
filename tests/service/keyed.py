"""A server in this process, without Ray, and keys for it, for tests of who may call. May import: service, grpc."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from service.artifact import open_artifact
from service.backend import LocalBackend
from service.config import ServiceConfig
from service.keys import digest_of, new_key
from service.pb import encoder_pb2 as pb
from service.server import Server

ENCODE, STREAM = "/attencode.v1.Encoder/Encode", "/attencode.v1.Encoder/EncodeStream"
APART = (("grpc.use_local_subchannel_pool", 1),)  # else two channels are one connection
LOOK_S = 1.2  # after which the server has looked at its file again
REQUEST = pb.EncodeRequest(inputs=[pb.Input(text="abc")])


@contextmanager
def serving(artifact: Path, **settings: object) -> Iterator[Server]:
    """Serve an artifact in float32 on a free port of loopback until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    defaults = {"port": 0, "metrics_port": "none", "provider": "cpu", "precision": "float32", "model_name": "tiny"}
    config = ServiceConfig.model_validate({"model": str(artifact), **defaults, **settings})

    async def start() -> Server:
        server = Server(config, LocalBackend(config, {"tiny": open_artifact(artifact)}))
        await server.start()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def address(server: Server) -> str:
    """Give where a server listens."""
    return f"127.0.0.1:{server.port}"


def refused(reason: str) -> float:
    """Say how many requests were refused for a reason, by all servers of this process."""
    return prometheus_client.REGISTRY.get_sample_value("attencode_refused_requests_total", {"reason": reason}) or 0.0


def rejected(file: str) -> float:
    """Say whether a server of this process cannot use a file on the disk; -1 before it has looked."""
    found = prometheus_client.REGISTRY.get_sample_value("attencode_files_rejected", {"file": file})
    return -1.0 if found is None else found


def retry_delay_s(error: Any) -> float:
    """Give what google.rpc.RetryInfo says in a refusal."""
    (details,) = (value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    status, info = Status.FromString(details), RetryInfo()
    assert status.code == error.code().value[0]
    assert status.details[0].Unpack(info)
    return float(info.retry_delay.ToNanoseconds() / 1e9)


class Keys:
    """A file of keys, and the keys."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "keys.toml"
        self.known: dict[str, str] = {}

    def add(self, name: str, **limits: float) -> str:
        self.known[name] = new_key(name, str(self.path), limits)
        return self.known[name]

    def remove(self, name: str) -> None:
        """Take a key out, in one step."""
        gone = digest_of(self.known.pop(name)).hex()
        kept = [entry for entry in self.path.read_text().split("[[keys]]")[1:] if gone not in entry]
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(f"[[keys]]{entry}" for entry in kept))
        fresh.replace(self.path)
