"""Manifests: what kustomize makes of deploy/, and the Pods that are in it.

May import: pytest, yaml.
"""

import copy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
Document = dict[str, Any]

EACH_ALONE = ("api-keys", "autoscaling", "keda", "monitoring", "model-claim", "tls", "tracing")
COMBINATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((overlay, ()) for overlay in ("cpu", "gpu", "kuberay", "local")),
    *((overlay, (component,)) for overlay in ("cpu", "gpu") for component in EACH_ALONE),
    *((overlay, ("monitoring", "autoscaling", "model-claim")) for overlay in ("cpu", "gpu")),
    *((overlay, ("monitoring", "keda", "model-claim")) for overlay in ("cpu", "gpu")),
    *(
        (overlay, ("monitoring", "autoscaling", "model-claim", "tls", "api-keys", "tracing"))
        for overlay in ("cpu", "gpu")
    ),
    ("cpu", ("tls", "model-claim")),  # in the other order too
    ("local", ("monitoring",)),
    ("local", ("tls",)),
    ("local", ("api-keys",)),
    ("local", ("tracing",)),
    *(("kuberay", (component,)) for component in ("monitoring", "ray-gpu", "gcs-redis")),
    ("kuberay", ("monitoring", "ray-gpu", "gcs-redis")),
    ("loadtest", ()),
)
"""Every overlay, and every set of components that may go with it and is worth a look."""


@dataclass(frozen=True)
class Pod:
    """A Pod that a document makes: its name, its labels, and its spec."""

    name: str
    labels: dict[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        """All its containers, those that run first included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def ports(self) -> dict[str, int]:
        """Its named ports."""
        return {
            port["name"]: port["containerPort"] for part in self.spec["containers"] for port in part.get("ports", [])
        }


every_combination = pytest.mark.parametrize(
    ("overlay", "components"),
    COMBINATIONS,
    ids=["+".join((overlay, *components)) for overlay, components in COMBINATIONS],
)


def kubectl() -> str | None:
    """Find kubectl: beside this Python, where the package on PyPI puts it, or on the path."""
    beside = Path(sys.executable).parent / "kubectl"
    return str(beside) if beside.exists() else shutil.which("kubectl")


needs_kubectl = pytest.mark.skipif(kubectl() is None, reason="kubectl is missing; `make install` brings it")


@cache
def _rendered(overlay: str, components: tuple[str, ...], prefix: str, tag: str) -> list[Document]:
    command = kubectl()
    assert command is not None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "deploy"
        shutil.copytree(DEPLOY, folder)
        place = folder / "loadtest" if overlay == "loadtest" else folder / "overlays" / overlay
        path = place / "kustomization.yaml"
        kustomization = yaml.safe_load(path.read_text())
        if components:
            kustomization["components"] = [f"../../components/{component}" for component in components]
        for entry in kustomization.get("images", []):
            entry["newName"] = prefix + entry["newName"]
            if tag:
                entry["newTag"] = tag
        path.write_text(yaml.safe_dump(kustomization))
        done = subprocess.run([command, "kustomize", str(place)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # kustomize warns of what is deprecated
    return list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def render(overlay: str, components: Sequence[str] = (), prefix: str = "", tag: str = "") -> list[Document]:
    """Give the documents of an overlay with some components, its images taken from somewhere and of some version."""
    return copy.deepcopy(_rendered(overlay, tuple(components), prefix, tag))


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    """Give the documents of one kind."""
    return [document for document in documents if document["kind"] == kind]


def only(documents: Sequence[Document], kind: str) -> Document:
    """Give the one document of a kind."""
    (document,) = of_kind(documents, kind)
    return document


def pods(documents: Sequence[Document]) -> Iterator[Pod]:
    """Give every Pod that the documents make; those of a RayService with the labels that KubeRay adds."""
    for document in documents:
        spec = document.get("spec", {})
        name = document["metadata"]["name"]
        if document["kind"] == "Pod":
            yield Pod(name, document["metadata"]["labels"], spec)
        elif document["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield _pod(name, spec["template"], {})
        elif document["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield _pod("head", cluster["headGroupSpec"]["template"], _ray_labels("head", "headgroup"))
            for group in cluster["workerGroupSpecs"]:
                yield _pod(group["groupName"], group["template"], _ray_labels("worker", group["groupName"]))


def _pod(name: str, template: Document, added: dict[str, str]) -> Pod:
    return Pod(name, {**template["metadata"]["labels"], **added}, copy.deepcopy(template["spec"]))


def _ray_labels(node: str, group: str) -> dict[str, str]:
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node,
        "ray.io/group": group,
        "ray.io/cluster": "attencode-x",
    }


def matches(selector: Document, labels: dict[str, str]) -> bool:
    """Tell whether a selector, by equality alone, takes a Pod of these labels."""
    assert selector.keys() <= {"matchLabels"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items()
