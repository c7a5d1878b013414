"""Stream all attention of a long text, beside a plain grpc.aio stream of as many bytes in messages of 1 MiB.

    python loadtests/streaming.py [--artifact FOLDER] [--runs 7]

For the sizes of BERT-base give an artifact of such a model; its weights may be random. Both servers are processes of
their own, each is asked in turn by the same kind of client. A rate counts from an answer's first message to its last;
whole also counts computing it. The server's resident memory is read throughout each answer; its rise is what the peak
has above the moment before, once the same text has been through the same graph for a few numbers.
"""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Self

import grpc
import psutil

from harness import command_line, exported, running_server, serve_words
from service.client import CHANNEL_OPTIONS, Client
from service.pb import encoder_pb2 as pb

MESSAGE_BYTES = 2**20
PLAIN = "/plain.Plain/Stream"
STREAM = "/attencode.v1.Encoder/EncodeStream"


async def _serve_plain(ports: "multiprocessing.SimpleQueue[int]") -> None:
    data = bytes(MESSAGE_BYTES)

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> None:
        left = int(request)
        while left:
            size = min(left, MESSAGE_BYTES)
            await context.write(data[:size])
            left -= size

    _, service, method = PLAIN.split("/")
    server = grpc.aio.server()
    handlers = {method: grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    ports.put(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def _plain_process(ports: "multiprocessing.SimpleQueue[int]") -> None:
    asyncio.run(_serve_plain(ports))


@contextmanager
def plain_server() -> Iterator[int]:
    """Run the plain server in a process and give its port."""
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    process = context.Process(target=_plain_process, args=(ports,), daemon=True)
    process.start()
    try:
        yield ports.get()
    finally:
        process.terminate()
        process.join()


class Watch:
    """Reads a process's resident memory while it is entered."""

    def __init__(self, pid: int, every_s: float = 0.005) -> None:
        """Store the process, and the seconds between two readings."""
        self._process = psutil.Process(pid)
        self._every_s = every_s
        self._done = threading.Event()
        self.before = self.peak = 0

    def __enter__(self) -> Self:
        """Begin to read."""
        self.before = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Read no more."""
        self._done.set()
        self._thread.join()

    def _read(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it may end first
            while not self._done.wait(self._every_s):
                self.peak = max(self.peak, self._process.memory_info().rss)


def timed(messages: Iterator[bytes]) -> tuple[int, float]:
    """Read a stream; gives its bytes without the first message's, and the seconds since that."""
    next(messages)
    started, total = time.perf_counter(), 0
    for message in messages:
        total += len(message)
    return total, time.perf_counter() - started


def whole(client: Client, text: str) -> tuple[int, float]:
    """Ask for all attention, joined; gives the tensor's bytes and the seconds."""
    started = time.perf_counter()
    attention = client.attend(text).attention
    assert attention is not None
    return attention.nbytes, time.perf_counter() - started


def main() -> None:
    """Measure and print one table."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    text = "old man by river " * 400  # cut to what the model takes
    asked = pb.EncodeRequest(inputs=[pb.Input(text=text)], attention=pb.AttentionOptions())
    request = pb.EncodeStreamRequest(request=asked).SerializeToString()
    rates: dict[str, list[float]] = {"attencode": [], "attencode, whole": [], "plain": []}
    rises: list[float] = []
    size = 0
    with running_server(*serve_words(arguments)) as (port, pid), plain_server() as plain_port:
        address, plain_address = f"127.0.0.1:{port}", f"127.0.0.1:{plain_port}"
        with (
            Client(address) as client,
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
            grpc.insecure_channel(plain_address, options=CHANNEL_OPTIONS) as plain_channel,
        ):
            client.encode(text, hidden_states=[1])
            for _ in range(arguments.runs):
                with Watch(pid) as watch:
                    size, seconds = whole(client, text)
                rises.append((watch.peak - watch.before) / size)
                rates["attencode, whole"].append(size / seconds)
                streamed, seconds = timed(channel.stream_stream(STREAM)(iter([request])))
                rates["attencode"].append(streamed / seconds)
                streamed, seconds = timed(plain_channel.unary_stream(PLAIN)(str(size).encode()))
                rates["plain"].append(streamed / seconds)
    print("| MB of an answer | stream | MB/s, median | of plain | server's memory rises by, of the answer |")
    print("|---|---|---|---|---|")
    for name, each in rates.items():
        rise = f"{median(rises):.2f}, at most {max(rises):.2f}" if name.endswith("whole") else ""
        share = median(each) / median(rates["plain"])
        print(f"| {size / 1e6:.0f} | {name} | {median(each) / 1e6:.0f} | {share:.2f} | {rise} |")


if __name__ == "__main__":
    main()
