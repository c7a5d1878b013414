"""What only Ray brings: deadly inputs, growing and shrinking fleets, gateways as deployments, the config file."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from attencode import Client, InternalFault, encode_request
from tests.service import translators
from tests.service.faults.load import free_port, wait_until
from tests.service.faulty import serving

ray = pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")

from ray import serve as ray_serve  # noqa: E402

from service.artifact import open_artifact  # noqa: E402
from service.attention import Attention, QueryKeyVectors  # noqa: E402
from service.batching import Batch  # noqa: E402
from service.cluster import deploy, encoder_settings, undeploy  # noqa: E402
from service.config import ServiceConfig  # noqa: E402
from service.errors import ConfigError  # noqa: E402
from service.fleet import answer_bytes  # noqa: E402
from service.gateway import GATEWAY, GatewaySettings, gateway  # noqa: E402
from service.placement import choose_placement  # noqa: E402
from service.reduce import look_at  # noqa: E402
from service.replicas import ENCODER, EncoderReplica, EncoderSettings, application_name, encoder  # noqa: E402
from service.request import Tokens  # noqa: E402
from service.session import Session  # noqa: E402

pytestmark = pytest.mark.ray
CONFIG = Path(__file__).parents[2] / "deploy/serve.yaml"


@pytest.fixture
def gateway_of(ray_cluster: str) -> Iterator[Callable[..., str]]:
    """Give a function that runs a gateway as a deployment and gives its address; it ends with the test."""
    names: list[str] = []

    def start(*models: str, **settings: object) -> str:
        names.append(f"gateway-{abs(hash(models[0]))}")
        port = free_port()
        made = GatewaySettings(
            models=list(models), gateway_cpus=0.01, settings={"port": port, "metrics_port": "none", **settings}
        )
        ray_serve.run(gateway(made), name=names[-1], route_prefix=None)
        address = f"127.0.0.1:{port}"
        with Client(address, wait_for_ready=True) as client:
            wait_until(lambda: _answers(client))
        return address

    yield start
    for name in names:
        ray_serve.delete(name)


def _answers(client: Client) -> bool:
    try:
        return bool(client.get_model().replicas)
    except Exception:  # noqa: BLE001 - not yet
        return False


def settings(artifact: Path, **changes: object) -> EncoderSettings:
    return EncoderSettings.model_validate(
        {"artifact": str(artifact), "replica_cpus": 0.01, "provider": "cpu", **changes}
    )


def test_a_deadly_input_fails_alone(
    ray_cluster: str, gateway_of: Callable[..., str], tiny_artifact: Path, tmp_path: Path
) -> None:
    """An input that takes every replica down is failed after its tries; its neighbours are answered."""
    deaths, artifact = tmp_path / "deaths", settings(tiny_artifact)
    poison = 9  # the token "e" of the tiny vocabulary

    class Deadly(EncoderReplica):
        async def run(self, digest, batch, backlog):  # type: ignore[no-untyped-def]
            if poison in batch.input_ids:
                with deaths.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().run(digest, batch, backlog)

    deployment = ray_serve.deployment(
        name=ENCODER,
        num_replicas=2,
        max_ongoing_requests=16,
        health_check_period_s=1,
        ray_actor_options={"num_cpus": 0.01},
    )(Deadly)
    ray_serve.run(deployment.bind(artifact), name=application_name("deadly"), route_prefix=None)
    address = gateway_of("deadly", max_queue_delay_ms=50)
    with Client(address, timeout_s=60) as client:
        expected = client.encode("abc").pooled
        with ThreadPoolExecutor(9) as pool:
            good = [pool.submit(client.encode, "abc") for _ in range(8)]
            bad = pool.submit(client.encode, "e")
            for call in good:
                np.testing.assert_allclose(call.result().pooled, expected, atol=1e-5)
            with pytest.raises(InternalFault):
                bad.result()
    assert len(deaths.read_text()) == 3
    ray_serve.delete(application_name("deadly"))


def test_a_replica_with_a_broken_device_is_replaced(
    ray_cluster: str, gateway_of: Callable[..., str], tiny_artifact: Path, tmp_path: Path
) -> None:
    """Its batch runs elsewhere, nobody notices, and another one comes; an input without a finite answer fails alone."""
    broken = tmp_path / "broken"
    breaking, senseless = 9, 10  # the tokens "e" and "f" of the tiny vocabulary

    class Breaking(Session):
        def run(self, batch, *, alone=False):  # type: ignore[no-untyped-def]
            if breaking in batch.input_ids and not broken.exists():
                broken.write_text(str(os.getpid()))
            if broken.exists() and broken.read_text() == str(os.getpid()):
                raise RuntimeError("CUDA failure 719: unspecified launch failure")
            arrays = super().run(batch, alone=alone)
            for array in arrays.values():
                array[(batch.input_ids == senseless).any(axis=1)] = np.nan
            return arrays

    class OnBrokenDevices(EncoderReplica):
        session = Breaking

    deployment = ray_serve.deployment(
        name=ENCODER,
        num_replicas=2,
        max_ongoing_requests=16,
        health_check_period_s=1,
        ray_actor_options={"num_cpus": 0.01},
    )(OnBrokenDevices)
    name = application_name("breaking")
    ray_serve.run(deployment.bind(settings(tiny_artifact)), name=name, route_prefix=None)
    with Client(gateway_of("breaking", max_queue_delay_ms=50), timeout_s=60) as client:
        wait_until(lambda: len(client.get_model().replicas) == 2)
        before = {replica.id for replica in client.get_model().replicas}
        expected = client.encode("abc").pooled
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(client.encode, text) for text in ("abc", "e", "abc")]
            for call in (calls[0], calls[2]):
                np.testing.assert_allclose(call.result().pooled, expected, atol=1e-5)
            assert calls[1].result().pooled.shape == expected.shape
            assert broken.exists()
            calls = [pool.submit(client.encode, text) for text in ("abc", "f")]
            np.testing.assert_allclose(calls[0].result().pooled, expected, atol=1e-5)
            with pytest.raises(InternalFault):
                calls[1].result()
        wait_until(lambda: len({replica.id for replica in client.get_model().replicas} - before) == 1)
    ray_serve.delete(name)


def test_the_fleet_follows_the_work(ray_cluster: str, gateway_of: Callable[..., str], minilm_artifact: Path) -> None:
    """Under load there come more replicas, up to the bound; without it they go again, down to the floor."""
    deploy("growing", settings(minilm_artifact, replicas="1:2", upscale_delay_s=0.5, downscale_delay_s=2.0), None)
    address = gateway_of("growing")
    text = "the old man sat by the river and watched the boats " * 8
    requests = (encode_request([text] * 16) for _ in range(100_000))
    with Client(address) as client:
        assert len(client.get_model().replicas) == 1
        for number, answer in enumerate(client.encode_stream(requests)):
            assert not isinstance(answer, Exception)
            if number % 10 == 0 and len(client.get_model().replicas) == 2:
                break
        assert len(client.get_model().replicas) == 2
        wait_until(lambda: len(client.get_model().replicas) == 1)
    ray_serve.delete(application_name("growing"))


def test_large_tensors_cross(ray_cluster: str, gateway_of: Callable[..., str], minilm_artifact: Path) -> None:
    """Every layer's attention and states of long texts, tens of MB, come as from a local session."""
    deploy("large", settings(minilm_artifact), None)
    texts = ["the old man sat by the river and watched the boats " * 15, "short"]
    with Client(gateway_of("large")) as client:
        together = client.encode(texts, attention=True, hidden_states=True)
        assert together.results[0].attention.nbytes > 2**22
        for text, item in zip(texts, together.results, strict=True):
            alone = client.encode(text, attention=True, hidden_states=True).results[0]
            np.testing.assert_allclose(item.attention, alone.attention, atol=1e-5)
            np.testing.assert_allclose(item.hidden_states, alone.hidden_states, atol=1e-4)
    ray_serve.delete(application_name("large"))


def test_pairs_cross(
    ray_cluster: str, gateway_of: Callable[..., str], export_artifact: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Pairs, whose targets have a tokenizer of their own, get from replicas what they get from a local session."""
    translators.save("marian", tmp_path / "marian")
    artifact = translators.with_own_targets(export_artifact(tmp_path / "marian"), tmp_path / "artifact")
    pairs, options = [("the old man", "sat by"), ("a", "the river and the boats")], {"top_k": 2, "words": True}
    with serving(artifact, Session) as running:
        alone = [running.client.align_pairs(pairs), running.client.align_pairs(pairs, **options)]
    deploy("pairs", settings(artifact), None)
    with Client(gateway_of("pairs")) as client:
        assert client.get_model().decoder is not None
        for asked, known in zip(({}, options), alone, strict=True):
            for one, other in zip(client.align_pairs(pairs, **asked), known, strict=True):
                assert one.target.tokens.ids == other.target.tokens.ids
                np.testing.assert_allclose(one.attention, other.attention, atol=1e-5)
    ray_serve.delete(application_name("pairs"))


def test_replicas_take_the_server_s_patience(tiny_artifact: Path) -> None:
    """How long a batch may run is a setting of the server that its replicas get."""
    config = ServiceConfig.model_validate({"model": str(tiny_artifact), "ray": True, "stuck_after_s": 7})
    assert encoder_settings(config, open_artifact(tiny_artifact), 1).stuck_after_s == 7


def test_answers_are_counted_as_they_come(tiny_artifact: Path) -> None:
    """The size by which a batch's transport is chosen is that of the arrays that a session gives."""
    artifact = open_artifact(tiny_artifact)
    session = Session(artifact, choose_placement("cpu", "float32"), threads=1)
    ids = np.full((3, 7), 5, dtype=np.int64)
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    outputs = ("hidden_states_0", "last_hidden_state", "pooled_mean")
    tokens = Tokens([5] * 7, ["a"] * 7, [(0, 1)] * 7, [(0, 1)] * 7, [0] * 7, [0] * 7, [False] * 7)
    asked, vectors = Attention((0,), (0, 2), top_k=3), QueryKeyVectors((0,), (1,))
    look = look_at(asked, vectors, tokens, head_dim=artifact.head_dim, data_type="float16")
    batch = Batch(outputs, (7, 7, 7), ids, ones, zeros, ones, (None, look, None), np.array([1]))
    arrays = session.run(batch)
    size = sum(arrays[name].nbytes for name in outputs)
    looked = session.look(batch, arrays["hidden_states"])[1]
    size += sum(array.nbytes // 2 if "vectors" in name else array.nbytes for name, array in looked.items())
    assert answer_bytes(batch, artifact) == size


def test_the_private_options_are_there() -> None:
    """Ray still lets a handle choose its transport and its router's loop by the names that we use."""
    import inspect

    from ray.serve._private.handle_options import InitHandleOptions
    from ray.serve.handle import DeploymentHandle

    assert "_by_reference" in inspect.signature(DeploymentHandle.options).parameters
    assert "_run_router_in_separate_loop" in inspect.signature(InitHandleOptions).parameters


def test_a_gateway_waits_for_its_models(ray_cluster: str, tiny_artifact: Path) -> None:
    """A gateway that is there before its model says UNAVAILABLE, then serves it when it comes."""
    from attencode import Unavailable

    port = free_port()
    made = GatewaySettings(models=["late"], gateway_cpus=0.01, settings={"port": port, "metrics_port": "none"})
    ray_serve.run(gateway(made), name="early", route_prefix=None)
    with Client(f"127.0.0.1:{port}", options=[("grpc.enable_retries", 0)], wait_for_ready=True) as client:
        with pytest.raises(Unavailable, match="starting or draining"):
            client.encode("abc")
        deploy("late", settings(tiny_artifact), None)
        wait_until(lambda: _answers(client))
        assert client.encode("abc").model == "late"
    handle = ray_serve.get_deployment_handle(GATEWAY, "early")
    assert f":{port}, cpu float32, Ray Serve with 1 replica" in handle.address.remote().result()
    ray_serve.delete("early")
    ray_serve.delete(application_name("late"))


def test_the_config_file_runs(ray_cluster: str, tiny_artifact: Path) -> None:
    """deploy/serve.yaml, with an artifact that is here, brings a model and a gateway up; Serve knows every key."""
    import yaml
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    written = yaml.safe_load(CONFIG.read_text())
    known = ServeDeploySchema.model_validate(written).model_dump(by_alias=True)
    assert written.keys() <= known.keys()
    for application, understood in zip(written["applications"], known["applications"], strict=True):
        assert application.keys() <= understood.keys()
    model, front = written["applications"]
    port = free_port()
    model["args"] |= {"artifact": str(tiny_artifact), "replica_cpus": 0.01}
    front["args"] |= {"gateway_cpus": 0.01}
    front["args"]["settings"] |= {"port": port, "metrics_port": "none"}
    before = set(ray_serve.status().applications)
    assert not before & {"attencode-minilm", "attencode-gateway"}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(written), _blocking=False)
    with Client(f"127.0.0.1:{port}", wait_for_ready=True) as client:
        wait_until(lambda: _answers(client))
        assert client.encode("abc").model_digest == open_artifact(tiny_artifact).digest
    for name in (front["name"], model["name"]):
        ray_serve.delete(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "m=x", "--ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["deploy", "m=x", "--address", "nohost.invalid:6379"], "no Ray cluster answers at nohost.invalid:6379"),
        (["deploy", "m=x", "--address", "nonsense"], "--address must be auto or HOST:PORT of a Ray cluster"),
        (["deploy", "folder"], "deploy wants NAME=MODEL first, got 'folder'"),
        (["deploy", "m=x", "--port", "5"], "deploy has no use for --port"),
        (["undeploy", "m", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["serve", "m", "--ray", "--replica-gpus", "1.5"], "must be a whole number, or below 1 to share one, got 1.5"),
    ],
)
def test_command_lines_that_lead_nowhere(words: list[str], message: str, tiny_artifact: Path) -> None:
    """An address where nobody is, a setting that does not fit: one line, at once, and exit status 1."""
    line = [word.replace("m=x", f"m={tiny_artifact}") for word in words]
    if line[0] == "serve" and "=" in line[1]:
        line[1:2] = ["--model", line[1]]
    ended = subprocess.run(
        [sys.executable, "-m", "service", *line], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_any_name_will_do(ray_cluster: str, gateway_of: Callable[..., str], tiny_artifact: Path) -> None:
    """A model's name may hold what Serve's own names may not; taken off the cluster, it is gone."""
    name = "ünï cödé / a b"
    deploy(name, settings(tiny_artifact), None)
    with Client(gateway_of(name)) as client:
        assert client.encode("abc", model=name).model == name
    undeploy(name)
    assert application_name(name) not in ray_serve.status().applications
    with pytest.raises(ConfigError, match="is not deployed on this cluster"):
        undeploy(name)


def test_what_was_left_half_done_is_done_anew(ray_cluster: str, tiny_artifact: Path) -> None:
    """A deployment that no node has room for can be deployed over."""
    name = "half done"
    stuck = encoder(settings(tiny_artifact, replica_gpus=3))
    ray_serve._run(stuck, name=application_name(name), route_prefix=None, _blocking=False)
    wait_until(lambda: application_name(name) in ray_serve.status().applications)
    assert deploy(name, settings(tiny_artifact), None).settings.replica_gpus == 0
    undeploy(name)
