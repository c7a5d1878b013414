"""Write the Grafana dashboard from panels_service.py and panels_work.py: `python deploy/dashboard/write.py`.

The file that it writes is what Grafana reads, and what a test compares with what this would write.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy.dashboard.panel import Panel  # noqa: E402 - found by the line above
from deploy.dashboard.panels_service import FAST, HEALTHY  # noqa: E402
from deploy.dashboard.panels_work import BOTTLENECK, PADDING, REPLICAS  # noqa: E402

FILE = ROOT / "deploy" / "components" / "monitoring" / "dashboard.json"
ROWS = (
    ("Is it healthy?", HEALTHY),
    ("Is it fast?", FAST),
    ("What is the bottleneck?", BOTTLENECK),
    ("What does padding cost?", PADDING),
    ("Which replica is bad?", REPLICAS),
)
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}


def build() -> dict[str, Any]:
    """Give the dashboard as Grafana's model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, _COLUMNS, 1)})
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > _COLUMNS:
                x = 0
            panels.append(_panel(panel, _place(x, y, panel.width, _HEIGHTS[panel.kind])))
            x += panel.width
            if x == _COLUMNS:
                y += _HEIGHTS[panel.kind]
                x = 0
        assert x == 0, f"the last line of {title!r} is not full"
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "attencode",
        "title": "attencode",
        "description": " ".join(title for title, _ in ROWS),
        "tags": ["attencode"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variables() -> list[dict[str, Any]]:
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [
        datasource,
        _variable("job", "Job", "attencode_requests_in_flight"),
        _variable("namespace", "Namespace", 'attencode_requests_in_flight{job=~"$job"}', every=".*"),
        _variable(
            "instance", "Server", 'attencode_requests_in_flight{job=~"$job", namespace=~"$namespace"}', every=".*"
        ),
        _variable("model", "Model", 'attencode_ready{job=~"$job", namespace=~"$namespace"}'),
    ]


def _variable(name: str, label: str, series: str, *, every: str = "") -> dict[str, Any]:
    """Give a variable of a label's values; `every` is what all of them are, where the label may be missing."""
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        **({"allValue": every} if every else {}),
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    kind: dict[str, Any] = {"stat": _stat, "timeseries": _lines, "heatmap": _heatmap}[panel.kind](panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + (" Only with --ray." if panel.fed_by_ray else ""),
        "datasource": _DATASOURCE,
        "gridPos": place,
        **kind,
        "targets": [_target(panel, number, *query) for number, query in enumerate(panel.queries)],
    }


def _target(panel: Panel, number: int, expression: str, legend: str) -> dict[str, Any]:
    target = {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, "datasource": _DATASOURCE}
    return target | ({"format": "heatmap"} if panel.kind == "heatmap" else {})


def _steps(panel: Panel) -> dict[str, Any]:
    """Give the colours: green, then orange and red; or red, then orange and green."""
    colours = ["green", "orange", "red"] if len(panel.thresholds) == 2 else ["green", "red"]
    if panel.low_is_bad:
        colours.reverse()
    bounds = [None, *panel.thresholds]
    steps = [{"color": colour, "value": bound} for colour, bound in zip(colours, bounds, strict=True)]
    return {"mode": "absolute", "steps": steps}


def _stat(panel: Panel) -> dict[str, Any]:
    thresholds = (
        _steps(panel) if panel.thresholds else {"mode": "absolute", "steps": [{"color": "text", "value": None}]}
    )
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit, "thresholds": thresholds}, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _lines(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 30 if panel.stack else 5, "showPoints": "never"}
    if panel.stack:
        custom["stacking"] = {"mode": panel.stack, "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if panel.logarithmic:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    else:
        defaults["min"] = 0
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.thresholds:
        defaults["thresholds"] = _steps(panel)
        custom["thresholdsStyle"] = {"mode": "dashed"}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _heatmap(panel: Panel) -> dict[str, Any]:
    return {
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "exponent": 0.5, "steps": 64},
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
            "rowsFrame": {"layout": "auto"},
        },
    }


def text() -> str:
    """Give the dashboard as the file's text."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
