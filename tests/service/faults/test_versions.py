"""A model that is replaced under load, or cannot be."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attencode import Client
from tests.service.conftest import LITTLE_CPU, ServerProcess, on_cluster
from tests.service.faults.load import (
    ROLLING,
    RUN,
    SINGLE,
    TEXTS,
    check,
    command,
    fault,
    kill_one,
    load,
    right_answers,
    wait_until,
)

ray = pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")

from ray import serve as ray_serve  # noqa: E402

from service.artifact import open_artifact  # noqa: E402
from service.replicas import application_name  # noqa: E402

pytestmark = pytest.mark.ray


def test_a_model_is_replaced_under_load(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path
) -> None:
    """`deploy` brings a new version without a failure, and no answer, however large, mixes the two."""
    server = spawn(artifact, "--model-name", ROLLING, "--replicas", "2", "--max-batch-tokens", "64")
    old, new = open_artifact(artifact).digest, open_artifact(other_artifact).digest
    requests = [["abc"], TEXTS, TEXTS * 5]
    expected = right_answers(server.address, requests)
    with load(server.address, requests) as answers:
        time.sleep(1)
        done = command("deploy", f"{ROLLING}={other_artifact}", "--address", ray_cluster)
        wait_until(lambda: answers[-1][1].model_digest == new)
        time.sleep(2)
        settled = len(answers)
        time.sleep(1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{ROLLING} runs {new}, ")
    check(answers, expected | right_answers(server.address, requests))
    assert {answer.model_digest for _, answer in answers} == {old, new}
    assert {answer.model_digest for _, answer in answers[settled:]} == {new}


def no_artifact(folder: Path, _artifact: Path) -> str:
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing")
    return "holds neither an artifact (artifact.json) nor a checkpoint (config.json or modules.json)"


def damaged(folder: Path, artifact: Path) -> str:
    shutil.copytree(artifact, folder)
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[100] ^= 1
    (folder / "weights.bin").write_bytes(weights)
    return "weights.bin was changed or damaged after the export"


@pytest.mark.parametrize("make", [no_artifact, damaged])
def test_what_cannot_be_deployed(
    single: ServerProcess,
    ray_cluster: str,
    other_artifact: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], str],
) -> None:
    """What is no artifact, or no whole one, is refused in one line, and the old version goes on."""
    expected = right_answers(single.address, TEXTS)
    message = make(tmp_path / "model", other_artifact)
    with load(single.address, TEXTS, clients=2) as answers:
        ended = command("deploy", f"{SINGLE}={tmp_path / 'model'}", "--address", ray_cluster, "--cache-dir", tmp_path)
    assert ended.returncode == 1
    assert message in fault(ended)
    check(answers, expected)


def test_what_does_not_start(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path
) -> None:
    """A version that no replica can start is taken back: the old one goes on, and its dead are replaced."""
    name = f"{RUN}-refused"
    server = spawn(artifact, "--model-name", name)
    expected = right_answers(server.address, TEXTS)
    flags = ["--provider", "cuda", "--replica-gpus", "0", "--address", ray_cluster]
    with load(server.address, TEXTS, clients=2) as answers:
        ended = command("deploy", f"{name}={other_artifact}", *flags)
        kill_one(name)
    assert ended.returncode == 1
    assert "provider cuda cannot run here" in fault(ended)
    check(answers, expected)


def test_what_starts_no_more(
    spawn: Callable[..., ServerProcess], ray_cluster: str, artifact: Path, other_artifact: Path, tmp_path: Path
) -> None:
    """A model whose replicas died and cannot start again is brought back by `deploy` of a whole artifact."""
    name, folder = f"{RUN}-gone", tmp_path / "artifact"
    server = spawn(shutil.copytree(artifact, folder), "--model-name", name)
    shutil.rmtree(folder)
    kill_one(name)
    wait_until(lambda: ray_serve.status().applications[application_name(name)].status == "UNHEALTHY")
    with Client(server.address, timeout_s=90) as client, ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.encode, "abc")
        flags = ["--address", ray_cluster, "--replica-cpus", LITTLE_CPU]
        done = command("deploy", f"{name}={other_artifact}", *flags)
        assert done.returncode == 0, done.stderr
        assert waiting.result().model_digest == open_artifact(other_artifact).digest


def test_serve_changes_no_model(single: ServerProcess, ray_cluster: str, other_artifact: Path) -> None:
    """`serve` of another artifact under a name that runs is refused, and says what would change it."""
    flags = ["--port", "0", "--metrics-port", "none", *on_cluster(ray_cluster)]
    ended = command("serve", other_artifact, "--model-name", SINGLE, *flags)
    assert ended.returncode == 1
    assert f"`attencode deploy {SINGLE}={other_artifact} " in fault(ended)
