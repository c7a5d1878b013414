"""Draw the dashboard without Grafana: its queries against a Prometheus, each panel as a picture, all in one file.

    python deploy/dashboard/plot.py --prometheus http://127.0.0.1:9091 --minutes 10 -o dashboard.png

Needs matplotlib (`pip install attencode[viz]`).
"""

import argparse
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

FILE = Path(__file__).parents[1] / "components" / "monitoring" / "dashboard.json"
_COLUMNS = 24
_POINTS = 200
_UNITS = {"s": "s", "reqps": "requests/s", "percentunit": "share", "bytes": "bytes"}


@dataclass(frozen=True, slots=True)
class Series:
    """What one query gave for one set of labels: times and values, NaN included."""

    name: str
    labels: Mapping[str, str]
    times: list[float]
    values: list[float]

    @property
    def says_something(self) -> bool:
        """Whether there is any number in it."""
        return any(map(math.isfinite, self.values))


class Prometheus:
    """A Prometheus server, and what the dashboard's variables stand for there."""

    def __init__(self, address: str, *, job: str = ".*", window: str = "1m") -> None:
        """Store its address, the job's name as a regular expression, and what `$__rate_interval` is."""
        self._address = address.rstrip("/")
        self._values = {"__rate_interval": window, "job": job, "namespace": ".*", "instance": ".*", "model": ".*"}

    def filled(self, expression: str) -> str:
        """Put values in the place of variables."""
        return re.sub(r"\$(\w+)", lambda match: self._values[match[1]], expression)

    def ask(self, path: str, **arguments: object) -> Any:
        """Ask the HTTP interface.

        Raises:
            ValueError: It says why not.
        """
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}", timeout=30) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.read().decode()}: {arguments}") from error

    def series(self, target: Mapping[str, Any], since_s: float, until_s: float) -> Iterator[Series]:
        """Run one of a panel's queries over a time, and name what it gives as the legend would."""
        step_s = max((until_s - since_s) / _POINTS, 1.0)
        query = self.filled(target["expr"])
        data = self.ask("query_range", query=query, start=since_s, end=until_s, step=step_s)
        for result in data["result"]:
            labels = result["metric"]
            name = re.sub(r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), target["legendFormat"])
            times, values = zip(*result["values"], strict=True)
            yield Series(name.strip(), labels, list(times), list(map(float, values)))


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List a dashboard's panels, its rows' titles left out."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def draw(prometheus: Prometheus, since_s: float, until_s: float, output: Path) -> list[str]:
    """Draw every panel where Grafana would put it; returns the titles of those that have nothing to show."""
    dashboard = json.loads(FILE.read_text(encoding="utf-8"))
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = plt.figure(figsize=(22, height * 0.5), layout=None)
    empty = []
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        x, y, width = place["x"] / _COLUMNS, 1 - (place["y"] + place["h"]) / height, place["w"] / _COLUMNS
        if panel["type"] == "row":
            figure.text(0.01, y + 0.2 / height, panel["title"], fontsize=15, weight="bold")
            continue
        low, high = (1.2, 1.9) if panel["type"] != "stat" else (0.6, 1.4)
        axes = figure.add_axes((x + 0.04, y + low / height, width - 0.05, (place["h"] - high) / height))
        axes.set_title(panel["title"], fontsize=10, loc="left")
        found = [item for target in panel["targets"] for item in prometheus.series(target, since_s, until_s)]
        found = [item for item in found if item.says_something]
        if not found:
            empty.append(panel["title"])
            axes.text(0.5, 0.5, "nothing", ha="center")
            continue
        _DRAWN[panel["type"]](axes, panel, found, since_s)
    figure.savefig(output, dpi=60)
    plt.close(figure)
    return empty


def _draw_lines(axes: Any, panel: Mapping[str, Any], found: list[Series], since_s: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacking = defaults["custom"].get("stacking", {}).get("mode")
    if stacking:
        times = sorted({moment for item in found for moment in item.times})
        rows = []
        for item in found:
            values = dict(zip(item.times, item.values, strict=True))
            rows.append([max(0.0, values.get(moment, 0.0)) if values.get(moment) else 0.0 for moment in times])
        if stacking == "percent":
            whole = [sum(column) or 1.0 for column in zip(*rows, strict=True)]
            rows = [[value / total for value, total in zip(row, whole, strict=True)] for row in rows]
        axes.stackplot([moment - since_s for moment in times], rows, labels=[item.name for item in found], alpha=0.7)
    else:
        for item in found:
            axes.plot([moment - since_s for moment in item.times], item.values, label=item.name, linewidth=1.2)
    if "min" in defaults:
        axes.set_ylim(defaults["min"], defaults.get("max"))
    else:
        axes.set_yscale("log")
    unit = "share" if stacking == "percent" else _UNITS.get(defaults["unit"], "")
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", framealpha=0.6)


def _draw_number(axes: Any, panel: Mapping[str, Any], found: list[Series], since_s: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    value = next(value for value in reversed(found[0].values) if math.isfinite(value))
    steps = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
    colour = {"text": "black"}.get(steps[-1]["color"], steps[-1]["color"])
    words = f"{value:.2%}" if defaults["unit"] == "percentunit" else f"{value:.4g}"
    axes.plot([moment - since_s for moment in found[0].times], found[0].values, color=colour, alpha=0.4)
    axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=18, color=colour, transform=axes.transAxes)
    axes.tick_params(labelsize=7)


def _draw_heatmap(axes: Any, panel: Mapping[str, Any], found: list[Series], since_s: float) -> None:
    """Draw a histogram's buckets, which Prometheus gives as sums from below."""
    found.sort(key=lambda item: float(item.labels["le"]))
    times = sorted({moment for item in found for moment in item.times})
    below = [0.0] * len(times)
    rows = []
    for item in found:
        values = dict(zip(item.times, item.values, strict=True))
        sums = [values.get(moment, 0.0) for moment in times]
        rows.append([max(0.0, value - less) ** 0.5 for value, less in zip(sums, below, strict=True)])
        below = sums
    axes.imshow(rows, aspect="auto", origin="lower", cmap="Blues", extent=(0, times[-1] - since_s, 0, len(rows)))
    axes.set_yticks([number + 1 for number in range(len(found))], [item.labels["le"] for item in found], fontsize=7)
    axes.set_ylabel(_UNITS.get(panel["options"]["yAxis"]["unit"], ""), fontsize=8)
    axes.tick_params(labelsize=8)


_DRAWN = {"timeseries": _draw_lines, "stat": _draw_number, "heatmap": _draw_heatmap}


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels into one picture.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--window", default="1m", help="what rates are taken over; four scrape intervals at least")
    parser.add_argument("--job", default=".*attencode.*", help="regular expression of the job's name")
    parser.add_argument("-o", "--output", type=Path, default=Path("dashboard.png"))
    parsed = parser.parse_args()
    now_s = time.time()
    prometheus = Prometheus(parsed.prometheus, job=parsed.job, window=parsed.window)
    empty = draw(prometheus, now_s - 60 * parsed.minutes, now_s, parsed.output)
    print(f"{parsed.output}; nothing in: {', '.join(empty) or 'no panel'}")


if __name__ == "__main__":
    main()
