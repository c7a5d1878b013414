"""Metrics: every Prometheus metric of the service, and one record_* function for each event.

Base units (seconds, bytes) and Prometheus' naming rules. May import: prometheus_client.
"""

from prometheus_client import Counter, Gauge, Histogram, Info

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)

REQUESTS = Counter("attencode_requests_total", "Requests that ended, by method and status.", ("method", "code"))
REQUEST_SECONDS = Histogram(
    "attencode_request_duration_seconds", "From a request's arrival to its answer.", ("method",), buckets=_SECONDS
)
REQUESTS_IN_FLIGHT = Gauge("attencode_requests_in_flight", "Requests that were taken in and not yet answered.")
INPUTS = Counter("attencode_inputs_total", "Inputs that were turned into tokens.")
TOKENS = Counter("attencode_tokens_total", "Tokens of those inputs, special ones included.")
TRUNCATED = Counter("attencode_truncated_inputs_total", "Inputs that lost tokens to truncation.")
REFUSED = Counter("attencode_refused_requests_total", "Requests that were not taken in, by reason.", ("reason",))
TOKENIZE_SECONDS = Histogram(
    "attencode_tokenize_duration_seconds", "Turning one request's texts into tokens.", buckets=_SECONDS
)
QUEUE_INPUTS = Gauge("attencode_queue_inputs", "Inputs waiting for a batch.")
QUEUE_TOKENS = Gauge("attencode_queue_tokens", "Tokens waiting for a batch.")
QUEUE_SECONDS = Histogram(
    "attencode_queue_duration_seconds", "How long the oldest input of a batch had waited.", buckets=_SECONDS
)
BATCHES = Counter("attencode_batches_total", "Batches that ended, by graph and outcome.", ("graph", "outcome"))
BATCHES_IN_FLIGHT = Gauge("attencode_batches_in_flight", "Batches handed to the runner and not yet back.")
BATCH_INPUTS = Histogram("attencode_batch_inputs", "Rows of a batch.", buckets=_ROWS)
BATCH_TOKENS = Histogram("attencode_batch_tokens", "Tokens of a batch, padding included.", buckets=_TOKENS)
PAD_TOKENS = Counter("attencode_pad_tokens_total", "Pad tokens that were computed.")
COMPUTED_TOKENS = Counter("attencode_computed_tokens_total", "Tokens that were computed, padding included.")
INFERENCE_SECONDS = Histogram(
    "attencode_inference_duration_seconds", "One run of a graph.", ("graph",), buckets=_SECONDS
)
READY = Gauge("attencode_ready", "1 while requests are taken in, else 0.")
MODEL = Info("attencode_model", "The served model and where it runs.")


def record_request_started() -> None:
    """Count a request that was begun."""
    REQUESTS_IN_FLIGHT.inc()


def record_request(method: str, code: str, seconds: float) -> None:
    """Count an ended request and its time."""
    REQUESTS_IN_FLIGHT.dec()
    REQUESTS.labels(method, code).inc()
    REQUEST_SECONDS.labels(method).observe(seconds)


def record_tokenized(inputs: int, tokens: int, truncated: int, seconds: float) -> None:
    """Count a request's inputs once they are tokens."""
    INPUTS.inc(inputs)
    TOKENS.inc(tokens)
    TRUNCATED.inc(truncated)
    TOKENIZE_SECONDS.observe(seconds)


def record_refused(reason: str) -> None:
    """Count a request that was not taken in."""
    REFUSED.labels(reason).inc()


def record_queue(inputs: int, tokens: int) -> None:
    """Say what waits."""
    QUEUE_INPUTS.set(inputs)
    QUEUE_TOKENS.set(tokens)


def record_batch_started(rows: int, computed_tokens: int, tokens: int, waited_s: float) -> None:
    """Count a batch that goes to the runner."""
    BATCHES_IN_FLIGHT.inc()
    BATCH_INPUTS.observe(rows)
    BATCH_TOKENS.observe(computed_tokens)
    COMPUTED_TOKENS.inc(computed_tokens)
    PAD_TOKENS.inc(computed_tokens - tokens)
    QUEUE_SECONDS.observe(waited_s)


def record_batch_ended(graph: str, outcome: str, seconds: float) -> None:
    """Count a batch that came back, `ok` or `error`."""
    BATCHES_IN_FLIGHT.dec()
    BATCHES.labels(graph, outcome).inc()
    if outcome == "ok":
        INFERENCE_SECONDS.labels(graph).observe(seconds)


def record_ready(*, ready: bool) -> None:
    """Say whether requests are taken in."""
    READY.set(ready)


def record_model(facts: dict[str, str]) -> None:
    """Name the served model and where it runs."""
    MODEL.info(facts)
