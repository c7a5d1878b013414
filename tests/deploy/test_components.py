"""Autoscaling, monitoring and TLS: their own schemas, and metrics that the server has."""

import importlib
import re

import pytest
import yaml
from manifests import DEPLOY, Document, needs_kubectl, of_kind, only, render
from prometheus_client import REGISTRY

from service import metrics

pytestmark = needs_kubectl

KINDS = {
    "PodMonitor": ("cloudcoil.models.prometheus_operator.v1", "monitoring"),
    "PrometheusRule": ("cloudcoil.models.prometheus_operator.v1", "monitoring"),
    "ScaledObject": ("cloudcoil.models.keda.v1alpha1", "keda"),
    "Certificate": ("cloudcoil.models.cert_manager.v1", "tls"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_know_every_field(kind: str) -> None:
    """Read by the operator's own model and written again, it has lost nothing: no key was unknown."""
    module, component = KINDS[kind]
    models = pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
    document = only(render("cpu", (component,)), kind)
    model = getattr(models, kind)
    assert again(model, document) == document
    document["spec"]["unknown"] = 1
    assert again(model, document) != document


def again(model: type, document: Document) -> Document:
    """Give what a model makes of a document, as far as the document says it; nothing where a key is refused."""
    from pydantic import ValidationError

    try:
        read = model.model_validate(document)  # type: ignore[attr-defined]
    except ValidationError as error:
        if {fault["type"] for fault in error.errors()} != {"extra_forbidden"}:
            raise
        return {}
    written: Document = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return written


def exported() -> set[str]:
    """Give the names of the server's gauges."""
    assert importlib.import_module("service.metrics") is metrics
    return {family.name for family in REGISTRY.collect() if family.type == "gauge"}


def wanted_of_pods(documents: list[Document]) -> dict[str, float]:
    """Give what the HorizontalPodAutoscaler asks for, with its targets."""
    autoscaler = only(documents, "HorizontalPodAutoscaler")["spec"]
    return {
        metric["pods"]["metric"]["name"]: float(metric["pods"]["target"]["averageValue"])
        for metric in autoscaler["metrics"]
        if metric["type"] == "Pods"
    }


def test_the_adapter_gives_what_the_autoscaler_asks_for() -> None:
    """Each custom metric has a rule, of a gauge that the server has, summed over its models for each Pod."""
    rules = yaml.safe_load((DEPLOY / "components" / "autoscaling" / "adapter-rules.yaml").read_text())["rules"]
    given = {}
    for rule in rules["custom"]:
        series = re.match(r"\w+", rule["seriesQuery"])
        assert series
        assert re.fullmatch(rule["name"]["matches"], series[0])
        assert {"namespace", "pod"} == rule["resources"]["overrides"].keys()
        assert rule["metricsQuery"].startswith("sum by (<<.GroupBy>>)")
        given[rule["name"]["as"]] = series[0]
    assert set(given.values()) <= exported()
    assert given.keys() == wanted_of_pods(render("cpu", ("autoscaling",))).keys()


@pytest.mark.parametrize("component", ["autoscaling", "keda"])
def test_an_autoscaler_owns_the_number_of_pods(component: str) -> None:
    """It names the Deployment and its container, and the Deployment says no number that would undo its work."""
    documents = render("cpu", (component,))
    deployment = only(documents, "Deployment")
    assert "replicas" not in deployment["spec"]
    kind = "HorizontalPodAutoscaler" if component == "autoscaling" else "ScaledObject"
    scaler = only(documents, kind)
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"container: {container['name']}" in yaml.safe_dump(scaler) or (
        f"containerName: {container['name']}" in yaml.safe_dump(scaler)
    )


def test_both_autoscalers_want_the_same() -> None:
    """KEDA asks for the same gauges with the same thresholds, within the same bounds, in the same namespace."""
    scaler = only(render("cpu", ("keda",)), "ScaledObject")["spec"]
    asked = {}
    for trigger in scaler["triggers"]:
        if trigger["type"] == "prometheus":
            query = trigger["metadata"]["query"]
            gauge = re.search(r"attencode_\w+", query)
            assert gauge
            assert 'namespace="attencode"' in query
            asked[gauge[0]] = float(trigger["metadata"]["threshold"])
    documents = render("cpu", ("autoscaling",))
    assert asked == wanted_of_pods(documents)
    spec = only(documents, "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (scaler["minReplicaCount"], scaler["maxReplicaCount"])
    assert spec["behavior"] == scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_grafana_finds_the_dashboard() -> None:
    """The dashboard is a ConfigMap with the label that Grafana's sidecar looks for, under a name that stays."""
    documents = render("cpu", ("monitoring",))
    (dashboard,) = (found for found in of_kind(documents, "ConfigMap") if "dashboard.json" in found["data"])
    assert dashboard["metadata"]["name"] == "attencode-dashboard"
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert yaml.safe_load(dashboard["data"]["dashboard.json"])["panels"]


def test_prometheus_finds_its_objects() -> None:
    """Monitor and rules have the label that Prometheus selects by, where it was installed by its usual chart."""
    for kind in ("PodMonitor", "PrometheusRule"):
        for overlay in ("cpu", "kuberay"):
            assert only(render(overlay, ("monitoring",)), kind)["metadata"]["labels"]["release"] == "prometheus"
