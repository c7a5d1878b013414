"""The component for tracing: settings that the server takes, and a way out to the collector that they name."""

from urllib.parse import urlsplit

import pytest
from manifests import matches, needs_kubectl, of_kind, pods, render

from service.config import parse_config

pytestmark = needs_kubectl


@pytest.mark.parametrize("components", [("tracing",), ("tls", "model-claim", "tracing")])
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_spans_reach_the_collector(overlay: str, components: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts with its settings, is told of a collector, and its policies let it look it up and reach it."""
    documents = render(overlay, components)
    (settings,) = (found["data"] for found in of_kind(documents, "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    (pod,) = (pod for pod in pods(documents) if pod.labels["app.kubernetes.io/component"] == "server")
    (server,) = pod.spec["containers"]
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    for name, value in (settings | environment).items():
        monkeypatch.setenv(name, value)
    assert parse_config([]).tracing is True
    assert environment["OTEL_SERVICE_NAME"] == "attencode"
    collector = urlsplit(environment["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert collector.hostname
    rules = [
        rule
        for policy in of_kind(documents, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("egress", [])
    ]
    (to,) = (rule["to"] for rule in rules if {"port": collector.port} in rule["ports"])
    namespace = collector.hostname.split(".")[1]
    assert to == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]
    assert any({"port": 53, "protocol": "UDP"} in rule["ports"] for rule in rules)


def test_without_it_nothing_is_sent() -> None:
    """No other component or overlay sends spans."""
    (settings,) = (found["data"] for found in of_kind(render("cpu"), "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    assert "ATTENCODE_TRACING" not in settings
