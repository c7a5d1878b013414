"""The manifests agree with each other and with the program: selectors, ports, probes, settings, names."""

import re
from collections.abc import Iterator

import pytest
import yaml
from manifests import DEPLOY, Document, Pod, every_combination, matches, needs_kubectl, of_kind, only, pods, render

from service.cli import _parser
from service.config import ServiceConfig, parse_config
from service.server import LIVENESS, READINESS

pytestmark = needs_kubectl

DNS = {"matchLabels": {"k8s-app": "kube-dns"}}


@every_combination
def test_every_selector_finds_a_pod(overlay: str, components: tuple[str, ...]) -> None:
    """Whatever selects Pods by label selects some, within what is applied together."""
    documents = render(overlay, components)
    there = list(pods(documents))
    if overlay == "loadtest":
        there += pods(render("cpu"))
    found = list(selectors(documents))
    assert found
    for place, selector in found:
        assert any(matches(selector, pod.labels) for pod in there), (place, selector)


def selectors(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Give everything that selects Pods, with where it stands."""
    for document in documents:
        spec, place = document.get("spec", {}), f"{document['kind']}/{document['metadata']['name']}"
        if document["kind"] == "Service":
            yield place, {"matchLabels": spec["selector"]}
        if document["kind"] in {"Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"}:
            yield place, spec["selector"]
        if document["kind"] == "NetworkPolicy":
            yield place, spec["podSelector"]
            rules = spec.get("ingress", []) + spec.get("egress", [])
            peers = [peer for rule in rules for peer in rule.get("from", []) + rule.get("to", [])]
            yield from ((place, peer["podSelector"]) for peer in peers if "namespaceSelector" not in peer)
    for pod in pods(documents):
        yield from ((pod.name, spread["labelSelector"]) for spread in pod.spec.get("topologySpreadConstraints", []))
        affinity = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        yield from ((pod.name, term["podAffinityTerm"]["labelSelector"]) for term in terms)


@every_combination
def test_controllers_select_their_own_pods_alone(overlay: str, components: tuple[str, ...]) -> None:
    """No Deployment, StatefulSet, Service or budget counts a Pod of another kind as its own."""
    documents = render(overlay, components)
    for place, selector in selectors(documents):
        if place.split("/")[0] in {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "PodMonitor"}:
            assert len([pod for pod in pods(documents) if matches(selector, pod.labels)]) == 1, place


@every_combination
def test_named_ports_exist(overlay: str, components: tuple[str, ...]) -> None:
    """Ports that Services, policies and monitors name are ports of every Pod that they select."""
    documents = render(overlay, components)
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            selector, names = {"matchLabels": spec["selector"]}, [port["targetPort"] for port in spec["ports"]]
        elif document["kind"] == "PodMonitor":
            selector, names = spec["selector"], [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
        elif document["kind"] == "NetworkPolicy":
            ports = [port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
            selector, names = spec["podSelector"], ports
        else:
            continue
        for pod in pods(documents):
            if matches(selector, pod.labels):
                assert set(names) <= pod.ports().keys(), document["metadata"]["name"]


@every_combination
def test_every_port_is_let_through_and_nothing_else(overlay: str, components: tuple[str, ...]) -> None:
    """Each Pod is closed by the policy that denies all, and each of its ports is opened by another one."""
    documents = render(overlay, components) + (render("cpu") if overlay == "loadtest" else [])
    policies = of_kind(documents, "NetworkPolicy")
    for pod in pods(documents):
        mine = [policy["spec"] for policy in policies if matches(policy["spec"]["podSelector"], pod.labels)]
        closed = [spec for spec in mine if not spec.get("ingress") and not spec.get("egress")]
        assert [spec["policyTypes"] for spec in closed] == [["Ingress", "Egress"]]
        rules = [rule for spec in mine for rule in spec.get("ingress", [])]
        assert all(rule["from"] for rule in rules)  # a rule without would let the whole world in
        ray = any("ports" not in rule for rule in rules)
        assert ray is ("ray.io/cluster" in pod.labels)  # whose nodes choose ports
        opened = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert opened <= pod.ports().keys()
        assert ray or opened == pod.ports().keys() - {"health"}  # for the node alone
    (server,) = (pod for pod in pods(documents) if pod.labels["app.kubernetes.io/component"] == "server")
    rules = [
        rule
        for policy in policies
        if matches(policy["spec"]["podSelector"], server.labels)
        for rule in policy["spec"].get("ingress", [])
    ]
    assert {port["port"] for rule in rules for port in rule.get("ports", [])} == {"grpc", "metrics"}


@every_combination
def test_who_fetches_a_model_gets_out(overlay: str, components: tuple[str, ...]) -> None:
    """Pods that export reach DNS and HTTPS; a server that does not export reaches no address outside."""
    documents = render(overlay, components)
    policies = [policy["spec"] for policy in of_kind(documents, "NetworkPolicy")]
    for pod in pods(documents):
        rules = [
            rule for spec in policies if matches(spec["podSelector"], pod.labels) for rule in spec.get("egress", [])
        ]
        anywhere = {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}
        exports = any(container["name"] == "export" for container in pod.containers)
        if pod.name != "head":  # which asks the API server, wherever that is
            assert anywhere == ({443} if exports else set()), pod.name
        if exports:
            assert any(peer.get("podSelector") == DNS for rule in rules for peer in rule.get("to", []))


def test_probes_ask_for_names_that_the_server_has() -> None:
    """Startup, liveness and readiness have three names of the health service, on the port for health alone."""
    for overlay in ("cpu", "gpu", "local"):
        (pod,) = pods(render(overlay))
        (server,) = pod.spec["containers"]
        names = {kind: server[f"{kind}Probe"]["grpc"]["service"] for kind in ("startup", "liveness", "readiness")}
        assert names["liveness"] == LIVENESS
        assert {names["startup"], names["readiness"]} == set(READINESS)
        for kind in names:
            assert server[f"{kind}Probe"]["grpc"]["port"] == pod.ports()["health"]
    gateway = next(pod for pod in pods(render("kuberay")) if pod.name == "gateway")
    probe = gateway.spec["containers"][0]["readinessProbe"]["grpc"]
    assert probe == {"port": gateway.ports()["grpc"], "service": "attencode.v1.Encoder"}


def settings_of(overlay: str) -> dict[str, str]:
    """Give the settings of an overlay's servers."""
    documents = render(overlay)
    (document,) = (
        found
        for found in of_kind(documents, "ConfigMap")
        if found["metadata"]["name"].startswith("attencode-settings-")
    )
    settings: dict[str, str] = document["data"]
    return settings


def read(overlay: str, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    """Read an overlay's settings as the container's process does: all from the environment, no flag."""
    for name, value in settings_of(overlay).items():
        monkeypatch.setenv(name, value)
    (pod,) = pods(render(overlay))
    (server,) = pod.spec["containers"]
    assert [*server["command"], *server["args"]] == ["attencode", "serve"]
    for variable in server["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    return parse_config([])


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "local"])
def test_the_server_reads_every_setting(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is a setting with a value that the server takes, and counts; ports are the container's."""
    config = read(overlay, monkeypatch)
    for name in settings_of(overlay):
        assert name.removeprefix("ATTENCODE_").lower() in config.model_fields_set
    (pod,) = pods(render(overlay))
    assert pod.ports() == {"grpc": config.port, "metrics": config.metrics_port, "health": config.health_port}
    assert config.host == "0.0.0.0"
    assert config.provider == ("cuda" if overlay == "gpu" else "auto")


def test_the_arithmetic_is_said_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's arithmetic is a setting of its own, beside the export's, and the table of knobs says the same."""
    config = read("cpu", monkeypatch)
    assert "ATTENCODE_PRECISION" in settings_of("cpu")
    (row,) = re.findall(r"(?m)^\| .*`ATTENCODE_PRECISION`.*$", (DEPLOY / "README.md").read_text())
    assert f"| `{config.precision}`: bfloat16 where" in row


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "local"])
def test_a_pod_outlives_its_drain(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes kills no server that still drains; health says so for long enough to be noticed before."""
    config = read(overlay, monkeypatch)
    (pod,) = pods(render(overlay))
    assert pod.spec["terminationGracePeriodSeconds"] >= config.drain_delay_s + config.grace_s + 5
    probe = pod.spec["containers"][0]["readinessProbe"]
    if overlay != "local":
        assert config.drain_delay_s >= probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "local"])
def test_large_answers_leave_room(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be read takes at most an eighth of a Pod's memory, one message less than that."""
    config = read(overlay, monkeypatch)
    (pod,) = pods(render(overlay))
    memory = pod.spec["containers"][0]["resources"]["limits"]["memory"]
    gib = int(re.fullmatch(r"(\d+)Gi", memory)[1])
    assert config.max_answer_bytes <= gib * 2**30 / 8
    assert config.max_message_bytes < config.max_answer_bytes


@every_combination
def test_the_model_is_exported_where_the_server_looks(overlay: str, components: tuple[str, ...]) -> None:
    """The export's command line is one that the program reads; it writes into the volume that servers mount."""
    documents = render(overlay, components)
    exporting = [
        (pod, container) for pod in pods(documents) for container in pod.containers if container["name"] == "export"
    ]
    assert len(exporting) == (0 if overlay == "loadtest" else 1)
    for pod, container in exporting:
        (name,) = (source["configMapRef"]["name"] for source in container["envFrom"])
        values = next(found["data"] for found in of_kind(documents, "ConfigMap") if found["metadata"]["name"] == name)
        words = [re.sub(r"^\$\((\w+)\)$", r"{\1}", word).format(**values) for word in container["args"]]
        parsed = _parser().parse_args(words)
        assert parsed.model == "sentence-transformers/all-MiniLM-L6-v2"
        assert parsed.precision == ("float16" if overlay == "gpu" or "ray-gpu" in components else "float32")
        assert str(parsed.output) == artifact_of(documents)
        assert model_volume(pod) == model_volume(serving(documents)) or "model-claim" in components


def artifact_of(documents: list[Document]) -> str:
    """Give the folder that the servers open."""
    for document in of_kind(documents, "RayService"):
        folder: str = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"][0]["args"]["artifact"]
        return folder
    settings = next(found for found in of_kind(documents, "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    return str(settings["data"]["ATTENCODE_MODEL"])


def serving(documents: list[Document]) -> Pod:
    """Give the Pod that opens the model: a server, or a replica of Ray."""
    there = {pod.labels["app.kubernetes.io/component"]: pod for pod in pods(documents)}
    return there.get("replica", there["server"])


def model_volume(pod: Pod) -> Document:
    """Give the volume that lies under /models."""
    names = {
        mount["name"] for part in pod.containers for mount in part["volumeMounts"] if mount["mountPath"] == "/models"
    }
    (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] in names)
    return volume


@every_combination
def test_what_is_referred_to_is_there(overlay: str, components: tuple[str, ...]) -> None:
    """ConfigMaps, claims, accounts and volumes that Pods name exist; Secrets may be absent, but for Redis' own."""
    documents = render(overlay, components) + (render("cpu") if overlay == "loadtest" else [])
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for pod in pods(documents):
        assert pod.name == "head" or ("ServiceAccount", pod.spec["serviceAccountName"]) in names
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | (
            {"data"} if "redis" in pod.name else set()
        )
        for volume in pod.spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        for container in pod.containers:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
            for variable in container.get("env", []):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or secret.get("optional") or secret["name"] == "attencode-redis"


def test_callers_of_a_load_test_are_as_many_as_the_master_expects() -> None:
    """The master waits for as many workers as there are, finds what they call, and keeps results in the volume."""
    documents = render("loadtest")
    settings = only(documents, "ConfigMap")["data"]
    master, workers = sorted(of_kind(documents, "Job"), key=lambda job: str(job["metadata"]["name"]))
    assert int(settings["LOCUST_EXPECT_WORKERS"]) == workers["spec"]["parallelism"] == workers["spec"]["completions"]
    service = only(documents, "Service")
    args = workers["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--master-host={service['metadata']['name']}" in args
    name, _, port = settings["LOCUST_HOST"].partition(":")
    server = next(found for found in of_kind(render("cpu"), "Service") if found["metadata"]["name"] == name)
    assert int(port) == server["spec"]["ports"][0]["port"]
    (container,) = master["spec"]["template"]["spec"]["containers"]
    results = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "results")
    assert f"--csv={results}/load" in container["args"]
