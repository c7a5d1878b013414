"""Metrics: every Prometheus metric of the service, and one record_* function for each event.

Base units (seconds, bytes) and Prometheus' naming rules. May import: prometheus_client.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram, Info

Metric = TypeVar("Metric", Counter, Gauge, Histogram, Info)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_CODES = (
    *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED"),
    "UNAVAILABLE",
)
FAULTS = ("memory", "device", "stuck", "error", "not_finite")
FILES = ("api_keys", "tls")
TASKS = ("health", "pulse", *FILES, "artifact", "batch", "event loop", "thread")
REASONS = (
    *("not_accepting", "queue_full", "queue_tokens", "deadline", "requests", "request_bytes", "slow_message"),
    *("no_message", "streams", "unsent_answers", "unauthenticated", "key_rate", "key_concurrency"),
    *("connection_requests", "connection_streams"),
)
_MODEL = ("model",)
_REPLICA = ("model", "replica", "node")

REQUESTS = Counter("attencode_requests_total", "Requests that ended, by method and status.", ("method", "code"))
REQUEST_SECONDS = Histogram(
    "attencode_request_duration_seconds", "From a request's arrival to its answer.", ("method",), buckets=_SECONDS
)
REQUESTS_IN_FLIGHT = Gauge("attencode_requests_in_flight", "Requests that were taken in and not yet answered.")
STAGE_SECONDS = Counter(
    "attencode_stage_seconds_total",
    "Seconds of answered Encode requests and stream items by where they passed: tokenize, queue, inference, other.",
    ("model", "stage"),
)
INPUTS = Counter("attencode_inputs_total", "Inputs that were turned into tokens.", _MODEL)
TOKENS = Counter("attencode_tokens_total", "Tokens of those inputs, special ones included.", _MODEL)
TRUNCATED = Counter("attencode_truncated_inputs_total", "Inputs that lost tokens to truncation.", _MODEL)
REFUSED = Counter("attencode_refused_requests_total", "Requests that were not taken in, by reason.", ("reason",))
STALLED = Counter("attencode_stalled_streams_total", "Streams that were ended because nobody read their answers.")
OPEN_STREAMS = Gauge("attencode_open_streams", "EncodeStream calls that are open.")
UNSENT_BYTES = Gauge("attencode_unsent_bytes", "Bytes of answers that are computed, or begun, and not yet sent.")
UNSENT_LIMIT_BYTES = Gauge("attencode_unsent_limit_bytes", "Of these, how many may be of answers above 1 MiB.")
LOOP_LAG_SECONDS = Histogram(
    "attencode_event_loop_lag_seconds", "How late the event loop woke a task, ten times a second.", buckets=_SECONDS
)
LOOP_CPU_SECONDS = Counter(
    "attencode_event_loop_cpu_seconds_total", "CPU seconds of the event loop's thread; 1 a second is a full core."
)
MEMORY_BYTES = Gauge("attencode_memory_bytes", "Memory of this container that the kernel cannot take back.")
MEMORY_LIMIT_BYTES = Gauge("attencode_memory_limit_bytes", "Where the kernel ends this container.")
CERTIFICATE_END_SECONDS = Gauge(
    "attencode_tls_certificate_expiry_timestamp_seconds",
    "When the certificate that new connections are shown ends, in seconds since 1970; 0 without TLS.",
)
CONNECTIONS = Gauge(
    "attencode_connections", "TCP connections that are open to the port for gRPC, silent ones too; NaN if unknown."
)
CONNECTIONS_LIMIT = Gauge("attencode_connections_limit", "How many there may be; further ones are closed at once.")
FILES_REJECTED = Gauge(
    "attencode_files_rejected",
    "1 while a file on the disk, api_keys or tls, cannot be used, so that what was read before stays; else 0.",
    ("file",),
)
TOKENIZE_SECONDS = Histogram(
    "attencode_tokenize_duration_seconds", "Turning one request's texts into tokens.", _MODEL, buckets=_SECONDS
)
QUEUE_INPUTS = Gauge("attencode_queue_inputs", "Inputs waiting for a batch.", _MODEL)
QUEUE_TOKENS = Gauge("attencode_queue_tokens", "Tokens waiting for a batch.", _MODEL)
QUEUE_SECONDS = Histogram(
    "attencode_queue_duration_seconds", "How long the oldest input of a batch had waited.", _MODEL, buckets=_SECONDS
)
BATCHES = Counter("attencode_batches_total", "Batches that ended, by outcome.", ("model", "outcome"))
FAILED_BATCHES = Counter(
    "attencode_batch_faults_total",
    "Batches that failed, by cause: memory, device, stuck, error; of not_finite, inputs without a finite answer.",
    ("model", "cause"),
)
FLOAT32_INPUTS = Counter(
    "attencode_float32_inputs_total", "Inputs that overflowed the model's precision and ran again in float32.", _MODEL
)
CRASHES = Counter("attencode_crashes_total", "Failures of the server's own tasks and threads, by name.", ("task",))
BATCHES_IN_FLIGHT = Gauge("attencode_batches_in_flight", "Batches handed to the runner and not yet back.", _MODEL)
BATCH_INPUTS = Histogram("attencode_batch_inputs", "Rows of a batch.", _MODEL, buckets=_ROWS)
BATCH_TOKENS = Histogram("attencode_batch_tokens", "Tokens of a batch, padding included.", _MODEL, buckets=_TOKENS)
PAD_TOKENS = Counter("attencode_pad_tokens_total", "Pad tokens that were computed.", _MODEL)
COMPUTED_TOKENS = Counter("attencode_computed_tokens_total", "Tokens that were computed, padding included.", _MODEL)
WASTED_INPUTS = Counter(
    "attencode_wasted_inputs_total", "Inputs that were computed for callers who were gone by then.", _MODEL
)
WASTED_TOKENS = Counter("attencode_wasted_tokens_total", "Tokens of those inputs.", _MODEL)
INFERENCE_SECONDS = Histogram(
    "attencode_inference_duration_seconds", "One run of a model on a batch.", ("model",), buckets=_SECONDS
)
BATCH_SECONDS = Histogram(
    "attencode_batch_duration_seconds",
    "From a batch's hand-over to its return: a run, the wait for a free stream, the way to a replica and back.",
    _MODEL,
    buckets=_SECONDS,
)
COMPUTE_STREAMS = Gauge("attencode_compute_streams", "Batches that are computed side by side when all is busy.", _MODEL)
READY = Gauge("attencode_ready", "1 while the model has a runner that answers, else 0.", _MODEL)
MODEL = Info("attencode_model", "A served model and where it runs.", _MODEL)

REPLICAS = Gauge("attencode_replicas", "Replicas of a model that answer.", _MODEL)
REPLICA_BATCHES = Counter("attencode_replica_batches_total", "Batches that a replica answered.", _REPLICA)
REPLICA_TOKENS = Counter("attencode_replica_tokens_total", "Tokens of those batches, padding included.", _REPLICA)
REPLICA_SECONDS = Counter("attencode_replica_inference_seconds_total", "Seconds its graph ran for them.", _REPLICA)
REPLICA_ERRORS = Counter("attencode_replica_errors_total", "Batches on which a replica's model failed.", _REPLICA)
REPLICA_IN_FLIGHT = Gauge("attencode_replica_batches_in_flight", "Batches at a replica when it last spoke.", _REPLICA)
RETRIES = Counter("attencode_batch_retries_total", "Batches that were sent again, by reason.", ("model", "reason"))


@lru_cache(maxsize=1024)
def _of(metric: Metric, *labels: str) -> Metric:
    """Give one series of a metric: six times as fast as `labels`, for series that are never removed."""
    return metric.labels(*labels)


def prepare_requests(methods: Iterable[str]) -> None:
    """Begin each series of requests at 0: of one that begins at 1, Prometheus sees no increase."""
    for method in methods:
        for code in _CODES:
            _of(REQUESTS, method, code)
    for task in TASKS:
        _of(CRASHES, task)
    for file in FILES:
        _of(FILES_REJECTED, file)
    for reason in REASONS:
        _of(REFUSED, reason)


def prepare_model(model: str) -> None:
    """Begin a model's series at 0, not ready."""
    _of(READY, model).set(0)
    for metric in (INPUTS, TOKENS, TRUNCATED, PAD_TOKENS, COMPUTED_TOKENS, QUEUE_INPUTS, QUEUE_TOKENS, FLOAT32_INPUTS):
        _of(metric, model)
    for cause in FAULTS:
        _of(FAILED_BATCHES, model, cause)
    for metric in (WASTED_INPUTS, WASTED_TOKENS):
        _of(metric, model)
    for outcome in ("ok", "error"):
        _of(BATCHES, model, outcome)


def watch_memory(used: Callable[[], float], limit: Callable[[], float]) -> None:
    """Read the memory's figures whenever somebody asks for metrics."""
    MEMORY_BYTES.set_function(used)
    MEMORY_LIMIT_BYTES.set_function(limit)


def watch_connections(count: Callable[[], float], limit: int) -> None:
    """Count the open connections whenever somebody asks for metrics."""
    CONNECTIONS.set_function(count)
    CONNECTIONS_LIMIT.set(limit)


def watch_certificate(end: Callable[[], float]) -> None:
    """Read a certificate's end, in seconds since 1970, whenever somebody asks for metrics."""
    CERTIFICATE_END_SECONDS.set_function(end)


def record_file(file: str, *, rejected: bool) -> None:
    """Say whether what is on the disk cannot be used."""
    _of(FILES_REJECTED, file).set(rejected)


def watch_unsent(held: Callable[[], int], limit: int) -> None:
    """Read the bytes of unsent answers whenever somebody asks for metrics."""
    UNSENT_BYTES.set_function(held)
    UNSENT_LIMIT_BYTES.set(limit)


def record_loop(lag_s: float, cpu_s: float) -> None:
    """Say how late the event loop was, and how long it has worked since it last said so."""
    LOOP_LAG_SECONDS.observe(lag_s)
    LOOP_CPU_SECONDS.inc(cpu_s)


def record_stream(change: int) -> None:
    """Count a stream that is opened, 1, or has ended, -1."""
    OPEN_STREAMS.inc(change)


def record_stages(model: str, tokenize_s: float, queue_s: float, inference_s: float, total_s: float) -> None:
    """Say where an answered request's time passed; what is none of the three is `other`.

    That is reading and writing messages, waiting for room for the answer, and the way to a replica.
    """
    _of(STAGE_SECONDS, model, "tokenize").inc(tokenize_s)
    _of(STAGE_SECONDS, model, "queue").inc(queue_s)
    _of(STAGE_SECONDS, model, "inference").inc(inference_s)
    _of(STAGE_SECONDS, model, "other").inc(max(0.0, total_s - tokenize_s - queue_s - inference_s))


def record_request_started() -> None:
    """Count a request that was begun."""
    REQUESTS_IN_FLIGHT.inc()


def record_request(method: str, code: str, seconds: float) -> None:
    """Count an ended request and its time."""
    REQUESTS_IN_FLIGHT.dec()
    _of(REQUESTS, method, code).inc()
    _of(REQUEST_SECONDS, method).observe(seconds)


def record_tokenized(model: str, inputs: int, tokens: int, truncated: int, seconds: float) -> None:
    """Count a request's inputs once they are tokens."""
    _of(INPUTS, model).inc(inputs)
    _of(TOKENS, model).inc(tokens)
    _of(TRUNCATED, model).inc(truncated)
    _of(TOKENIZE_SECONDS, model).observe(seconds)


def record_refused(reason: str) -> None:
    """Count a request that was not taken in."""
    _of(REFUSED, reason).inc()


def record_turned_away(method: str, code: str, reason: str) -> None:
    """Count a request that was refused before it was begun, so that it has no time."""
    _of(REQUESTS, method, code).inc()
    if reason:
        _of(REFUSED, reason).inc()


def record_stalled() -> None:
    """Count a stream that is ended because nobody reads it."""
    STALLED.inc()


def record_queue(model: str, inputs: int, tokens: int) -> None:
    """Say what waits."""
    _of(QUEUE_INPUTS, model).set(inputs)
    _of(QUEUE_TOKENS, model).set(tokens)


def record_batch_started(model: str, rows: int, computed_tokens: int, tokens: int, waited_s: float) -> None:
    """Count a batch that goes to the runner."""
    _of(BATCHES_IN_FLIGHT, model).inc()
    _of(BATCH_INPUTS, model).observe(rows)
    _of(BATCH_TOKENS, model).observe(computed_tokens)
    _of(COMPUTED_TOKENS, model).inc(computed_tokens)
    _of(PAD_TOKENS, model).inc(computed_tokens - tokens)
    _of(QUEUE_SECONDS, model).observe(waited_s)


def record_batch_ended(model: str, outcome: str, inference_s: float = 0.0, whole_s: float = 0.0) -> None:
    """Count a batch that came back, `ok` or `error`; if ok, how long the model ran and how long it was away in all."""
    _of(BATCHES_IN_FLIGHT, model).dec()
    _of(BATCHES, model, outcome).inc()
    if outcome == "ok":
        _of(INFERENCE_SECONDS, model).observe(inference_s)
        _of(BATCH_SECONDS, model).observe(whole_s)


def record_fault(model: str, cause: str, count: int = 1) -> None:
    """Count a batch that failed, or inputs for which the model has no finite answer, by the cause."""
    _of(FAILED_BATCHES, model, cause).inc(count)


def record_float32(model: str, inputs: int) -> None:
    """Count inputs that ran again in float32."""
    _of(FLOAT32_INPUTS, model).inc(inputs)


def record_crash(task: str) -> None:
    """Count a failure of one of the server's own tasks or threads."""
    _of(CRASHES, task).inc()


def record_wasted(model: str, inputs: int, tokens: int) -> None:
    """Count what was computed for callers who were gone when it came back."""
    _of(WASTED_INPUTS, model).inc(inputs)
    _of(WASTED_TOKENS, model).inc(tokens)


def record_compute_streams(model: str, count: int) -> None:
    """Say how many batches can be computed side by side."""
    _of(COMPUTE_STREAMS, model).set(count)


def record_ready(model: str, *, ready: bool) -> None:
    """Say whether a model answers."""
    _of(READY, model).set(ready)


def record_model(model: str, facts: dict[str, str]) -> None:
    """Describe a served model and where it runs."""
    _of(MODEL, model).info(facts)


def record_replica_batch(
    model: str, replica: str, node: str, *, tokens: int, seconds: float, in_flight: int, failed: bool = False
) -> None:
    """Count a batch that a replica answered, or whose model `failed` there, by what the replica itself measured."""
    labels = (model, replica, node)
    REPLICA_ERRORS.labels(*labels).inc(failed)
    REPLICA_BATCHES.labels(*labels).inc()
    REPLICA_TOKENS.labels(*labels).inc(tokens)
    REPLICA_SECONDS.labels(*labels).inc(seconds)
    REPLICA_IN_FLIGHT.labels(*labels).set(in_flight)


def record_replica_gone(model: str, replica: str, node: str) -> None:
    """Drop the series of a replica that is no more."""
    for metric in (REPLICA_BATCHES, REPLICA_TOKENS, REPLICA_SECONDS, REPLICA_ERRORS, REPLICA_IN_FLIGHT):
        with suppress(KeyError):  # one that never had a batch
            metric.remove(model, replica, node)


def record_replicas(model: str, count: int, streams: int) -> None:
    """Say how many replicas answer, and how many batches each computes side by side."""
    _of(REPLICAS, model).set(count)
    record_compute_streams(model, count * streams)
    for reason in ("died", "hung", "other_version"):
        _of(RETRIES, model, reason)


def record_replica_in_flight(model: str, replica: str, node: str, in_flight: int) -> None:
    """Say how many batches a replica holds."""
    REPLICA_IN_FLIGHT.labels(model, replica, node).set(in_flight)


def record_retry(model: str, reason: str) -> None:
    """Count a batch that is sent again: its replica `died` or `hung`, or served an `other_version`."""
    _of(RETRIES, model, reason).inc()
