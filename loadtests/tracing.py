"""Measure what tracing costs a server: processor time a request, without it, with what is not sampled, with all.

    python loadtests/tracing.py [--artifact FOLDER] [--requests 500] [--turns 20] [--in-flight 32]

Two servers, one with `--tracing` and a collector in this process, take turns with short loads, so that what else the
machine does meets both. Requests of one short text each, the dearest case for tracing. Linux alone: it reads /proc.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from arguments import one_or_more
from harness import command_line, exported, running_server, serve_words
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from wire import ENCODE, request_bytes

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
WAYS = ("without", "not sampled", "recorded")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts spans."""

    def __init__(self) -> None:
        """Start with none."""
        self.spans = 0

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the contract's name
        """Take them."""
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def spent_us(pid: int) -> float:
    """Give the processor time of a process until now, in microseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


async def send(call: Callable[..., Any], requests: int, in_flight: int, flags: str) -> None:
    """Send requests whose caller is sampled or not, by W3C's flags."""
    body, left = request_bytes(["time flies like an arrow"]), iter(range(requests))

    async def ask() -> None:
        for _ in left:
            await call(body, metadata=(("traceparent", PARENT + flags),))

    await asyncio.gather(*(ask() for _ in range(in_flight)))


async def measure(servers: dict[str, tuple[int, int]], requests: int, turns: int, in_flight: int) -> list[list[float]]:
    """Give the microseconds a request of each way, turn by turn."""
    used: list[list[float]] = [[] for _ in WAYS]
    channels = {way: grpc.aio.insecure_channel(f"127.0.0.1:{port}") for way, (port, _) in servers.items()}
    calls = {way: channel.unary_unary(ENCODE) for way, channel in channels.items()}
    for way in WAYS:
        await send(calls[way], 500, in_flight, "00")
    for turn in range(turns):
        for place in range(len(WAYS))[:: 1 if turn % 2 else -1]:
            way = WAYS[place]
            before = spent_us(servers[way][1])
            await send(calls[way], requests, in_flight, "01" if way == "recorded" else "00")
            used[place].append((spent_us(servers[way][1]) - before) / requests)
    for channel in channels.values():
        await channel.close()
    return used


def main() -> None:
    """Run it and print a table."""
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=one_or_more, default=500, help="of each load")
    parser.add_argument("--turns", type=one_or_more, default=20)
    parser.add_argument("--in-flight", type=one_or_more, default=32)
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    collector, taker = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, taker)
    endpoint = f"http://127.0.0.1:{taker.add_insecure_port('127.0.0.1:0')}"
    taker.start()
    words = serve_words(arguments)
    with (
        running_server(*words) as plain,
        running_server(*words, "--tracing", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as t,
    ):
        servers = {"without": plain, "not sampled": t, "recorded": t}
        used = asyncio.run(measure(servers, arguments.requests, arguments.turns, arguments.in_flight))
    taker.stop(None).wait()
    print("| tracing | us a request, mean | standard error |")
    print("|---|---|---|")
    for way, each in zip(WAYS, used, strict=True):
        error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
        print(f"| {way} | {statistics.mean(each):.0f} | {error:.0f} |")
    print(f"{collector.spans} spans came", file=sys.stderr)


if __name__ == "__main__":
    main()
