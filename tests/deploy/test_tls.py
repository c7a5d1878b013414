"""The component for TLS: settings that the server takes, files where they say, probes on a port that is there."""

import pytest
from manifests import Document, Pod, needs_kubectl, of_kind, only, pods, render

from service.config import ServiceConfig, parse_config

pytestmark = needs_kubectl

OVERLAYS = pytest.mark.parametrize("overlay", ["cpu", "gpu", "local"])


def rendered(overlay: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Document], Pod, ServiceConfig]:
    """Give an overlay with the component, its Pod, and the settings as the server reads them."""
    documents = render(overlay, ("tls",))
    (settings,) = (found["data"] for found in of_kind(documents, "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    (pod,) = pods(documents)
    return documents, pod, parse_config([])


@OVERLAYS
def test_the_files_are_where_the_settings_say(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate's Secret is mounted whole, read-only, in the server alone; its keys are the settings' files."""
    documents, pod, config = rendered(overlay, monkeypatch)
    (server,) = pod.spec["containers"]
    (mount,) = (mount for mount in server["volumeMounts"] if mount["name"] == "tls")
    assert mount["readOnly"] is True
    assert "subPath" not in mount  # such a file never follows its Secret
    assert (config.tls_cert, config.tls_key) == (f"{mount['mountPath']}/tls.crt", f"{mount['mountPath']}/tls.key")
    (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == only(documents, "Certificate")["spec"]["secretName"]
    assert volume["secret"]["defaultMode"] == 0o440  # root's and the Pod's own group's
    assert pod.spec["securityContext"]["fsGroup"] == pod.spec["securityContext"]["runAsGroup"]
    for container in pod.spec["initContainers"]:
        assert "tls" not in {mount["name"] for mount in container["volumeMounts"]}


@OVERLAYS
def test_probes_ask_the_port_for_health(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe asks as without TLS, on the plaintext port that the server opens; no Service leads there."""
    documents, pod, config = rendered(overlay, monkeypatch)
    assert pod.ports() == {"grpc": config.port, "metrics": config.metrics_port, "health": config.health_port}
    (server,), (before,) = pod.spec["containers"], next(pods(render(overlay))).spec["containers"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[kind]["grpc"]["port"] == config.health_port
        assert server[kind] == before[kind]
    for service in of_kind(documents, "Service"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["grpc"]


def test_the_certificate_has_the_names_of_the_services() -> None:
    """Every form of each Service's name in the cluster is in it, and no plaintext protocol is announced."""
    documents = render("cpu", ("tls",))
    names = only(documents, "Certificate")["spec"]["dnsNames"]
    services = of_kind(documents, "Service")
    endings = ("", ".attencode", ".attencode.svc", ".attencode.svc.cluster.local")
    assert sorted(names) == sorted(f"{service['metadata']['name']}{end}" for service in services for end in endings)
    for service in services:
        assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"https"}
