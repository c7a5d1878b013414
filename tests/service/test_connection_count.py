"""How many connections a port has, from the kernel's tables of sockets, and as a metric beside its limit."""

import math
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attencode import Client, Unavailable
from service.config import parse_config
from service.connections import Connections
from service.server import LIVENESS, READINESS
from tests.service.faults.load import wait_until
from tests.service.keyed import address, serving

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000  1000        0 21 1 0000000000000000 20 4 30 10 -1\n"
PORT = 50051  # C383 in hexadecimal
LOCAL, MAPPED = "0100007F", "0000000000000000FFFF00000100007F"


def line(number: int, own: str, port: int, state: str, peer_port: int = 40000) -> str:
    return f"{number:4d}: {own}:{port:04X} {own}:{peer_port:04X} {state} {REST}"


def tables(folder: Path, **lines: list[str]) -> Path:
    """Write tables as Linux does; gives the folder that stands for /proc."""
    (folder / "self" / "net").mkdir(parents=True)
    for name, text in lines.items():
        (folder / "self" / "net" / name).write_text(HEAD + "".join(text))
    return folder


def test_established_connections_to_the_port_count(tmp_path: Path) -> None:
    """Those of both tables; neither who listens, nor what closes, nor another port, nor the peers' own ends."""
    proc = tables(
        tmp_path,
        tcp=[
            line(0, LOCAL, PORT, "0A", 0),  # LISTEN
            line(1, LOCAL, PORT, "01"),
            line(2, LOCAL, PORT, "06"),  # TIME_WAIT
            line(3, LOCAL, PORT + 1, "01"),
            line(4, LOCAL, 40000, "01", PORT),
            line(10000, LOCAL, PORT, "01"),
        ],
        tcp6=[line(0, MAPPED, PORT, "01"), line(1, MAPPED, PORT, "08")],  # CLOSE_WAIT
    )
    assert Connections(PORT, proc).count() == 3


def test_one_table_is_enough_and_none_is_nan(tmp_path: Path) -> None:
    """A kernel without IPv6 has one table; a system without any says that it does not know."""
    assert Connections(PORT, tables(tmp_path / "four", tcp=[line(0, LOCAL, PORT, "01")])).count() == 1
    assert Connections(PORT, tables(tmp_path / "idle", tcp=[])).count() == 0
    assert math.isnan(Connections(PORT, tmp_path / "nothing").count())


def test_silence_is_not_waited_for_long() -> None:
    """Unless somebody says otherwise, silent connections are gone within seconds, idle ones within minutes."""
    config = parse_config(["m"])
    assert (config.handshake_timeout_s, config.max_connection_idle_s) == (10, 120)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux' tables of sockets")
def test_silent_connections_are_a_metric(tiny_artifact: Path) -> None:
    """Sockets that say nothing are counted beside the limit, though no new client could be served to tell."""

    def shown() -> dict[str, float]:
        page = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=20).read().decode()
        lines = [text.split() for text in page.splitlines() if text.startswith("attencode_connections")]
        return {name: float(value) for name, value in lines}

    with serving(tiny_artifact, metrics_port=0, max_connections=9) as server, ExitStack() as held:
        assert shown() == {"attencode_connections": 0, "attencode_connections_limit": 9}
        for _ in range(5):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        wait_until(lambda: shown()["attencode_connections"] == 5)
        held.close()
        wait_until(lambda: shown()["attencode_connections"] == 0)


def test_probes_are_answered_while_clients_are_kept_out(tiny_artifact: Path) -> None:
    """Silent sockets that have every connection keep no probe out; a client is told that this may be why it is."""
    with serving(tiny_artifact, health_port=0, max_connections=3) as server, ExitStack() as held:
        for _ in range(6):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        with Client(address(server)) as client, pytest.raises(Unavailable, match="--max-connections"):
            client.encode("abc")
        with grpc.insecure_channel(f"127.0.0.1:{server.health_port}") as channel:
            for name in (*READINESS, LIVENESS):
                asked = health_pb2.HealthCheckRequest(service=name)
                answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
