"""Gate: the ratios that a change must not fall below, from `gate.json`.

Absolute numbers are a machine's; ratios measured in one run are the project's. Each is a rate over another's rate
for the same texts, so more is better, and holds for one model on one provider in one precision.
Pure but for reading the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("gate.json")


@dataclass(frozen=True, slots=True)
class Gate:
    """What must hold.

    Attributes:
        model: Hub id of the model that the floors are for.
        floors: Device, such as `cpu float32`, to ratio's name to its least value.
    """

    model: str
    floors: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the gate: sentences to print, of which any in `fallen` fails the run."""

    fallen: list[str]
    notes: list[str]


def read(path: Path = FILE) -> Gate:
    """Read the gate's file."""
    content = json.loads(path.read_text("utf-8"))
    return Gate(content["model"], content["floors"])


def judge(gate: Gate, model: str, device: str, ratios: Mapping[str, float]) -> Verdict:
    """Hold measured ratios against the floors of this model and device.

    Args:
        gate: The floors.
        model: Hub id of what was measured.
        device: Provider and precision, as in `cpu float32`.
        ratios: What was measured, by name; those that the gate does not name are free.
    """
    floors = gate.floors.get(device)
    if model != gate.model or floors is None:
        return Verdict(
            [], [f"no gate for {model} on {device}; {FILE.name} has {gate.model} on {', '.join(gate.floors)}"]
        )
    fallen = [
        f"{name} is {ratios[name]:.2f}, below the {least:.2f} that {FILE.name} asks for on {device}"
        for name, least in floors.items()
        if name in ratios and not ratios[name] >= least
    ]
    absent = [name for name in floors if name not in ratios]
    notes = [f"not measured in this run, so not held against the gate: {', '.join(absent)}"] if absent else []
    held = len(floors) - len(absent) - len(fallen)
    return Verdict(fallen, [*notes, f"{held} of {len(floors)} ratios hold on {device}"])
