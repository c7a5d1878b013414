"""Scaling: how many replicas the work needs. Pure: no clock, no I/O.

Ray Serve counts calls in flight, of which the gateways allow few at a time, so it never sees what waits. The
gateways therefore tell the replicas with each batch how many tokens wait, each replica tells how busy it was
and how fast it is, and the policy here turns that into a number. May import: nothing of the service.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TARGET_BUSY_SHARE = 0.7
"""Share of the time that a replica should be busy: beyond it waiting grows fast (M/M/1: 1 / (1 - share))."""
DRAIN_S = 2.0
"""Seconds within which what waits now should have run."""
_BACKLOG_LIFE_S = 5.0
_SMOOTHING = 0.2


@dataclass(slots=True)
class ReplicaLoad:
    """What one replica knows of its own load and of what waits at the gateways.

    Attributes:
        backlogs: Tokens waiting, by gateway, each with when it was told.
        rate_tokens_s: Tokens a second while busy, smoothed.
        busy_s: Seconds of inference since the last report.
        reported_s: When the last report was made.
    """

    reported_s: float
    backlogs: dict[str, tuple[int, float]] = field(default_factory=dict)
    rate_tokens_s: float = 0.0
    busy_s: float = 0.0

    def note_backlog(self, gateway: str, tokens: int, now: float) -> None:
        """Remember how many tokens wait at a gateway."""
        self.backlogs[gateway] = (tokens, now)

    def note_batch(self, tokens: int, seconds: float) -> None:
        """Count a batch that ran."""
        self.busy_s += seconds
        rate = tokens / max(seconds, 1e-6)
        self.rate_tokens_s = (
            rate if not self.rate_tokens_s else self.rate_tokens_s + _SMOOTHING * (rate - self.rate_tokens_s)
        )

    def report(self, now: float) -> dict[str, float]:
        """Give the figures since the last report, in the names that `needed_replicas` reads."""
        elapsed_s = max(now - self.reported_s, 1e-6)
        self.backlogs = {key: told for key, told in self.backlogs.items() if now - told[1] <= _BACKLOG_LIFE_S}
        figures = {
            "busy_share": min(self.busy_s / elapsed_s, 1.0),
            "rate_tokens_s": self.rate_tokens_s,
            "backlog_tokens": float(sum(tokens for tokens, _ in self.backlogs.values())),
        }
        self.busy_s, self.reported_s = 0.0, now
        return figures


def needed_replicas(figures: Mapping[str, Mapping[Any, float]]) -> float:
    """Say how many replicas the present work needs.

    busy shares / TARGET_BUSY_SHARE + backlog / (rate x DRAIN_S), where every replica has heard of about the same
    backlog, so the largest that one has heard of counts.

    Args:
        figures: By the names of `ReplicaLoad.report`, each by replica.
    """
    busy = sum(figures.get("busy_share", {}).values())
    rates = [rate for rate in figures.get("rate_tokens_s", {}).values() if rate > 0]
    backlog = max(figures.get("backlog_tokens", {}).values(), default=0.0)
    drain = backlog / (sum(rates) / len(rates) * DRAIN_S) if rates else 0.0
    return busy / TARGET_BUSY_SHARE + drain


def scale_on_work(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide on a deployment's replicas; an autoscaling policy as Ray Serve calls it.

    Serve itself applies the delays and the bounds.
    """
    needed = math.ceil(needed_replicas(context.aggregated_metrics or {}) - 1e-9)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(needed, least, 1), most), {}
