"""Faults of gateways, nodes and clusters: what callers notice while they die."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attencode import Client
from tests.service.conftest import ServerProcess, spawning
from tests.service.faults.conftest import Cluster, servers
from tests.service.faults.load import (
    PAIR,
    RUN,
    TEXTS,
    check,
    free_port,
    load,
    replicas,
    right_answers,
    wait_until,
)

ray = pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")


pytestmark = pytest.mark.ray


def test_a_gateway_dies(pair: ServerProcess, spawn: Callable[..., ServerProcess], artifact: Path) -> None:
    """Clients that wait do not notice that a gateway was killed and started anew; the replicas stay."""
    flags = ["--model-name", PAIR, "--port", str(free_port())]
    first = spawn(artifact, *flags)
    wait_until(lambda: len(replicas(first.address)) == 2)
    before = replicas(first.address)
    expected = right_answers(first.address, TEXTS)
    with load(first.address, TEXTS) as answers:
        time.sleep(1)
        first.process.kill()
        first.process.wait()
        spawn(artifact, *flags)
        time.sleep(1)
    check(answers, expected)
    assert replicas(first.address) == before


def test_a_node_dies(own_cluster: Cluster, artifact: Path) -> None:
    """Calls go on without a failure on the other node's replica; with a new node there are two again."""
    flags = ["--ray", "--address", own_cluster.address, "--model-name", f"{RUN}-nodes"]
    second = own_cluster.add()
    with servers([*flags, "--replicas", "2", "--replica-cpus", "1"]) as start:
        server = start(artifact)
        expected = right_answers(server.address, TEXTS)
        with Client(server.address) as client, load(server.address, TEXTS) as answers:
            wait_until(lambda: len(client.get_model().replicas) == 2)
            before = {replica.node for replica in client.get_model().replicas}
            assert len(before) == 2
            own_cluster.kill(second)
            wait_until(lambda: len(client.get_model().replicas) == 1)
            own_cluster.add()
            wait_until(lambda: len(client.get_model().replicas) == 2)
            assert len({replica.node for replica in client.get_model().replicas} - before) == 1
        check(answers, expected)


def test_the_cluster_is_lost(own_cluster: Cluster, artifact: Path) -> None:
    """A gateway whose cluster is gone ends by itself and says why."""
    flags = ["--ray", "--address", own_cluster.address, "--model-name", f"{RUN}-lost", "--replica-cpus", "1"]
    with spawning(flags) as start:
        server = start(artifact)
        (raylet,) = (process for process in own_cluster.tree(own_cluster.head) if process.name() == "raylet")
        raylet.kill()  # `ray start --block` then ends the rest of the node
        _, errors = server.process.communicate(timeout=90)
        assert server.process.returncode == 1
        assert re.search("^attencode: the Ray cluster does not answer any more", errors, re.MULTILINE)
        assert not re.search("^Traceback", errors, re.MULTILINE)
