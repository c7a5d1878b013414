"""Streams that tests read by hand, what they ask for, and what a server process says of itself."""

import urllib.request
from typing import Any

import psutil

from attencode import Client
from service.pb import encoder_pb2 as pb

STREAM = "/attencode.v1.Encoder/EncodeStream"
LONG = "time flies like an arrow and fruit flies like a banana " * 12  # 134 tokens, 5.2 MB of attention
LONGER = LONG * 2  # 256 tokens, 18.9 MB
UNHURRIED = [("grpc.http2.bdp_probe", 0)]  # gRPC itself reads no further ahead than 64 KiB


def item(number: int, text: str, *, attention: bool = True) -> pb.EncodeStreamRequest:
    request = pb.EncodeRequest(inputs=[pb.Input(text=text)], attention=pb.AttentionOptions() if attention else None)
    return pb.EncodeStreamRequest(id=number, request=request)


def open_stream(client: Client, *items: pb.EncodeStreamRequest, timeout_s: float | None = 60.0) -> Any:
    """Begin a stream that is read by hand."""
    call = client._channel.stream_stream(
        STREAM,
        request_serializer=pb.EncodeStreamRequest.SerializeToString,
        response_deserializer=pb.EncodeStreamResponse.FromString,
    )
    return call(iter(items), timeout=timeout_s)


def private_bytes(pid: int) -> int:
    """Give the resident memory that is a process's own, without pages of Ray's object store."""
    info = psutil.Process(pid).memory_info()
    return int(info.rss - info.shared)


def metric(server: Any, name: str) -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5).read().decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(name + " "))
