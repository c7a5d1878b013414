"""What `kubectl apply -k` would send: valid, published under one name, locked down, and in one namespace."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import (
    DEPLOY,
    Document,
    Pod,
    every_combination,
    kubectl,
    needs_kubectl,
    of_kind,
    only,
    pods,
    render,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
pytestmark = needs_kubectl

ROOT = Path(__file__).parents[2]
CUSTOM = {"Certificate", "RayService", "PodMonitor", "PrometheusRule", "ScaledObject"}  # each has a test of its own
LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
OLDEST = "1.30"  # as deploy/README.md says


def test_every_folder_is_tried() -> None:
    """No overlay and no component is left out of the combinations that these tests render."""
    from manifests import COMBINATIONS

    overlays = {path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml")} | {"loadtest"}
    components = {path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml")}
    assert {overlay for overlay, _ in COMBINATIONS} == overlays
    assert {component for _, parts in COMBINATIONS for component in parts} == components


@every_combination
@pytest.mark.parametrize("version", [OLDEST, "1.37"])
def test_kubernetes_knows_every_field(overlay: str, components: tuple[str, ...], version: str) -> None:
    """Each document keeps to the strict schema of the oldest and the newest Kubernetes that are supported."""
    documents = render(overlay, components)
    validated = [document for document in documents if document["kind"] not in CUSTOM]
    assert len(validated) > 4
    for document in validated:
        assert validated_against(json.dumps(document), version) == version


@cache
def validated_against(document: str, version: str) -> str:
    """Validate a document, once for all the combinations that it is in."""
    found: str = kubernetes_validate.validate(json.loads(document), version, strict=True)
    return found


def test_the_reader_of_results_is_valid() -> None:
    """The Pod that copies a load test's results out, applied by itself, keeps to the strict schema too."""
    document = yaml.safe_load((DEPLOY / "loadtest" / "reader.yaml").read_text())
    kubernetes_validate.validate(document, "1.37", strict=True)
    (pod,) = pods([document])
    check_locked(pod)
    claim = only(render("loadtest"), "PersistentVolumeClaim")
    assert pod.spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert document["metadata"]["namespace"] == claim["metadata"]["namespace"]


def test_a_misspelt_key_would_be_found() -> None:
    """The schema refuses what Kubernetes would ignore, so that the tests above mean something."""
    deployment = only(render("cpu"), "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


@every_combination
def test_all_is_in_one_namespace(overlay: str, components: tuple[str, ...]) -> None:
    """Everything lies in the namespace `attencode`, and nothing is there twice."""
    documents = render(overlay, components)
    for document in documents:
        if document["kind"] == "Namespace":
            assert document["metadata"]["name"] == "attencode"
        else:
            assert document["metadata"]["namespace"] == "attencode", document["metadata"]["name"]
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))


@every_combination
def test_images_have_a_target_and_the_version(overlay: str, components: tuple[str, ...]) -> None:
    """Each image has a tag, none is `latest`; ours are named after a target that a Dockerfile has, of this version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    targets = set(re.findall(r"(?m)^FROM .* AS ([a-z]+)$", (ROOT / "Dockerfile").read_text())) | {"loadtest"}
    for _, image in images(render(overlay, components)):
        name, _, tag = image.rpartition(":")
        assert name, image
        assert tag
        assert "latest" not in tag
        if name.startswith("attencode"):
            assert tag == version
            target = name.removeprefix("attencode").removeprefix("-") or "cpu"
            assert target.removesuffix("-gpu") in targets


@every_combination
def test_images_are_moved_and_tagged_apart(overlay: str, components: tuple[str, ...]) -> None:
    """`newName` and `newTag` of each image in an overlay change all of ours, and give none another's name."""
    before = images(render(overlay, components))
    after = images(render(overlay, components, prefix="registry.example/team/", tag="9.9"))
    moved = [
        (part, re.sub(r"^(attencode[a-z-]*):.*$", r"registry.example/team/\1:9.9", image)) for part, image in before
    ]
    if overlay == "local":  # its images are loaded into the cluster
        moved = before
    else:
        assert moved != before
    assert after == moved
    for part, image in before:
        assert ("attencode-export:" in image) is (part == "export")


@every_combination
def test_pods_may_do_as_little_as_they_can(overlay: str, components: tuple[str, ...]) -> None:
    """No root, nothing writable but what is mounted, no capability, no token, and limits on all."""
    for pod in pods(render(overlay, components)):
        check_locked(pod)


def check_locked(pod: Pod) -> None:
    """Assert what the strictest Pod security standard wants, and more."""
    context = pod.spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["runAsGroup"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["enableServiceLinks"] is False
    if pod.name != "head":  # whose autoscaler asks the API server; KubeRay gives it an account
        assert pod.spec["serviceAccountName"] == "attencode"
        assert pod.spec["automountServiceAccountToken"] is False
    for container in pod.containers:
        assert container["securityContext"] == LOCKED, (pod.name, container["name"])
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= limits.keys()
        assert {"cpu", "memory"} == requests.keys()
        for mount in container.get("volumeMounts", []):
            wanted = mount["mountPath"] in {"/models", "/tls", "/keys"} and container["name"] != "export"
            assert mount.get("readOnly", False) is wanted or pod.name == "attencode-load-reader"


@every_combination
def test_memory_is_not_lent(overlay: str, components: tuple[str, ...]) -> None:
    """Outside a laptop a container gets all the memory that it may use, so that a full node never kills it."""
    for pod in pods(render(overlay, components)):
        for container in pod.containers:
            resources = container["resources"]
            if overlay != "local":
                assert resources["requests"]["memory"] == resources["limits"]["memory"], pod.name


def test_the_namespace_admits_only_such_pods() -> None:
    """The namespace enforces the restricted standard, so that a change that loosens something is refused."""
    labels = only(render("cpu"), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def images(documents: list[Document]) -> list[tuple[str, str]]:
    """List the names and images of all containers."""
    found = [(container["name"], container["image"]) for pod in pods(documents) for container in pod.containers]
    assert found
    return found


def test_a_rollout_never_has_fewer_pods_than_it_may() -> None:
    """Pods come before others go, but for GPUs, which are seldom to spare; the budget lets one be evicted."""
    for overlay, surge, missing in (("cpu", 1, 0), ("gpu", 0, 1)):
        documents = render(overlay)
        rolling = only(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": surge, "maxUnavailable": missing}
        assert only(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    # Of what has no scale subresource, as a RayCluster, Kubernetes takes a number that must stay only.
    budget = only(render("kuberay"), "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 1
    assert "maxUnavailable" not in budget


def test_settings_name_their_content() -> None:
    """A changed setting gives its ConfigMap another name, so that Pods are replaced."""
    cpu, gpu = (
        {document["metadata"]["name"] for document in of_kind(render(overlay), "ConfigMap")}
        for overlay in ("cpu", "gpu")
    )
    assert len(cpu) == len(gpu) == 2
    assert not cpu & gpu


def examples() -> list[str]:
    """Give the README's pieces of an overlay of one's own: patches, and a setting, which renders by itself."""
    found = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    assert len(found) == 2
    return found


def own(kustomization: str, folder: Path) -> list[Document]:
    """Give the documents of an overlay of one's own beside the others."""
    place = folder / "deploy" / "overlays" / "mine"
    shutil.copytree(DEPLOY, folder / "deploy")
    place.mkdir()
    (place / "kustomization.yaml").write_text(kustomization)
    command = kubectl()
    assert command is not None
    rendered = subprocess.run([command, "kustomize", str(place)], check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(rendered))


@every_combination
@pytest.mark.parametrize("said", ["attencode", "search", None])
def test_components_follow_the_namespace_of_an_overlay_of_ones_own(
    overlay: str, components: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    """What they add lies where the servers do, whichever namespace such an overlay says, or if it says none."""
    if not components:
        pytest.skip("no component")
    mine = yaml.safe_load(examples()[1])
    assert mine.pop("namespace") == "attencode"
    mine |= {"namespace": said} if said else {}
    mine |= {"resources": [f"../{overlay}"], "components": [f"../../components/{name}" for name in components]}
    if overlay == "kuberay":  # whose settings are in serveConfigV2
        del mine["configMapGenerator"]
    for document in own(yaml.safe_dump(mine), tmp_path):
        where = document["metadata"]["name" if document["kind"] == "Namespace" else "namespace"]
        assert where == (said or "attencode"), document["metadata"]["name"]


def test_the_examples_of_the_readme_render(tmp_path: Path) -> None:
    """An overlay of one's own with the README's setting and its patches has the one and what the others leave."""
    documents = own("\n".join(examples()), tmp_path)
    settings = next(found["data"] for found in of_kind(documents, "ConfigMap") if "ATTENCODE_MODEL" in found["data"])
    assert settings["ATTENCODE_MAX_QUEUE_SIZE"] == "2048"
    assert settings["ATTENCODE_PORT"] == "50051"
    (pod,) = pods(documents)
    assert [container["name"] for container in pod.containers] == ["server"]
    assert [volume["name"] for volume in pod.spec["volumes"]] == ["tmp"]
    assert [mount["name"] for mount in pod.spec["containers"][0]["volumeMounts"]] == ["tmp"]
    policies = {document["metadata"]["name"] for document in of_kind(documents, "NetworkPolicy")}
    assert policies == {"attencode-deny", "attencode-server"}


WHOLE = {"scaleTargetRef", "issuerRef", "secretKeyRef", "groups"}
PLAIN = {"command", "image", "service", "value", "issuerRef", "secretKeyRef", "groups"}


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Give every text of a document with the key under which it stands; labels, which stay, left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in {"labels", "matchLabels", "selector"}:
                yield from strings(inner, key if key in WHOLE else name)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, key)
    elif isinstance(value, str):
        yield key, value


@pytest.mark.parametrize(
    ("overlay", "components", "left"),
    [
        ("cpu", ("autoscaling", "monitoring", "model-claim", "tracing"), set()),
        ("cpu", ("keda", "tls"), {"scaleTargetRef", "dnsNames", "query"}),
        ("kuberay", ("gcs-redis", "ray-gpu"), {"serviceAccountName", "redisAddress"}),
    ],
)
def test_the_readme_says_what_keeps_the_old_names(
    overlay: str, components: tuple[str, ...], left: set[str], tmp_path: Path
) -> None:
    """After `namespace` and `namePrefix` the old ones stand only where the README's table says to change them."""
    names = {
        document["metadata"]["name"]
        for document in render(overlay, components)
        if document["kind"] in {"Deployment", "Service", "ServiceAccount", "PersistentVolumeClaim", "ConfigMap"}
    }
    mine = {
        "namespace": "search",
        "namePrefix": "team-",
        "resources": [f"../{overlay}"],
        "components": [f"../../components/{name}" for name in components],
    }
    found = {
        key
        for document in own(yaml.safe_dump(mine), tmp_path)
        for key, text in strings(document.get("spec", {}))
        if key not in PLAIN and (re.split("[:.]", text)[0] in names or 'namespace="attencode"' in text)
    }
    assert found == left
    for key in left:
        assert f"`{key}`" in (DEPLOY / "README.md").read_text()
