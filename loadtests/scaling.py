"""Model the way to 1,000 GPUs: which part is full first, from constants that this script measures.

    python loadtests/scaling.py [--measure]

With `--measure` it starts Ray with 4 to 32 idle replicas and measures what each costs Serve's controller, and
what a roll call costs a gateway; the other constants are those of `replicas.py`. Without, it uses the constants
below. Prints Markdown; `deploy/SCALING.md` explains it.
"""

import argparse
import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import psutil


@dataclass(frozen=True)
class Constants:
    """What the parts cost, on one core of the machine that measured them.

    Attributes:
        gateway_text_s: Gateway core, a single text: gRPC, tokenizing, batching, answer.
        further_text_s: Gateway core, each further text of a request.
        gateway_batch_s: Gateway core, a batch: the handle's call by gRPC.
        replica_batch_s: Replica's core, the same call's other end.
        store_byte_s: A byte of large tensors through the object store.
        controller_idle_share: Share of the controller's core without replicas.
        controller_replica_share: Share of the controller's core that one replica takes.
        roll_call_s: Gateway core, one replica in a roll call.
        roll_call_period_s: Least seconds between roll calls, and seconds that each replica adds.
    """

    gateway_text_s: float = 0.36e-3
    further_text_s: float = 0.1e-3
    gateway_batch_s: float = 1.0e-3
    replica_batch_s: float = 1.0e-3
    store_byte_s: float = 0.88e-9
    controller_idle_share: float = 0.026
    controller_replica_share: float = 0.00045
    roll_call_s: float = 0.38e-3
    roll_call_period_s: tuple[float, float] = (1.0, 0.05)


@dataclass(frozen=True)
class Traffic:
    """What the GPUs are asked to do.

    Attributes:
        name: For the table.
        gpu_texts_s: Texts a second that one GPU encodes.
        texts_in_request: Texts of one request.
        batch_texts: Texts of a batch.
        answer_bytes: Bytes of one text's answer that cross the object store; 0 for vectors.
    """

    name: str
    gpu_texts_s: float
    texts_in_request: int
    batch_texts: int
    answer_bytes: float = 0.0


TRAFFICS = (
    Traffic("single queries, small model", 10_000, 1, 64),
    Traffic("requests of 32 passages, base model", 2_000, 32, 64),
    Traffic("attention maps of 128 tokens, base model", 500, 1, 16, 12 * 12 * 128 * 128 * 4),
)


def shares(constants: Constants, traffic: Traffic, gpus: int) -> dict[str, float]:
    """Give how many cores of each part so many GPUs keep busy; a gateway is one core, of which there may be many."""
    texts_s = gpus * traffic.gpu_texts_s
    requests_s, batches_s = texts_s / traffic.texts_in_request, texts_s / traffic.batch_texts
    working = requests_s * constants.gateway_text_s + (texts_s - requests_s) * constants.further_text_s
    calls = batches_s * constants.gateway_batch_s
    store = texts_s * traffic.answer_bytes * constants.store_byte_s
    period_s = max(constants.roll_call_period_s[0], gpus * constants.roll_call_period_s[1])
    watching = gpus * constants.roll_call_s / period_s  # of each gateway
    gateways = (working + calls + store) / max(0.7 - watching, 0.1)
    return {
        "gateway cores at 70 %": gateways,
        "of it handle calls": calls,
        "of it object store": store,
        "controller": constants.controller_idle_share + gpus * constants.controller_replica_share,
        "replica's own core": traffic.gpu_texts_s / traffic.batch_texts * constants.replica_batch_s,
    }


def table(constants: Constants) -> None:
    """Print every part's cores for fleets of 1 to 1,000 GPUs."""
    for traffic in TRAFFICS:
        print(f"\n{traffic.name}: {traffic.gpu_texts_s:.0f} texts/s a GPU, batches of {traffic.batch_texts}\n")
        names = list(shares(constants, traffic, 1))
        print("| GPUs | " + " | ".join(names) + " |")
        print("|---" * (len(names) + 1) + "|")
        for gpus in (1, 10, 100, 1000):
            values = shares(constants, traffic, gpus)
            print(f"| {gpus} | " + " | ".join(f"{value:.2f}" for value in values.values()) + " |")


def measure() -> Constants:
    """Measure the controller and the roll call with idle replicas."""
    from service.config import prepare_ray_environment

    prepare_ray_environment()
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    class Idle:
        async def identify(self) -> int:
            return 0

        async def give(self, size: int) -> np.ndarray:
            return np.zeros(size, dtype=np.uint8)

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(proxy_location=ProxyLocation.Disabled)
    points = []
    for replicas in (4, 8, 16, 32):
        deployment = serve.deployment(
            name="Idle",
            num_replicas=replicas,
            health_check_period_s=1,
            ray_actor_options={"num_cpus": 0.01},
            logging_config={"enable_access_log": False},
        )
        handle = serve.run(deployment(Idle).bind(), name="idle", route_prefix=None)
        time.sleep(3)
        share = controller_share(20.0)
        call_s = asyncio.run(roll_call_s(handle, replicas))
        points.append((replicas, share, call_s))
        byte_s = asyncio.run(store_byte_s(handle))
        print(f"{replicas} replicas: controller {share:.3f} of a core, roll call {1e3 * call_s:.2f} ms a replica")
    serve.shutdown()
    ray.shutdown()
    (few, low, _), (many, high, call_s) = points[0], points[-1]
    slope = (high - low) / (many - few)
    return Constants(
        controller_idle_share=max(low - few * slope, 0.0),
        controller_replica_share=slope,
        roll_call_s=call_s,
        store_byte_s=byte_s,
    )


def controller_share(seconds: float) -> float:
    """Give the share of a core that Serve's controller uses."""
    mine = psutil.Process().children(recursive=True)
    names = [(process, process.cmdline()) for process in mine]
    controller = next(process for process, words in names if words and words[0].startswith("ray::ServeController"))
    before = controller.cpu_times()
    time.sleep(seconds)
    after = controller.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


async def roll_call_s(handle: Any, replicas: int) -> float:
    """Give the seconds of this process's core that one replica takes in a roll call."""
    caller = handle.options(_by_reference=False)
    await caller.broadcast("identify").results_async()
    before = time.process_time()
    for _ in range(20):
        await caller.broadcast("identify").results_async()
    return (time.process_time() - before) / 20 / replicas


async def store_byte_s(handle: Any) -> float:
    """Give the seconds that a byte of a large array takes through the object store and once over."""
    caller = handle.options(_by_reference=True)
    size = 50 * 2**20
    await caller.give.remote(size)
    started = time.perf_counter()
    for _ in range(5):
        array = await caller.give.remote(size)
        array.copy()
    return (time.perf_counter() - started) / 5 / size


def main() -> None:
    """Measure if asked to, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    constants = measure() if parser.parse_args().measure else Constants()
    print(constants)
    table(constants)


if __name__ == "__main__":
    main()
