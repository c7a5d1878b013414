"""What attention costs: one layer's beside a plain request, and what plain traffic notices of it.

    python loadtests/attention.py [--artifact FOLDER] [--rounds 5]

One text of 128 tokens, one request in flight: plain, and with one layer's mean over heads. Then 32 short texts in
flight, all plain, and with every 20th request asking for one layer's attention too, in turns. Last, the bytes of an
answer with the 8 largest weights of each row, of all layers and heads, against those of all weights.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import cycle, islice

import grpc

from harness import command_line, exported, running_server, serve_words
from service.codec import encode_encode_request
from service.plain import encode_request
from texts import short_texts
from wire import CHANNEL_OPTIONS, ENCODE

ONE_IN = 20
IN_FLIGHT = 32
LONG = " ".join(["the old man sat by the river and watched the boats while rain"] * 40)

Call = Callable[[bytes], Awaitable[bytes]]


def message(text: str, **options: object) -> bytes:
    """Write a request."""
    return encode_encode_request(encode_request([text], **options)).SerializeToString()  # type: ignore[arg-type]


def of_tokens(count: int) -> str:
    """Give a text of so many tokens, of which two are special."""
    return " ".join(LONG.split()[: count - 2])


async def one_after_another(call: Call, bodies: list[bytes], count: int) -> list[float]:
    """Send the bodies in turns, one in flight; gives the median seconds of each."""
    took: list[list[float]] = [[] for _ in bodies]
    for _ in range(count):
        for place, body in enumerate(bodies):
            started = time.perf_counter()
            await call(body)
            took[place].append(time.perf_counter() - started)
    return [statistics.median(one) for one in took]


async def rate(call: Call, seconds: float, *, attention: bool) -> float:
    """Keep short texts in flight for a while; gives answers a second."""
    texts = short_texts(10 * ONE_IN)
    looks = [attention and number % ONE_IN == 0 for number in range(len(texts))]
    bodies = cycle(
        message(text, pooled=True, attention=[3], reduce_heads="mean") if look else message(text)
        for text, look in zip(texts, looks, strict=True)
    )
    until, done = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await call(next(bodies))
            done += 1

    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return done / seconds


async def measure(port: int, arguments: argparse.Namespace) -> None:
    """Measure all and print a table."""
    layer = message(of_tokens(128), attention=[3], reduce_heads="mean")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        call: Call = channel.unary_unary(ENCODE)
        plain = message(of_tokens(128))
        await one_after_another(call, [plain, layer], 30)
        alone, looking = await one_after_another(call, [plain, layer], 100 * arguments.rounds)
        await rate(call, 1.0, attention=True)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for mixed in islice(cycle((False, True)), 2 * arguments.rounds):
            rates[mixed].append(await rate(call, arguments.seconds, attention=mixed))
        without, beside = (statistics.median(rates[mixed]) for mixed in (False, True))
        whole = len(await call(message(of_tokens(256), attention=True)))
        largest = len(await call(message(of_tokens(256), attention=True, top_k=8)))
    print("| measure | without | with | ratio |")
    print("|---|---|---|---|")
    times = f"{1e3 * alone:.2f} | {1e3 * looking:.2f} | {looking / alone:.2f}"
    print(f"| p50 ms of 128 tokens; one layer's mean over heads | {times} |")
    rated = f"{without:.0f} | {beside:.0f} | {beside / without:.3f}"
    print(f"| texts/s, 32 in flight; every 20th with a layer's mean over heads | {rated} |")
    print(f"| bytes of all weights at 256 tokens; top 8 | {whole:,} | {largest:,} | {largest / whole:.3f} |")


def main() -> None:
    """Start a server and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind of traffic in a round")
    arguments = parser.parse_args()
    arguments.artifact = exported(arguments.artifact)
    with running_server(*serve_words(arguments), "--max-message-bytes=134217728") as (port, _):
        asyncio.run(measure(port, arguments))


if __name__ == "__main__":
    main()
