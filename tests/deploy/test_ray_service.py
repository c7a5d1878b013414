"""The RayService: KubeRay's schema, Ray Serve's, and the program's own settings, each with no key that it ignores."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from manifests import DEPLOY, Document, needs_kubectl, only, pods, render

jsonschema = pytest.importorskip("jsonschema")
schema = pytest.importorskip("ray.serve.schema", reason="Ray Serve is not installed")

from pydantic import BaseModel  # noqa: E402 - after what may be missing

from service.config import RAY_VARIABLES, ServiceConfig  # noqa: E402
from service.gateway import GATEWAY, GatewaySettings  # noqa: E402
from service.replicas import ENCODER, EncoderSettings, application_name  # noqa: E402

pytestmark = needs_kubectl

SCHEMA = Path(__file__).parents[3] / "shared" / "facts" / "kuberay" / "rayservice-v1.schema.json"
COMPONENTS = [(), ("ray-gpu",), ("gcs-redis",), ("monitoring", "ray-gpu", "gcs-redis")]
every_cluster = pytest.mark.parametrize("components", COMPONENTS, ids=["plain", "gpu", "redis", "all"])


def service(components: tuple[str, ...] = ()) -> Document:
    """Give the RayService."""
    return only(render("kuberay", components), "RayService")


def serve_config(components: tuple[str, ...] = ()) -> Document:
    """Give what KubeRay hands to Serve."""
    config: Document = yaml.safe_load(service(components)["spec"]["serveConfigV2"])
    return config


@every_cluster
def test_kuberay_knows_every_field(components: tuple[str, ...]) -> None:
    """It keeps to the schema of KubeRay's own resource, which here takes no unknown key."""
    if not SCHEMA.exists():
        pytest.skip("KubeRay's schema is not beside this checkout")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    document = service(components)
    assert list(validator.iter_errors(document)) == []
    document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    assert [error.validator for error in validator.iter_errors(document)] == ["additionalProperties"]


def unknown_keys(model: type[BaseModel], value: Document, place: str = "") -> list[str]:
    """List the keys that a model of pydantic has no field for, at any depth: Serve's ignore them."""
    found = []
    for key, inner in value.items():
        if key not in model.model_fields:
            found.append(place + key)
            continue
        inner_models = [kind for kind in _kinds(model.model_fields[key].annotation) if _is_model(kind)]
        for item in inner if isinstance(inner, list) else [inner]:
            if inner_models and isinstance(item, dict):
                found += unknown_keys(inner_models[0], item, f"{place}{key}.")
    return found


def _kinds(annotation: Any) -> list[Any]:
    return [annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@every_cluster
def test_serve_and_the_program_know_every_key(components: tuple[str, ...]) -> None:
    """Serve's schema has each key, and each application's arguments are settings with values that it takes."""
    check_serve_config(serve_config(components))


def test_the_config_by_itself_is_as_good() -> None:
    """So are those of deploy/serve.yaml, which is there for clusters without Kubernetes."""
    check_serve_config(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))


def check_serve_config(config: Document) -> None:
    """Hold a config of Serve against its schema and the program's settings."""
    assert unknown_keys(schema.ServeDeploySchema, config) == []
    schema.ServeDeploySchema.model_validate(config)
    models, gateways = config["applications"]
    assert models["import_path"] == "service.replicas:encoder"
    assert gateways["import_path"] == "service.gateway:gateway"
    EncoderSettings.model_validate(models["args"])
    settings = GatewaySettings.model_validate(gateways["args"])
    assert models["name"] == application_name(settings.models[0])
    assert settings.settings.keys() <= ServiceConfig.model_fields.keys()
    ServiceConfig.model_validate({"ray": True, "model": "x", **settings.settings})


def test_an_unknown_key_would_be_found() -> None:
    """A key that Serve ignores is reported with its place, so that the test above means something."""
    config = serve_config()
    config["applications"][1]["deployments"][0]["ray_actor_options"]["num_cpu"] = 1
    schema.ServeDeploySchema.model_validate(config)
    assert unknown_keys(schema.ServeDeploySchema, config) == ["applications.deployments.ray_actor_options.num_cpu"]


@every_cluster
def test_each_deployment_has_its_group(components: tuple[str, ...]) -> None:
    """What a deployment's actors ask for is what each node of its group offers, and there may be enough of them."""
    encoders, gateways = serve_config(components)["applications"]
    groups = {
        group["groupName"]: group for group in service(components)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    for application, name, group in ((encoders, ENCODER, "replica"), (gateways, GATEWAY, "gateway")):
        (deployment,) = application["deployments"]
        assert deployment["name"] == name
        options = deployment["ray_actor_options"]
        params = groups[group]["rayStartParams"]
        assert json.loads(json.loads(params["resources"])) == options["resources"] == {group: 1}
        assert float(params["num-cpus"]) == options["num_cpus"]
        (container,) = groups[group]["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == options.get("num_gpus", 0)
    encoder = EncoderSettings.model_validate(encoders["args"])
    options = encoders["deployments"][0]["ray_actor_options"]
    assert (encoder.replica_cpus, encoder.replica_gpus) == (options["num_cpus"], options["num_gpus"])
    assert encoder.replicas == f"{groups['replica']['minReplicas']}:{groups['replica']['maxReplicas']}"
    assert gateways["args"]["gateways"] == groups["gateway"]["minReplicas"] == groups["gateway"]["maxReplicas"]


@every_cluster
def test_a_gateway_listens_where_its_pod_says(components: tuple[str, ...]) -> None:
    """Ports of the gateway's settings are its Pod's, and the Pod outlives the gateway's drain."""
    settings = serve_config(components)["applications"][1]["args"]["settings"]
    gateway = next(pod for pod in pods(render("kuberay", components)) if pod.name == "gateway")
    assert gateway.ports() == {"grpc": settings["port"], "metrics": settings["metrics_port"]}
    assert settings["host"] == "0.0.0.0"
    drain_s = settings["drain_delay_s"] + settings["grace_s"]
    assert gateway.spec["terminationGracePeriodSeconds"] > drain_s
    assert drain_s < 40.0  # graceful_shutdown_timeout_s in service/gateway.py


@every_cluster
def test_ray_has_the_variables_that_the_program_needs(components: tuple[str, ...]) -> None:
    """Each node has what a gateway's own runtime environment sets, which ray_actor_options here replace."""
    for pod in pods(render("kuberay", components)):
        if "ray.io/cluster" in pod.labels:
            values = {variable["name"]: variable.get("value") for variable in pod.spec["containers"][0]["env"]}
            assert values.items() >= RAY_VARIABLES.items()
            assert values["HOME"] == "/tmp"  # noqa: S108 - the only place that is writable


def test_the_image_has_this_version_of_ray() -> None:
    """KubeRay is told the version of Ray that the image installs."""
    constraints = (DEPLOY / "constraints" / "ray-amd.txt").read_text()
    version = re.search(r"(?m)^ray(?:\[.*\])?==([\d.]+)", constraints)
    assert version
    assert service()["spec"]["rayClusterConfig"]["rayVersion"] == version[1]


def test_redis_keeps_the_state_of_the_head() -> None:
    """The option names the Service that comes with it, with a password from a Secret."""
    documents = render("kuberay", ("gcs-redis",))
    options = only(documents, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    names = [document["metadata"]["name"] for document in documents if document["kind"] == "Service"]
    assert options["redisAddress"].removesuffix(":6379") in names
    assert "value" not in options["redisPassword"]
