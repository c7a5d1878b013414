"""Dashboard, rules and metrics against promtool, a real Prometheus and a server under load."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.dashboard import write as dashboard
from deploy.dashboard.plot import Prometheus, draw, panels
from service import metrics
from tests.deploy.load import EVERYTHING, SECRET, hasty, run
from tests.service.conftest import LITTLE_CPU, ServerProcess, spawning
from tests.service.faults.load import free_port, wait_until

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "components" / "monitoring"
SETTINGS = ("--max-queue-size", "400", "--stalled-after-s", "1", "--model-name", "tiny", "--provider", "cpu")
ON_RAY = ("--ray", "--replicas", "2", "--replica-cpus", str(LITTLE_CPU))
WINDOW = "5s"
SLOW = pytest.mark.slow
REACHED = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
FROM_OTHERS = {"up"}  # what Prometheus itself says of its targets
LABELS = {
    "method": {"Align", "Encode", "EncodeStream", "GetModel", "Tokenize"},
    "code": {
        *("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
        "UNAUTHENTICATED",
    },
    "reason": {*metrics.REASONS, "died", "hung", "other_version"},
    "outcome": {"ok", "error"},
    "cause": {"memory", "device", "stuck", "error", "not_finite"},
    "file": {"api_keys", "tls"},
    "task": {"health", "pulse", "api_keys", "tls", "artifact", "fleet", "batch", "event loop", "thread"},
    "stage": {"tokenize", "queue", "inference", "other"},
    "model": {"tiny"},
}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; Debian's package prometheus has it")
    return path


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    """Give the rules' groups as Prometheus itself reads them, without Kubernetes' frame."""
    spec: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]
    return spec


def every_rule(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def shown() -> list[dict[str, Any]]:
    """Give the dashboard's panels, titles of rows left out."""
    return panels(json.loads((MONITORING / "dashboard.json").read_text()))


# ---------------------------------------------------------------- without a server


def test_the_dashboard_is_what_its_panels_say() -> None:
    """The committed file is what `python deploy/dashboard/write.py` writes."""
    assert (MONITORING / "dashboard.json").read_text() == dashboard.text()


def test_the_dashboard_can_be_imported(shown: list[dict[str, Any]]) -> None:
    """It has a schema version, its data source is a variable, its panels fill the grid and say how to read them."""
    whole = json.loads((MONITORING / "dashboard.json").read_text())
    assert whole["schemaVersion"] >= 39
    assert {"datasource", "model", "instance"} <= {variable["name"] for variable in whole["templating"]["list"]}
    assert len({panel["id"] for panel in whole["panels"]}) == len(whole["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells
    assert len(taken) == 24 * max(y + 1 for _, y in taken)
    for panel in shown:
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        unit = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
        assert unit["unit"]


def test_grafana_knows_each_key() -> None:
    """Read into Grafana's own model of a dashboard and written again, nothing of it is lost or different."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="Grafana's models are missing")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    given = json.loads((MONITORING / "dashboard.json").read_text())
    known = json.loads(JSONEncoder().encode(models.Dashboard.from_json(given)))
    assert list(lost(given, known)) == []


def lost(given: Any, known: Any, place: str = "") -> Iterator[str]:
    """List where something that was given is not known."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            yield from lost(value, known.get(key), f"{place}.{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for number, value in enumerate(given):
            yield from lost(value, known[number], f"{place}[{number}]")
    elif given != known:
        yield f"{place}: {given!r}, not {known!r}"


def test_every_alert_has_its_page(rules: dict[str, Any]) -> None:
    """Each has a severity, a summary, a description and a section of the runbook, and no section is without alert."""
    alerts = [rule for rule in every_rule(rules) if "alert" in rule]
    sections = re.findall(r"^### (\w+)$", (ROOT / "deploy" / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts]
    for alert in alerts:
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"deploy/RUNBOOK.md#{alert['alert'].lower()}"


def test_the_runbook_names_panels_that_are_there(shown: list[dict[str, Any]]) -> None:
    """What it quotes with a capital letter is the whole title of a panel or a row, or Prometheus' page of targets."""
    text = " ".join((ROOT / "deploy" / "RUNBOOK.md").read_text().split())
    rows = {panel["title"] for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]}
    quoted = set(re.findall(r'"([A-Z][^"]*)"', text))
    assert len(quoted) > 15
    assert quoted <= rows | {panel["title"] for panel in shown} | {"Panel", "Targets"}


def test_every_alert_is_tested_both_ways(rules: dict[str, Any]) -> None:
    """Promtool's tests have a time at which each fires and one at which it does not."""
    tests = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    seen = {
        (case["alertname"], bool(case.get("exp_alerts"))) for test in tests for case in test.get("alert_rule_test", [])
    }
    assert seen == {(rule["alert"], fires) for rule in every_rule(rules) if "alert" in rule for fires in (True, False)}


def test_promtool_accepts_rules_and_their_tests(rules: dict[str, Any], tmp_path: Path) -> None:
    """`promtool check rules` and `promtool test rules` pass."""
    promtool = tool("promtool")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    shutil.copy(Path(__file__).parent / "alerts_test.yaml", tmp_path)
    for words in (
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        ended = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_rules_fit_the_operator(rules: dict[str, Any]) -> None:
    """The PrometheusRule validates against the operator's model, which knows each of its keys."""
    models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1", reason="the operator's models are missing")
    given = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    dumped = models.PrometheusRule.model_validate(given).model_dump(by_alias=True, exclude_none=True, mode="json")
    assert dumped["spec"] == given["spec"]


# ---------------------------------------------------------------- a server under load, and a Prometheus that watches it


@dataclass
class Watched:
    """A server under load, its Prometheus, and what its metrics and its log were in the end."""

    prometheus: Prometheus
    page: str
    log: str
    since_s: float
    until_s: float
    on_ray: bool


@contextmanager
def prometheus_of(port: int, rules: dict[str, Any], folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes a server twice a second and evaluates the rules; gives its address."""
    binary = tool("prometheus")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    often = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    scrape = {"job_name": "attencode", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config = {"global": often, "rule_files": ["rules.yaml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([binary, *words, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            wait_until(lambda: answers(address))
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(
    scope="module", params=[pytest.param("local", marks=SLOW), pytest.param("ray", marks=[SLOW, pytest.mark.ray])]
)
def watched(
    request: pytest.FixtureRequest, tiny_artifact: Path, rules: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """Give a server that has just been under load of all kinds, in this process or on Ray, and its Prometheus."""
    tool("prometheus")
    on_ray = request.param == "ray"
    if on_ray:
        pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")
    with spawning(list(ON_RAY) if on_ray else []) as spawn:
        server = spawn(tiny_artifact, *SETTINGS, RAY_AUTH_MODE="disabled")
        with (
            read_on(server) as lines,
            prometheus_of(server.metrics_port, rules, tmp_path_factory.mktemp("prometheus")) as address,
        ):
            since_s = time.time()
            failures = run(server.address, 10.0, *EVERYTHING)
            failures += run(server.address, 1.0, (hasty, 1))  # among others it is refused at once
            assert not failures, failures
            page = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5).read().decode()
            prometheus = Prometheus(address, job="attencode", window=WINDOW)
            yield Watched(prometheus, page, "".join(lines), since_s, time.time(), on_ray)


@contextmanager
def read_on(server: ServerProcess) -> Iterator[list[str]]:
    """Read what a server logs while the block runs, and end the server with it."""
    lines: list[str] = []
    with os.fdopen(os.dup(server.process.stderr.fileno())) as pipe:
        reader = threading.Thread(target=lambda: lines.extend(pipe))
        reader.start()
        try:
            yield lines
        finally:
            server.terminate()
            reader.join(30)


def names_in(expression: str) -> set[str]:
    """List the metrics that an expression uses."""
    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
            if (inner := getattr(node, name, None)) is not None:
                walk(inner)
        for inner in getattr(node, "args", None) or ():
            walk(inner)

    walk(promql_parser.parse(expression))
    assert found or "vector(" in expression
    return found


def expressions(watched: Watched, shown: list[dict[str, Any]], rules: dict[str, Any]) -> Iterator[str]:
    """Give every expression that has data on such a server."""
    for panel in shown:
        if watched.on_ray or "--ray" not in panel["description"]:
            yield from (watched.prometheus.filled(target["expr"]) for target in panel["targets"])
    for rule in every_rule(rules):
        if watched.on_ray or not re.search("replica|retries", rule["expr"]):
            yield rule["expr"]


def test_each_metric_that_is_asked_for_is_there(
    watched: Watched, shown: list[dict[str, Any]], rules: dict[str, Any]
) -> None:
    """Every expression parses, and names nothing but what the live server exports or the rules record."""
    exported = {sample.name for family in text_string_to_metric_families(watched.page) for sample in family.samples}
    known = exported | FROM_OTHERS | {rule["record"] for rule in every_rule(rules) if "record" in rule}
    for expression in expressions(watched, shown, rules):
        assert names_in(expression) <= known, expression


def test_each_panel_shows_something(watched: Watched, shown: list[dict[str, Any]]) -> None:
    """Each query of each panel gives numbers; without Ray, those that only its replicas feed give none."""
    silent = []
    for panel in shown:
        for target in panel["targets"]:
            found = list(watched.prometheus.series(target, watched.since_s, watched.until_s))
            if not any(series.says_something for series in found):
                silent.append(panel["title"])
            assert all(series.name for series in found), panel["title"]
    assert silent == [panel["title"] for panel in shown if "--ray" in panel["description"] and not watched.on_ray]


def test_the_load_moves_what_it_should(watched: Watched) -> None:
    """Mistakes, refusals, missed deadlines, truncation, padding, unread streams and waiting work are seen as such."""
    moving = [
        *(f'attencode_requests_total{{code="{code}"}}' for code in REACHED),
        'attencode_refused_requests_total{reason="queue_full"}',
        *(f'attencode_stage_seconds_total{{stage="{stage}"}}' for stage in LABELS["stage"]),
        *("attencode_truncated_inputs_total", "attencode_pad_tokens_total", "attencode_stalled_streams_total"),
        *("attencode_queue_inputs", "attencode_unsent_bytes", "attencode_open_streams", "attencode_memory_bytes"),
    ]
    if watched.on_ray:
        moving += ["attencode_replica_batches_total", "attencode_replica_inference_seconds_total"]
    for expression in moving:
        seconds = int(watched.until_s - watched.since_s)
        query = f"max(max_over_time({expression}[{seconds}s]))"
        (result,) = watched.prometheus.ask("query", query=query, time=watched.until_s)["result"]
        assert float(result["value"][1]) > 0, expression
    assert 'attencode_requests_total{code="CANCELLED",method="Encode"} 0.0' in watched.page  # nobody left early


def test_prometheus_evaluates_each_rule(watched: Watched) -> None:
    """No rule fails on a live server's series, and whatever is recorded has a value there."""
    wait_until(lambda: all(rule["health"] != "unknown" for rule in evaluated(watched.prometheus)))
    for rule in evaluated(watched.prometheus):
        assert rule["health"] == "ok", rule
        if rule["type"] == "recording" and (watched.on_ray or "replica" not in rule["name"]):
            assert watched.prometheus.ask("query", query=rule["name"])["result"], rule["name"]


def evaluated(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_metrics(watched: Watched) -> None:
    """`promtool check metrics` finds no fault in the live page."""
    ended = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=watched.page, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr


def test_no_text_is_exported(watched: Watched) -> None:
    """Labels have values from short lists, and nothing that a caller wrote is in the metrics or in the log."""
    assert SECRET not in watched.page
    assert SECRET not in watched.log
    for family in text_string_to_metric_families(watched.page):
        if not family.name.startswith("attencode_"):
            continue
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name in LABELS:
                    assert value in LABELS[name], sample
                elif sample.name == "attencode_model_info":
                    assert name in {"digest", "version", "provider", "precision"}, sample
                else:
                    assert name in {"le", "replica", "node"}, sample


def test_the_dashboard_is_drawn(watched: Watched, tmp_path: Path) -> None:
    """Without Grafana its panels make one picture; those without figures are named."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; install attencode[viz]")
    empty = draw(watched.prometheus, watched.since_s, watched.until_s, tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
    assert bool(empty) is not watched.on_ray
