"""What `podman` runs of rendered manifests: the Deployment's Pod, or one container of it as flags of `podman run`.

    kubectl kustomize deploy/overlays/cpu | python pod.py pod --image attencode=... --checkpoint FOLDER
    kubectl kustomize deploy/overlays/cpu | python pod.py flags server --volume models=FOLDER

Everything is the manifest's own but what one machine without a cluster cannot have: the names of the images, a
checkpoint in a folder where the model's hub is out of reach, the network, and gRPC probes, which podman does not know
(`probes` prints them for whoever asks them instead). Needs PyYAML.
"""

import argparse
import re
import sys
from typing import Any

import yaml

CHECKPOINT = "/checkpoint"


class Rendered:
    """The documents of one `kubectl kustomize`, its Deployment of a server found."""

    def __init__(self, text: str) -> None:
        """Read them."""
        documents = [document for document in yaml.safe_load_all(text) if document]
        (self.deployment,) = (document for document in documents if document["kind"] == "Deployment")
        self.config_maps = {
            document["metadata"]["name"]: document for document in documents if document["kind"] == "ConfigMap"
        }

    @property
    def spec(self) -> dict[str, Any]:
        """The Pod's spec."""
        spec: dict[str, Any] = self.deployment["spec"]["template"]["spec"]
        return spec

    def containers(self) -> list[dict[str, Any]]:
        """List the containers, those that come first first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> dict[str, Any]:
        """Give one container by name."""
        (found,) = (container for container in self.containers() if container["name"] == name)
        return found

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        """Give the variables that a container gets; those of optional Secrets left out."""
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            values |= self.config_maps[source["configMapRef"]["name"]].get("data", {})
        for variable in container.get("env", []):
            if "value" in variable:
                values[variable["name"]] = variable["value"]
            elif not variable["valueFrom"].get("secretKeyRef", {}).get("optional"):
                raise SystemExit(f"the variable {variable['name']} comes from where podman cannot take it")
        return values

    def command(self, container: dict[str, Any]) -> list[str]:
        """Give a container's arguments, `$(NAME)` replaced as Kubernetes does."""
        values = self.environment(container)
        return [
            re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), word)
            for word in container.get("args", [])
        ]


def use_checkpoint(rendered: Rendered, folder: str) -> None:
    """Let the container that exports take a checkpoint's folder in the place of the hub id, and say it was that id."""
    spec = rendered.spec
    (export,) = spec["initContainers"]
    model = rendered.environment(export)["MODEL"]
    export["args"] = [*export["args"], "--model-id", model]
    export["env"] = [*export.get("env", []), {"name": "MODEL", "value": CHECKPOINT}]
    export["volumeMounts"].append({"name": "checkpoint", "mountPath": CHECKPOINT, "readOnly": True})
    spec["volumes"].append({"name": "checkpoint", "hostPath": {"path": folder, "type": "Directory"}})


def pod(rendered: Rendered, images: dict[str, str]) -> list[dict[str, Any]]:
    """Give the Pod and the ConfigMaps that it reads, as `podman kube play` takes them."""
    for container in rendered.containers():
        container["image"] = image_of(container, images)
        container["imagePullPolicy"] = "Never"
        container["args"] = rendered.command(container)
        # Ports are for networks that podman makes itself.
        for unknown in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
            container.pop(unknown, None)
    metadata = rendered.deployment["spec"]["template"]["metadata"]
    name = rendered.deployment["metadata"]["name"]
    # With initContainers podman plays a Pod once.
    spec = {**rendered.spec, "hostNetwork": True, "restartPolicy": "Never"}
    played = {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": name}, "spec": spec}
    return [*rendered.config_maps.values(), played]


def image_of(container: dict[str, Any], images: dict[str, str]) -> str:
    """Give the local image that stands for a container's."""
    name = re.sub(r"(^.*/|[:@].*$)", "", str(container["image"]))
    if name not in images:
        raise SystemExit(f"no --image for {container['image']}")
    return images[name]


def flags(rendered: Rendered, name: str, volumes: dict[str, str], images: dict[str, str]) -> list[str]:
    """Give what follows `podman run` for one container of the Pod."""
    container = rendered.container(name)
    security = {**rendered.spec.get("securityContext", {}), **container.get("securityContext", {})}
    limits = container["resources"]["limits"]
    words = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
    words += ["--read-only=true", "--read-only-tmpfs=false"] if security["readOnlyRootFilesystem"] else []
    words += [f"--cap-drop={dropped}" for dropped in security["capabilities"]["drop"]]
    words += [] if security["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
    words += ["--memory", re.sub("i$", "", limits["memory"]).lower(), "--cpus", str(limits["cpu"])]
    for key, value in rendered.environment(container).items():
        words += ["--env", f"{key}={value}"]
    for mount in container["volumeMounts"]:
        if mount["name"] in volumes:
            how = "ro" if mount.get("readOnly") else "rw"
            words += ["--volume", f"{volumes[mount['name']]}:{mount['mountPath']}:{how}"]
        else:
            words += ["--tmpfs", f"{mount['mountPath']}:mode=1777"]
    if "command" in container:
        words += ["--entrypoint", "[" + ",".join(f'"{word}"' for word in container["command"]) + "]"]
    return [*words, image_of(container, images), *rendered.command(container)]


def probes(rendered: Rendered, name: str) -> list[str]:
    """Give `startup PORT SERVICE` and its like, one for each probe."""
    container = rendered.container(name)
    return [
        f"{kind} {container[f'{kind}Probe']['grpc']['port']} {container[f'{kind}Probe']['grpc'].get('service', '')}"
        for kind in ("startup", "liveness", "readiness")
    ]


def main() -> int:
    """Read the rendered manifests from standard input and print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pod", "flags", "probes", "grace"))
    parser.add_argument("container", nargs="?", default="server")
    parser.add_argument("--image", action="append", default=[], metavar="NAME=IMAGE")
    parser.add_argument("--volume", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="export this, not what the ConfigMap names")
    parsed = parser.parse_args()
    rendered = Rendered(sys.stdin.read())
    images, volumes = (dict(word.split("=", 1) for word in words) for words in (parsed.image, parsed.volume))
    if parsed.checkpoint:
        use_checkpoint(rendered, parsed.checkpoint)
        volumes["checkpoint"] = parsed.checkpoint
    if parsed.what == "pod":
        yaml.safe_dump_all(pod(rendered, images), sys.stdout, sort_keys=False)
        return 0
    if parsed.what == "flags":
        lines = flags(rendered, parsed.container, volumes, images)
    elif parsed.what == "probes":
        lines = probes(rendered, parsed.container)
    else:
        lines = [str(rendered.spec["terminationGracePeriodSeconds"])]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
