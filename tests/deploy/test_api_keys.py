"""The component for API keys: a setting that the server takes, and the file where it says."""

import pytest
from manifests import needs_kubectl, of_kind, pods, render

from service.config import parse_config

pytestmark = needs_kubectl


@pytest.mark.parametrize("components", [("api-keys",), ("tls", "api-keys")])
@pytest.mark.parametrize("overlay", ["cpu", "gpu", "local"])
def test_the_file_is_where_the_setting_says(
    overlay: str, components: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Secret is mounted whole, read-only, in the server alone, and for its group; no key is in a manifest."""
    documents = render(overlay, components)
    (settings,) = (found["data"] for found in of_kind(documents, "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    (pod,) = pods(documents)
    (server,) = pod.spec["containers"]
    (mount,) = (mount for mount in server["volumeMounts"] if mount["name"] == "api-keys")
    assert parse_config([]).api_keys == f"{mount['mountPath']}/keys.toml"
    assert mount["readOnly"] is True
    assert "subPath" not in mount  # such a file never follows its Secret
    (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] == "api-keys")
    assert volume["secret"] == {"secretName": "attencode-api-keys", "defaultMode": 0o440}
    assert pod.spec["securityContext"]["fsGroup"] == pod.spec["securityContext"]["runAsGroup"]
    for container in pod.spec["initContainers"]:
        assert "api-keys" not in {mount["name"] for mount in container["volumeMounts"]}
    assert not of_kind(documents, "Secret")


def test_probes_and_limits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health needs no key, so that probes ask as before."""
    (pod,), (before,) = pods(render("cpu", ("api-keys",))), pods(render("cpu"))
    (server,), (plain,) = pod.spec["containers"], before.spec["containers"]
    for name in ("startupProbe", "livenessProbe", "readinessProbe", "resources", "securityContext"):
        assert server[name] == plain[name]
