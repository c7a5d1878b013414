"""Measure what Ray costs on a request's way: replicas that sleep instead of computing, and Serve's own proxy.

    python loadtests/replicas.py [--artifact FOLDER] [--rounds 3] [--sleep-ms 5]

Single texts, 64 in flight (h2load), to a gateway whose replicas sleep for a fixed time a batch: a stand-in for a
GPU, so that 1, 2, 4 and 8 of them fit on two cores and only the way there costs. In the same run: Serve's own
gRPC proxy in front of a replica that answers at once with an answer made before, and one text at a time to a
real replica and to a local server, in turns. Prints Markdown.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import exported, latencies, load, message_file, running_server
from texts import TEXT

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from service.config import prepare_ray_environment

prepare_ray_environment()

import numpy as np
import psutil
import ray
from ray import serve
from ray.serve.config import ProxyLocation, gRPCOptions

from service.artifact import open_artifact
from service.batching import Batch
from service.client import Client
from service.codec import encode_encode_request
from service.pb import encoder_pb2 as pb
from service.replicas import ENCODER, Answer, Backlog, EncoderReplica, EncoderSettings, application_name, encoder
from service.plain import encode_request

IN_FLIGHT = 64
REPLICAS = (1, 2, 4, 8)
PROXY_PORT = 50179
MANY = 32


def sleeping(settings: EncoderSettings, replicas: int, sleep_s: float) -> serve.Application:
    """Build an application of replicas that sleep for each batch, one batch after another."""

    class Sleeping(EncoderReplica):
        async def run(self, digest: str, batch: Batch, backlog: Backlog) -> Answer:
            if not hasattr(self, "_device"):
                self._device = asyncio.Lock()
            async with self._device:
                await asyncio.sleep(sleep_s)
            arrays = {name: np.ones((len(batch.lengths), 384), dtype=np.float32) for name in batch.outputs}
            return Answer(self._identity, arrays, sleep_s, 0)

    deployment = serve.deployment(
        name=ENCODER,
        num_replicas=replicas,
        max_ongoing_requests=16,
        ray_actor_options={"num_cpus": 0.01},
        logging_config={"enable_access_log": False},
    )
    return deployment(Sleeping).bind(settings)


def behind_proxy(answer: bytes) -> serve.Application:
    """Build an application that Serve's own gRPC proxy calls; it answers at once."""

    class Echo:
        def __init__(self) -> None:
            self._answer = pb.EncodeResponse.FromString(answer)

        async def Encode(self, _request: pb.EncodeRequest) -> pb.EncodeResponse:  # noqa: N802 - the RPC's name
            return self._answer

    deployment = serve.deployment(
        name="Echo",
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.01},
        logging_config={"enable_access_log": False},
    )
    return deployment(Echo).bind()


@contextmanager
def server(*words: str) -> Iterator[tuple[int, psutil.Process]]:
    """Start `attencode serve` and give its port and its process."""
    with running_server(*words) as (port, pid):
        yield port, psutil.Process(pid)


def cpu_s(process: psutil.Process) -> float:
    """Give the processor seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def through_gateway(
    arguments: argparse.Namespace, cluster: list[str], replicas: int, body: Path, texts: int = 1
) -> tuple[float, float]:
    """Measure texts a second, and texts a second of one gateway core, with so many sleeping replicas.

    A request has so many `texts`, and as many fewer requests are in flight.
    """
    name, requests = f"sleeping-{replicas}-{texts}", arguments.requests // texts
    settings = EncoderSettings(artifact=str(arguments.artifact), replica_cpus=0.01, provider="cpu")
    serve.run(sleeping(settings, replicas, arguments.sleep_ms / 1e3), name=application_name(name), route_prefix=None)
    rates, a_core = [], []
    with server("--model", f"{name}={arguments.artifact}", *cluster) as (port, process):
        for number in range(arguments.rounds + 1):
            before = cpu_s(process)
            rate, _ = load(port, max(IN_FLIGHT // texts, 4), requests, body)
            if number:  # the first one warms up
                rates.append(rate * texts)
                a_core.append(requests * texts / (cpu_s(process) - before))
    serve.delete(application_name(name))
    return statistics.median(rates), statistics.median(a_core)


def through_proxy(arguments: argparse.Namespace, body: Path, answer: bytes) -> float:
    """Measure Serve's own gRPC proxy in texts a second."""
    serve.run(behind_proxy(answer), name="echo", route_prefix="/echo")
    time.sleep(2)
    requests = arguments.requests // 4
    rates = [load(PROXY_PORT, IN_FLIGHT, requests, body)[0] for _ in range(arguments.rounds + 1)][1:]
    serve.delete("echo")
    return statistics.median(rates)


def one_at_a_time(arguments: argparse.Namespace, cluster: list[str]) -> tuple[float, float]:
    """Give p50 in seconds of a local server and of a real replica, measured in turns."""
    settings = EncoderSettings(artifact=str(arguments.artifact), replica_cpus=2, provider="cpu", precision="float32")
    serve.run(encoder(settings), name=application_name("real"), route_prefix=None)
    flags = ("--provider", "cpu", "--precision", "float32")
    local, remote = [], []
    with (
        server(str(arguments.artifact), *flags) as (local_port, _),
        server("--model", f"real={arguments.artifact}", *cluster, *flags) as (remote_port, _),
    ):
        for number in range(arguments.rounds + 1):
            seconds = [statistics.median(latencies(port, 300)) for port in (local_port, remote_port)]
            if number:
                local.append(seconds[0])
                remote.append(seconds[1])
    serve.delete(application_name("real"))
    return statistics.median(local), statistics.median(remote)


def measured_answer(arguments: argparse.Namespace) -> bytes:
    """Get the bytes of a real answer."""
    with server(str(arguments.artifact), "--provider", "cpu") as (port, _), Client(f"127.0.0.1:{port}") as client:
        message: Any = client._stub.Encode(encode_encode_request(encode_request(TEXT)))
    return bytes(message.SerializeToString())


def main() -> None:
    """Run all of it and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="exported from the default model if unset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--sleep-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    open_artifact(arguments.artifact)
    answer = measured_answer(arguments)
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    functions = ["service.pb.encoder_pb2_grpc.add_EncoderServicer_to_server"]
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        grpc_options=gRPCOptions(port=PROXY_PORT, grpc_servicer_functions=functions),
    )
    cluster = ["--ray", "--address", context.address_info["gcs_address"]]
    with message_file([TEXT]) as body, message_file([TEXT] * MANY) as large:
        proxy = through_proxy(arguments, body, answer)
        rows = [(str(count), *through_gateway(arguments, cluster, count, body)) for count in REPLICAS]
        again = through_proxy(arguments, body, answer)
        rows.append((f"2, {MANY} texts a request", *through_gateway(arguments, cluster, 2, large, MANY)))
    local, remote = one_at_a_time(arguments, cluster)
    serve.shutdown()
    ray.shutdown()
    reached = (proxy + again) / 2
    print(
        f"| replicas of {arguments.sleep_ms:.0f} ms | texts/s | texts/s of a gateway core | times Serve's gRPC proxy |"
    )
    print("|---|---|---|---|")
    for count, rate, a_core in rows:
        print(f"| {count} | {rate:.0f} | {a_core:.0f} | {rate / reached:.1f} |")
    print(f"| Serve's gRPC proxy, before and after | {proxy:.0f}, {again:.0f} | | |")
    print("\n| one in flight | local p50 ms | Ray p50 ms | added ms |")
    print("|---|---|---|---|")
    print(f"| real model | {1e3 * local:.2f} | {1e3 * remote:.2f} | {1e3 * (remote - local):.2f} |")


if __name__ == "__main__":
    main()
