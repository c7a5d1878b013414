"""Scaling: the number of replicas follows from what is busy and what waits."""

from types import SimpleNamespace

import pytest

from service.scaling import DRAIN_S, TARGET_BUSY_SHARE, ReplicaLoad, needed_replicas, scale_on_work


def figures(*replicas: tuple[float, float, float]) -> dict[str, dict[str, float]]:
    """Lay out (busy share, tokens/s, backlog in tokens) of replicas as Serve does."""
    names = ("busy_share", "rate_tokens_s", "backlog_tokens")
    return {name: {f"r{n}": row[place] for n, row in enumerate(replicas)} for place, name in enumerate(names)}


def test_a_load_reports_what_happened_since() -> None:
    """Busy share, speed and backlog come from the batches since the last report."""
    load = ReplicaLoad(100.0)
    load.note_backlog("a", 500, 100.5)
    load.note_backlog("b", 250, 101.0)
    load.note_backlog("a", 700, 101.5)
    load.note_batch(1000, 0.5)
    assert load.report(102.0) == {"busy_share": 0.25, "rate_tokens_s": 2000.0, "backlog_tokens": 950.0}
    assert load.report(104.0)["busy_share"] == 0.0


def test_a_silent_gateway_is_forgotten() -> None:
    """What a gateway said long ago waits no longer."""
    load = ReplicaLoad(0.0)
    load.note_backlog("a", 500, 1.0)
    assert load.report(5.0)["backlog_tokens"] == 500.0
    assert load.report(7.0)["backlog_tokens"] == 0.0


def test_busy_replicas_want_company() -> None:
    """Replicas busy beyond the target share need more of them, idle ones fewer."""
    assert needed_replicas(figures((0.7, 1000, 0), (0.7, 1000, 0))) == pytest.approx(1.4 / TARGET_BUSY_SHARE)
    assert needed_replicas(figures((0.1, 1000, 0), (0.1, 1000, 0))) < 1
    assert needed_replicas({}) == 0


def test_a_backlog_counts_once() -> None:
    """Each replica hears of the same backlog; it wants as many as drain it in time."""
    backlog = 4 * 1000 * DRAIN_S
    assert needed_replicas(figures((0, 1000, backlog), (0, 1000, backlog))) == pytest.approx(4)
    assert needed_replicas(figures((0, 0, backlog))) == 0, "a replica that has run nothing has no speed yet"


@pytest.mark.parametrize(("backlog", "wanted"), [(0, 2), (8 * 1000 * DRAIN_S, 6), (3.5 * 1000 * DRAIN_S, 4)])
def test_the_policy_keeps_the_bounds(backlog: float, wanted: int) -> None:
    """The number is rounded up and kept within the deployment's bounds."""
    context = SimpleNamespace(
        aggregated_metrics=figures((0, 1000, backlog)),
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert scale_on_work(context) == (wanted, {})
