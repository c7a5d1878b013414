"""Watch a server's memory over many requests of random shapes.

    python loadtests/memory.py [--artifact FOLDER] [--requests 100000] [--in-flight 32]

Every request has 1 to 4 texts of 1 to 128 words, most of them short, so that hardly a batch has the shape of the one
before. Resident memory is read throughout; printed are its peak and by how much its mean grew from the third to the
last quarter of the requests, which is what the last half grows.
"""

import asyncio
import random
import statistics

import grpc
import psutil
from arguments import one_or_more
from harness import command_line, exported, running_server, serve_words
from wire import ENCODE, request_bytes


_WORDS = "the old man sat by river and watched boats while rain fell on quiet town under grey morning sky".split()
_KINDS = 4000


def messages(draw: random.Random) -> list[bytes]:
    """Make requests whose shapes differ."""
    made = []
    for _ in range(_KINDS):
        lengths = [min(128, 1 + int(draw.expovariate(1 / 16))) for _ in range(draw.choice((1, 1, 2, 4)))]
        texts = [" ".join(draw.choices(_WORDS, k=length)) for length in lengths]
        made.append(request_bytes(texts))
    return made


async def load(port: int, requests: int, in_flight: int, process: psutil.Process) -> list[int]:
    """Send the requests; gives the resident bytes at every hundredth of them."""
    draw = random.Random(0)
    bodies, sizes, sent = messages(draw), [], 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(ENCODE)

        async def ask() -> None:
            nonlocal sent
            while sent < requests:
                sent += 1
                if sent % max(1, requests // 100) == 0:
                    sizes.append(process.memory_info().rss)
                await call(draw.choice(bodies))

        await asyncio.gather(*(ask() for _ in range(in_flight)))
    return sizes


def main() -> None:
    """Run it and print a line of Markdown."""
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=one_or_more, default=100_000, help="4 at least")
    parser.add_argument("--in-flight", type=one_or_more, default=32)
    arguments = parser.parse_args()
    if arguments.requests < 4:
        parser.error("--requests: quarters are compared, so 4 at least")
    arguments.artifact = exported(arguments.artifact)
    with running_server(*serve_words(arguments)) as (port, pid):
        process = psutil.Process(pid)
        before = process.memory_info().rss
        sizes = asyncio.run(load(port, arguments.requests, arguments.in_flight, process))
    quarter = len(sizes) // 4
    third, last = statistics.mean(sizes[-2 * quarter : -quarter]), statistics.mean(sizes[-quarter:])
    print("| requests | MB before | MB peak | MB mean of the third quarter | of the last | growth |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {arguments.requests} | {before / 1e6:.0f} | {max(sizes) / 1e6:.0f} | {third / 1e6:.0f} "
        f"| {last / 1e6:.0f} | {last / third - 1:.1%} |"
    )


if __name__ == "__main__":
    main()
