"""Spans of requests and batches, as an exporter in memory sees them."""

import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import grpc
import pytest

from attencode import AsyncClient, AttencodeError, Client, InternalFault, InvalidRequest, encode_request
from service.tracing import Tracing, outgoing_metadata

ROOT = Path(__file__).parents[2]
METHODS = "attencode.v1.Encoder"

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed; install attencode[otel]")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402


class Spans:
    """What a server's exporter has seen."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def clear(self) -> None:
        self._exporter.clear()


@pytest.fixture
def spans() -> Spans:
    """Give an exporter in memory, and the tracing that feeds it."""
    return Spans()


@pytest.fixture
def client(serve: Callable[..., str], tiny_artifact: Path, spans: Spans) -> Iterator[Client]:
    """Give a client of a traced server."""
    with Client(serve(tiny_artifact, spans.tracing)) as client:
        yield client


@pytest.fixture
def tracer() -> trace.Tracer:
    """Give a tracer of the caller's own, whose spans go nowhere."""
    return TracerProvider(shutdown_on_exit=False).get_tracer("caller")


def context_of(span: Any) -> trace.SpanContext:
    found: trace.SpanContext | None = span.get_span_context()
    assert found is not None
    return found


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def links_of(span: ReadableSpan) -> set[tuple[int, int]]:
    """Give the traces and spans that a span links."""
    return {(link.context.trace_id, link.context.span_id) for link in span.links}


def ids_of(*spans: ReadableSpan) -> set[tuple[int, int]]:
    return {(context_of(span).trace_id, context_of(span).span_id) for span in spans}


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_from_the_client_to_the_batch(client: Client, spans: Spans, tracer: trace.Tracer, where: str) -> None:
    """A request's span joins the caller's; below it are tokenize, queue and inference; the batch is linked."""
    with tracer.start_as_current_span("caller") as caller:
        client.encode(["a b c", "a"])
    request, batch = spans.one(f"{METHODS}/Encode"), spans.one("batch")
    assert request.kind == trace.SpanKind.SERVER
    assert (context_of(request).trace_id, parent_of(request)) == (
        context_of(caller).trace_id,
        context_of(caller).span_id,
    )
    children = [spans.one(name) for name in ("tokenize", "queue", "inference")]
    assert {parent_of(child) for child in children} == {context_of(request).span_id}
    tokenize, queue, inference = children
    assert request.start_time <= tokenize.start_time <= tokenize.end_time <= queue.start_time  # type: ignore[operator]
    assert queue.end_time == inference.start_time
    assert inference.end_time <= request.end_time  # type: ignore[operator]

    assert batch.parent is None
    assert links_of(inference) == ids_of(batch)
    assert links_of(batch) == ids_of(request)
    assert dict(batch.links[0].attributes or {}) == {"attencode.rows": 2}
    told = facts(batch)
    assert told.pop("attencode.inference_ms") > 0
    name = told.pop("attencode.model")
    replica = told.pop("attencode.replica", "")
    sizes = {"attencode.rows": 2, "attencode.length": 5, "attencode.tokens": 8, "attencode.padding": 2}
    assert told == {"attencode.provider": "cpu", **sizes}
    assert bool(replica) == (where == "ray")
    assert facts(inference) == ({"attencode.replicas": (replica,)} if replica else {})
    rpc = {"rpc.system": "grpc", "rpc.service": METHODS, "rpc.method": "Encode", "rpc.grpc.status_code": 0}
    sizes = {"attencode.inputs": 2, "attencode.tokens": 8}
    assert facts(request) == {**rpc, **sizes, "attencode.model": name, "attencode.provider": "cpu"}


def test_every_method_and_client(client: Client, spans: Spans, tracer: trace.Tracer) -> None:
    """Tokenize and GetModel have their spans too, and the asyncio client joins them as the other does."""
    import asyncio

    address = client._channel._channel.target().decode()

    async def call() -> None:
        async with AsyncClient(address.removeprefix("dns:///")) as other:
            await other.get_model()
            await other.tokenize("a b")

    with tracer.start_as_current_span("caller") as caller:
        client.tokenize("a b")
        client.get_model()
        asyncio.run(call())
    for method in ("Tokenize", "GetModel"):
        found = spans.named(f"{METHODS}/{method}")
        assert [parent_of(span) for span in found] == [context_of(caller).span_id] * 2
    assert len(spans.named("tokenize")) == 2
    assert not spans.named("queue")


def test_items_of_a_stream(client: Client, spans: Spans, tracer: trace.Tracer) -> None:
    """Each item of a stream has a span of its own under the stream's caller, failed ones among them."""
    requests = [encode_request("a b"), encode_request(" "), encode_request("c")]
    with tracer.start_as_current_span("caller") as caller:
        answers = list(client.encode_stream(requests))
    assert [isinstance(answer, AttencodeError) for answer in answers] == [False, True, False]
    items = sorted(spans.named(f"{METHODS}/EncodeStream"), key=lambda span: facts(span)["attencode.item"])
    assert {parent_of(span) for span in items} == {context_of(caller).span_id}
    assert len({facts(span)["attencode.item"] for span in items}) == 3
    assert [facts(span)["rpc.grpc.status_code"] for span in items] == [0, 3, 0]
    assert len(spans.named("inference")) == 2


def test_the_callers_fault(client: Client, spans: Spans) -> None:
    """What the caller must mend has its status and kind, is no error of the server's, and shows none of its words."""
    for options in ({"prompt_name": "sesame"}, {"model": "sesame"}, {"pooling": "cls", "dimensions": 999}):
        with pytest.raises(InvalidRequest):
            client.encode("sesame open", **options)
    with pytest.raises(InvalidRequest):
        client.encode("sesame " * 100, truncation="off")
    client.encode("sesame")
    failed = [span for span in spans.named(f"{METHODS}/Encode") if facts(span)["rpc.grpc.status_code"]]
    assert len(failed) == 4
    for span in failed:
        assert facts(span)["rpc.grpc.status_code"] == 3
        assert facts(span)["error.type"] == "InvalidRequest"
        assert span.status.status_code == trace.StatusCode.UNSET
    for span in spans.all():
        assert "sesame" not in span.to_json()
        assert not span.events


def test_our_own_fault(
    serve: Callable[..., str],
    tiny_artifact: Path,
    tmp_path: Path,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An internal fault's id is in the request's span and in the log, and its batch has failed too."""
    artifact = shutil.copytree(tiny_artifact, tmp_path / "artifact")
    address = serve(artifact, spans.tracing)
    (artifact / "attention.onnx").unlink()  # it is first read when attention is first asked for
    with caplog.at_level(logging.ERROR), Client(address) as client, pytest.raises(InternalFault) as caught:
        client.encode("a b", attention=True)
    found = re.search(r"internal error (\w+)", str(caught.value))
    assert found
    request, batch = spans.one(f"{METHODS}/Encode"), spans.one("batch")
    assert facts(request)["attencode.error_id"] == found[1]
    assert facts(request)["rpc.grpc.status_code"] == grpc.StatusCode.INTERNAL.value[0]
    assert (request.status.status_code, request.status.description) == (trace.StatusCode.ERROR, "INTERNAL")
    assert batch.status.status_code == trace.StatusCode.ERROR
    assert facts(batch)["error.type"]
    assert links_of(spans.one("inference")) == ids_of(batch)
    assert found[1] in {getattr(record, "error_id", "") for record in caplog.records}


def test_a_deadline_in_the_queue(serve: Callable[..., str], tiny_artifact: Path, spans: Spans) -> None:
    """A request whose time ends while it waits has a queue, and no inference and no batch."""
    address = serve(tiny_artifact, spans.tracing, max_queue_delay_ms=5000)
    with Client(address, timeout_s=0.3) as client, pytest.raises(AttencodeError):
        client.encode("a")
    for _ in range(50):
        if spans.named(f"{METHODS}/Encode"):
            break
        time.sleep(0.1)
    ended = spans.one(f"{METHODS}/Encode")
    assert facts(ended)["rpc.grpc.status_code"] in (1, 4)  # whichever notices first: gRPC, or we
    queue = spans.one("queue")
    assert queue.end_time - queue.start_time > 0.1e9  # type: ignore[operator]
    assert not spans.named("inference")
    assert not spans.named("batch")


def test_two_requests_share_a_batch(serve: Callable[..., str], tiny_artifact: Path, spans: Spans) -> None:
    """A batch of two callers' requests links both, and the inference of each links it."""
    address = serve(tiny_artifact, spans.tracing, max_queue_delay_ms=1000)
    together = Barrier(2)

    def call(text: str) -> None:
        with Client(address, options=[("grpc.use_local_subchannel_pool", 1)]) as client:
            client.get_model()
            together.wait(10)
            client.encode(text)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, ("a", "a b c")))
    batch, requests = spans.one("batch"), spans.named(f"{METHODS}/Encode")
    assert links_of(batch) == ids_of(*requests)
    assert len(requests) == 2
    assert facts(batch)["attencode.rows"] == 2
    assert [links_of(span) for span in spans.named("inference")] == [ids_of(batch)] * 2
    assert len({context_of(span).trace_id for span in (batch, *requests)}) == 3


def test_a_large_request_links_each_of_its_batches(
    serve: Callable[..., str], tiny_artifact: Path, spans: Spans
) -> None:
    """A request of several batches has one queue and one inference, with a link for every batch."""
    with Client(serve(tiny_artifact, spans.tracing, max_batch_size=2)) as client:
        client.encode(["a"] * 5)
    batches, inference = spans.named("batch"), spans.one("inference")
    assert len(batches) == 3
    assert links_of(inference) == ids_of(*batches)
    assert sum(facts(batch)["attencode.rows"] for batch in batches) == 5
    assert inference.start_time == min(batch.start_time for batch in batches)  # type: ignore[type-var]
    assert inference.end_time == max(batch.end_time for batch in batches)  # type: ignore[type-var]
    assert spans.one("queue")


def test_the_callers_sampler_is_heard(client: Client, spans: Spans) -> None:
    """What the caller does not sample is not recorded; a batch with another one that is sampled has its link alone."""
    context = trace.SpanContext(7, 8, is_remote=False, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.encode("a b")
    assert spans.all() == []
    client.encode("a b")
    assert len(spans.named("batch")) == 1


def test_the_sampler_of_the_environment(
    serve: Callable[..., str], tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, tracer: trace.Tracer
) -> None:
    """OTEL_TRACES_SAMPLER decides for requests without a caller's span, and their batches follow."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    spans = Spans()
    with Client(serve(tiny_artifact, spans.tracing)) as client:
        client.encode("a")
        assert spans.all() == []
        with tracer.start_as_current_span("caller"):
            client.encode("a")
    assert {span.name for span in spans.all()} == {f"{METHODS}/Encode", "tokenize", "queue", "inference", "batch"}


def test_the_client_sends_what_is_active(tracer: trace.Tracer) -> None:
    """Without an active span nothing is sent along; with one, W3C's traceparent."""
    assert outgoing_metadata() is None
    with tracer.start_as_current_span("caller") as caller:
        context = context_of(caller)
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert dict(outgoing_metadata() or ())["traceparent"] == expected


def test_off_means_not_imported(tiny_artifact: Path) -> None:
    """A server without tracing, and its client, answer without OpenTelemetry in the process."""
    code = """
import asyncio, sys
from pathlib import Path
from attencode import AsyncClient
from service.artifact import open_artifact
from service.backend import LocalBackend
from service.config import ServiceConfig
from service.server import Server

async def main():
    config = ServiceConfig(model=sys.argv[1], port=0, metrics_port="none", provider="cpu")
    server = Server(config, LocalBackend(config, {"tiny": open_artifact(Path(sys.argv[1]))}))
    await server.start()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        print((await client.encode("a b")).pooled.shape)
    await server.stop()

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    command = [sys.executable, "-c", code, str(tiny_artifact)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["(1, 24)", "[]"]
