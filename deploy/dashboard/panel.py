"""Panel: one panel of the Grafana dashboard as data, and the expressions of which panels are made.

`$...` are the dashboard's variables. Expressions may use no metric but the server's own, `up`, and what
`components/monitoring/rules.yaml` records. Imports nothing of the project.
"""

from dataclasses import dataclass

SERVERS = 'job=~"$job", namespace=~"$namespace", instance=~"$instance"'
MODELS = f'{SERVERS}, model=~"$model"'
REQUESTS = "attencode_requests_total"
DURATION = "attencode_request_duration_seconds"
FAULTS = f'{REQUESTS}{{{SERVERS}, code=~"INTERNAL|UNAVAILABLE"}}'
REFUSED = f'{REQUESTS}{{{SERVERS}, code="RESOURCE_EXHAUSTED"}}'
LATE = f'{REQUESTS}{{{SERVERS}, code="DEADLINE_EXCEEDED"}}'
ALL = f"{REQUESTS}{{{SERVERS}}}"
ENCODE = f'{SERVERS}, method="Encode"'
RANGE = "[$__rate_interval]"
SERVER = "{{pod}} {{instance}}"  # a pod's name where Prometheus has it, the address everywhere
REPLICA = "{{model}} {{replica}} on {{node}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: What it shows.
        description: How to read it.
        unit: Grafana's name of the unit.
        queries: Expressions, each with its legend.
        width: Of 24 columns.
        kind: Grafana's name of the panel's type.
        stack: `normal`, `percent`, or empty for lines of their own.
        thresholds: Values from which it turns orange and red; none for no colour.
        low_is_bad: The thresholds are lower bounds: red below the first, green from the last on.
        most: Top of the axis; None for as high as it goes.
        logarithmic: Whether the axis is, for what differs by orders of magnitude.
        fed_by_ray: Only a server with `--ray` has these figures.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    kind: str = "timeseries"
    stack: str = ""
    thresholds: tuple[float, ...] = ()
    low_is_bad: bool = False
    most: float | None = None
    logarithmic: bool = False
    fed_by_ray: bool = False


def rate(metric: str, by: str, labels: str) -> str:
    """Give increases a second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}{RANGE}))"


def over(part: str, whole: str) -> str:
    """Divide two rates, 0 where nothing happens."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def share(part: str) -> str:
    """Give the share of all requests that such requests have."""
    return over(f"sum(rate({part}{RANGE}))", f"sum(rate({ALL}{RANGE}))")


def mean(histogram: str, by: str, labels: str) -> str:
    """Give the mean of a histogram's values."""
    return f"{rate(histogram + '_sum', by, labels)} / {rate(histogram + '_count', by, labels)}"


def quantile(portion: float, histogram: str, labels: str, by: str = "") -> str:
    """Give the value below which that portion of a histogram's values lie."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({portion}, {rate(histogram + '_bucket', groups, labels)})"


PAD = rate("attencode_pad_tokens_total", "model", MODELS)
COMPUTED = rate("attencode_computed_tokens_total", "model", MODELS)
INPUTS = rate("attencode_inputs_total", "model", MODELS)
TOKENS = rate("attencode_tokens_total", "model", MODELS)
BATCHES = rate("attencode_batch_inputs_count", "model", MODELS)
