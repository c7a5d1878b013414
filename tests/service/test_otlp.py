"""Spans that a server process sends to a collector, and its log as JSON."""

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from attencode import Client, InternalFault
from service.config import parse_config
from service.errors import ConfigError
from service.pb import encoder_pb2 as pb

pytest.importorskip("opentelemetry.exporter.otlp", reason="OTLP is not installed; install attencode[otel]")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider

METHOD = "attencode.v1.Encoder/Encode"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.raw = b""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the contract's name
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            self.resource |= {item.key: item.value.string_value for item in resource.resource.attributes}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def one(self, name: str) -> Any:
        (span,) = (span for span in self.spans if span.name == name)
        return span


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """Give a collector behind a port, and its endpoint."""
    servicer, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_collector_gets_the_trace(
    spawn_local: Callable[..., Any], tiny_artifact: Path, collector: tuple[Collector, str]
) -> None:
    """A server sends its spans to the collector of the OTEL_* variables, the last ones while it ends."""
    got, endpoint = collector
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "embeddings"}
    late = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}  # so that nothing is sent before the end
    server = spawn_local(tiny_artifact, "--tracing", "--model-name", "tiny", **variables, **late)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")
    with Client(server.address) as client, tracer.start_as_current_span("caller") as caller:
        client.encode(["open sesame", "a"])
        context = caller.get_span_context()
    assert got.spans == []
    assert server.terminate() == 0
    request, batch = got.one(METHOD), got.one("batch")
    assert int.from_bytes(request.trace_id) == context.trace_id
    assert int.from_bytes(request.parent_span_id) == context.span_id
    for name in ("tokenize", "queue", "inference"):
        assert got.one(name).parent_span_id == request.span_id
    assert [link.span_id for link in got.one("inference").links] == [batch.span_id]
    assert [link.span_id for link in batch.links] == [request.span_id]
    assert got.resource["service.name"] == "embeddings"
    assert got.resource["telemetry.sdk.language"] == "python"
    assert b"sesame" not in got.raw


def test_an_item_with_the_largest_number(
    spawn_local: Callable[..., Any], tiny_artifact: Path, collector: tuple[Collector, str]
) -> None:
    """An item's number is 64 bits long, one more than a number of OTLP; its span arrives, and others with it."""
    got, endpoint = collector
    server = spawn_local(tiny_artifact, "--tracing", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    with Client(server.address) as client:
        items = [pb.EncodeStreamRequest(id=number) for number in (2**64 - 1, 1)]
        list(client._stub.EncodeStream(iter(items), timeout=10))
    assert server.terminate() == 0
    values = [item.value for span in got.spans for item in span.attributes if item.key == "attencode.item"]
    assert sorted((value.int_value, value.string_value) for value in values) == [(0, str(2**64 - 1)), (1, "")]


def test_an_absent_collector_is_told_of_once(spawn_local: Callable[..., Any], tiny_artifact: Path) -> None:
    """Without a collector a server answers, says so once, and ends as soon as ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hurried = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    server = spawn_local(tiny_artifact, "--tracing", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", **hurried)
    with Client(server.address) as client:
        for _ in range(30):
            assert client.encode("a b").pooled.shape == (1, 24)
            time.sleep(0.1)
    started = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - started < 4
    log = server.process.stderr.read()
    assert log.count("the collector takes no spans") == 1
    assert "opentelemetry" not in log


@pytest.mark.parametrize("tracing", [True, False])
def test_the_log_as_json(
    spawn_local: Callable[..., Any],
    tiny_artifact: Path,
    tmp_path: Path,
    collector: tuple[Collector, str],
    tracing: bool,
) -> None:
    """Each line is an object; a fault's has the id that its caller got and the trace, and none a request's text."""
    artifact = shutil.copytree(tiny_artifact, tmp_path / "artifact")
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector[1]}
    flags = ["--log-format", "json", "--log-level", "debug", *(["--tracing"] if tracing else [])]
    server = spawn_local(artifact, *flags, **variables)
    (artifact / "attention.onnx").unlink()  # it is first read when attention is first asked for
    with Client(server.address) as client:
        client.encode("open sesame")
        with pytest.raises(InternalFault) as caught:
            client.encode("open sesame", attention=True)
    assert server.terminate() == 0
    lines = [json.loads(line) for line in (server.line, *server.process.stderr)]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert "sesame" not in json.dumps(lines)
    assert lines[0]["message"].startswith("attencode serves")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert lines[-1]["message"] == "drained"
    (fault,) = (line for line in lines if line["level"] == "error")
    assert fault["error_id"] in str(caught.value)
    assert "attention.onnx" in fault["exception"]
    if tracing:
        batches = {(span.trace_id.hex(), span.span_id.hex()) for span in collector[0].spans if span.name == "batch"}
        assert (fault["trace_id"], fault["span_id"]) in batches
    else:
        assert not {"trace_id", "span_id"} & {key for line in lines for key in line}
        assert collector[0].spans == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_another_way_to_send_stops_the_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that ask for what cannot be done here are refused, but only where tracing is on."""
    monkeypatch.setenv(name, value)
    assert not parse_config(["folder"]).tracing
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        parse_config(["folder", "--tracing"])
