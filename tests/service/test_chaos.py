"""A short chaos run: what clients and faults do to a server at random loses nothing and leaves nothing behind."""

import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_left(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ends once and as it should, counters add up, and with the clients all that was theirs is gone."""
    monkeypatch.syspath_prepend(str(ROOT / "loadtests"))
    import chaos

    words = ["--artifact", str(tiny_artifact), "--provider", "cpu", "--precision", "float32", "--seconds", "10"]
    words += ["--clients", "2", "--callers", "8", "--stop-every-s", "4", "--stop-s", "2", "--kill-every-s", "3"]
    arguments = chaos.command().parse_args([*words, "--settle-s", "15", "--seed", str(random.randrange(10**6))])
    outcome = chaos.run(arguments)
    print(f"seed {outcome.seed}\n{outcome.table()}")
    assert not outcome.broken, "\n".join([f"seed {outcome.seed}", *outcome.broken])
    answered = {entry.kind for entry in outcome.entries if entry.outcomes == ("OK",)}
    assert answered >= {"plain", "attention", "streamed", "others"}
    assert outcome.deeds.keys() == {"stopped", "client killed"}
    assert any(entry.outcomes == ("INTERNAL",) for entry in outcome.entries)
