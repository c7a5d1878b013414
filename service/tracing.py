"""Tracing: spans of requests and of batches. The one room that knows OpenTelemetry.

    caller's span ── attencode.v1.Encoder/Encode ─┬─ tokenize
                                                  ├─ queue
                                                  └─ inference ─ ─ link ─ ─ ┐
    batch, a trace of its own <─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘   with a link to each of its requests

Without `--tracing` nothing of OpenTelemetry is imported, and what is called for each request returns after a look at
one variable. No text, no error's message and no other word of a caller's goes into a span.
May import: errors; opentelemetry inside functions, since clients import this module too.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from service.errors import AttencodeError, ConfigError, InternalFault

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Link, Span, SpanContext

_LOG = logging.getLogger(__name__)

Metadata: TypeAlias = Sequence[tuple[str, Any]]

# What is the server's fault; the others are the caller's, whose span tells of them.
# https://opentelemetry.io/docs/specs/semconv/rpc/grpc/, "gRPC status", server spans.
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_CANCELLED = 1
_FLUSH_S = 5.0
_FLUSH_AWAY_S = 0.2  # to a collector that did not answer the last time

_CURRENT: ContextVar["RequestTrace | None"] = ContextVar("attencode_request_trace", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracing:
    """Makes the spans of one server and passes them on."""

    def __init__(self, processor: "SpanProcessor", collector: "_Collector | None" = None) -> None:
        """Set the providers up; the sampler and the resource are those of the OTEL_* variables.

        Args:
            processor: Takes the ended spans.
            collector: Where they go in the end, if that may be away.
        """
        from opentelemetry import propagate, trace  # noqa: PLC0415
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # noqa: PLC0415

        name = Resource({"service.name": "attencode", "service.version": _version()})
        resource = Resource.create().merge(name).merge(OTELResourceDetector().detect())
        requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # A batch is looked at as soon as one of its requests is: the sampler has spoken already.
        batches = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        for provider in (requests, batches):
            provider.add_span_processor(processor)
        self.api = trace
        self.requests = requests.get_tracer("attencode", _version())
        self.batches = batches.get_tracer("attencode", _version())
        self._propagate = propagate
        self._processor = processor
        self._collector = collector

    def request(self, service: str, method: str, metadata: Metadata, **attributes: int) -> "RequestTrace":
        """Begin a request's span under its caller's; it ends with the block that it is entered for.

        Args:
            service: Full name of the service.
            method: Of the service.
            metadata: Of the call.
            attributes: More to say of it; their names get the prefix `attencode.`.
        """
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = self._propagate.extract(carrier)
        named = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method, **_named(attributes)}
        kind = self.api.SpanKind.SERVER
        span = self.requests.start_span(f"{service}/{method}", context=parent, kind=kind, attributes=named)
        return RequestTrace(self, span)

    def close(self) -> None:
        """Send what has not been sent yet, as far as that is soon done; blocks."""
        if self._collector is not None:
            self._collector.end_soon()
        self._processor.shutdown()


class _Ran(NamedTuple):
    """A batch that a request has rows in: its span, its times, 0 for an end that is not known, and its replica."""

    context: "SpanContext"
    start_ns: int
    end_ns: int
    replica: str


class RequestTrace:
    """The span of one request, and what the queue and the batches tell of it; a context manager."""

    def __init__(self, tracing: Tracing, span: "Span") -> None:
        """Store the span, which has begun."""
        self.tracing = tracing
        self.context = span.get_span_context()
        self.recording = span.is_recording()
        self.facts: dict[str, str] = {}  # what is true of its batches too
        self._span = span
        self._tokens: tuple[Any, Any] | None = None
        self._queued_ns = 0
        self._ran: dict[int, _Ran] = {}  # by the batch's span id

    def __enter__(self) -> Self:
        """Make it the current one."""
        from opentelemetry.context import attach  # noqa: PLC0415

        self._tokens = _CURRENT.set(self), attach(self.tracing.api.set_span_in_context(self._span))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End the span with the status that the caller sees."""
        from opentelemetry.context import detach  # noqa: PLC0415

        if self._tokens is not None:
            _CURRENT.reset(self._tokens[0])
            detach(self._tokens[1])
        if self.recording:
            self._tell_of_batches()
            self._set_status(error)
        self._span.end()

    def note(self, attributes: Mapping[str, int | str]) -> None:
        """Say more of the request."""
        self._span.set_attributes(attributes)

    def queued(self) -> None:
        """Note that the queue has taken it in; the first time counts."""
        self._queued_ns = self._queued_ns or time.time_ns()

    def ran(self, batch: "SpanContext", start_ns: int, end_ns: int = 0, replica: str = "") -> None:
        """Note that it runs, or has run, in a batch."""
        self._ran[batch.span_id] = _Ran(batch, start_ns, end_ns, replica)

    def _tell_of_batches(self) -> None:
        """Make the spans `queue` and `inference`: until its last input left the queue, and from first to last batch."""
        if not self._queued_ns:
            return
        now_ns, ran = time.time_ns(), self._ran.values()
        self._child("queue", self._queued_ns, max((batch.start_ns for batch in ran), default=now_ns), (), {})
        if ran:
            start_ns, end_ns = min(batch.start_ns for batch in ran), max(batch.end_ns or now_ns for batch in ran)
            replicas = sorted({batch.replica for batch in ran if batch.replica})
            links = [self.tracing.api.Link(batch.context) for batch in ran]
            self._child("inference", start_ns, end_ns, links, {"attencode.replicas": replicas} if replicas else {})

    def _child(self, name: str, start_ns: int, end_ns: int, links: Sequence["Link"], facts: dict[str, Any]) -> None:
        parent, tracer = self.tracing.api.set_span_in_context(self._span), self.tracing.requests
        tracer.start_span(name, parent, links=links, attributes=facts, start_time=start_ns).end(end_ns)

    def _set_status(self, error: BaseException | None) -> None:
        code = 0
        if error is not None:
            code = error.status.value[0] if isinstance(error, AttencodeError) else _CANCELLED
            name = error.status.name if isinstance(error, AttencodeError) else "CANCELLED"
            self._span.set_attribute("error.type", type(error).__name__)
            if isinstance(error, InternalFault):
                self._span.set_attribute("attencode.error_id", error.id)
            if name in _FAULTS:
                self._span.set_status(self.tracing.api.StatusCode.ERROR, name)
        self._span.set_attribute("rpc.grpc.status_code", code)


def stage(name: str) -> AbstractContextManager[Any]:
    """Give a block within the current request a span of its own, where that is recorded."""
    trace = _CURRENT.get()
    if trace is None or not trace.recording:
        return _NOTHING
    return trace.tracing.requests.start_as_current_span(name, record_exception=False, set_status_on_exception=False)


def note(model: str, provider: str, *, inputs: int, tokens: int) -> None:
    """Say what the current request is made of and who works on it."""
    trace = _CURRENT.get()
    if trace is not None:
        trace.facts = {"attencode.model": model, "attencode.provider": provider}
        trace.note({**trace.facts, "attencode.inputs": inputs, "attencode.tokens": tokens})


def enqueued() -> RequestTrace | None:
    """Note that the current request enters the queue, and give what its batches shall tell; None for nothing."""
    trace = _CURRENT.get()
    if trace is not None:
        trace.queued()
    return trace


class BatchTrace:
    """The span of one batch; a context manager. Stays the current one of its task, so that logs can name it."""

    def __init__(self, traces: Sequence[RequestTrace], shape: tuple[int, ...], tokens: int) -> None:
        """Begin it.

        Args:
            traces: Of its rows' requests, at least one.
            shape: Its rows, and their padded length.
            tokens: Without padding.
        """
        from opentelemetry.context import Context, attach  # noqa: PLC0415

        self._rows = Counter(trace for trace in traces if trace.recording)
        self._facts: tuple[int, str] = 0, ""
        self._span: Span | None = None
        self._start_ns = time.time_ns()
        tracing, context = traces[0].tracing, Context()
        if self._rows:
            attributes: dict[str, int | str] = {
                **traces[0].facts,
                **_named({"rows": shape[0], "length": shape[1], "tokens": tokens}),
                "attencode.padding": shape[0] * shape[1] - tokens,
            }
            links = [tracing.api.Link(trace.context, {"attencode.rows": rows}) for trace, rows in self._rows.items()]
            self._span = tracing.batches.start_span(
                "batch", context, links=links, attributes=attributes, start_time=self._start_ns
            )
            context = tracing.api.set_span_in_context(self._span, context)
        self._error = tracing.api.StatusCode.ERROR
        attach(context)  # else the task would be in that of the request that happened to start it

    def __enter__(self) -> Self:
        """Tell the requests that they run."""
        self._tell(0, "")
        return self

    def ran(self, inference_s: float, replica: str, failed: int) -> None:
        """Note how long the graph ran, on which replica, and how many rows failed by themselves."""
        self._facts = failed, replica
        if self._span is not None:
            self._span.set_attribute("attencode.inference_ms", round(inference_s * 1e3, 3))
            if replica:
                self._span.set_attribute("attencode.replica", replica)
            if failed:
                self._span.set_attribute("attencode.failed_rows", failed)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End it, and tell its requests."""
        if self._span is None:
            return
        failed, replica = self._facts
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
        if error is not None or failed:
            self._span.set_status(self._error)
        end_ns = time.time_ns()
        self._span.end(end_ns)
        self._tell(end_ns, replica)

    def _tell(self, end_ns: int, replica: str) -> None:
        if self._span is not None:
            for trace in self._rows:
                trace.ran(self._span.get_span_context(), self._start_ns, end_ns, replica)


class _NoBatchTrace:
    """Nothing to be told of a batch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def ran(self, inference_s: float, replica: str, failed: int) -> None:
        """Do nothing."""


_NO_BATCH = _NoBatchTrace()


def batch_trace(
    traces: Iterable[RequestTrace | None], shape: tuple[int, ...], lengths: Sequence[int]
) -> BatchTrace | _NoBatchTrace:
    """Begin the span of a batch, if one of its rows' requests is traced.

    Args:
        traces: What `enqueued` gave for each row.
        shape: The batch's rows, and their padded length.
        lengths: Of its rows, in tokens.
    """
    known = [trace for trace in traces if trace is not None]
    return BatchTrace(known, shape, sum(lengths)) if known else _NO_BATCH


# ---------------------------------------------------------------- the ends: collector, client, log


def otlp_tracing() -> Tracing:
    """Give what sends spans by OTLP over gRPC, as the OTEL_* variables say.

    Raises:
        ConfigError: A package is missing, or a variable cannot be used.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"--tracing needs the package {error.name}; install attencode[otel]") from error
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # _Collector tells it once
    logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(_Once())  # that the queue is full
    try:
        collector: Any = _Collector(OTLPSpanExporter())
        return Tracing(BatchSpanProcessor(collector), collector)
    except ValueError as error:
        raise ConfigError(f"--tracing: a variable of OpenTelemetry cannot be used: {error}") from error


class _Collector:
    """The exporter, of which a collector that is away is told once, and keeps no server from ending."""

    def __init__(self, exporter: Any) -> None:
        """Store the exporter that sends."""
        self._exporter = exporter
        self._away = False
        self._timer: threading.Timer | None = None

    def end_soon(self) -> None:
        """Send what comes for a while yet, a short one if nobody answered the last time."""
        self._timer = threading.Timer(_FLUSH_AWAY_S if self._away else _FLUSH_S, self._exporter.shutdown)
        self._timer.start()

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans; on the processor's own thread."""
        result = self._exporter.export(spans)
        away = result.name != "SUCCESS"
        if away and not self._away:
            _LOG.warning("the collector takes no spans; they are dropped until it does")
        elif self._away and not away:
            _LOG.warning("the collector takes spans again")
        self._away = away
        return result

    def shutdown(self) -> None:
        """Send no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._exporter.shutdown()


class _Once(logging.Filter):
    """Lets each message of a logger pass once, whatever its numbers."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether it is new."""
        new = str(record.msg) not in self._told
        self._told.add(str(record.msg))
        return new


def outgoing_metadata() -> tuple[tuple[str, str], ...] | None:
    """Give the metadata that join a call to the caller's active span; None without one.

    Where nobody has imported OpenTelemetry there is none, so that it is not imported for this either.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import propagate  # noqa: PLC0415

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple((key.lower(), value) for key, value in carrier.items())


def span_ids() -> tuple[str, str] | None:
    """Give the trace and span that are current, as hexadecimal digits; None without one."""
    trace = sys.modules.get("opentelemetry.trace")
    context = None if trace is None else trace.get_current_span().get_span_context()
    return (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context and context.is_valid else None


def _named(attributes: Mapping[str, int]) -> dict[str, int | str]:
    return {f"attencode.{name}": n if n < 2**63 else str(n) for name, n in attributes.items()}  # OTLP's are signed


def _version() -> str:
    try:
        return version("attencode")
    except PackageNotFoundError:
        return "unknown"
