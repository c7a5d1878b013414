"""Traffic that moves every figure on the dashboard: kinds of requests, mistakes, overload, readers that do not read."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import grpc

import attencode
from attencode import Client
from tests.service.streams import UNHURRIED, item, open_stream

SECRET = "xylophone-in-the-cellar"  # noqa: S105 - a text that nobody may find in what is exported
WORDS = ("time", "flies", "like", "an", "arrow", "and", "fruit")
_TIMEOUT_S = {"hasty": 0.004}
_ANOTHER = [("grpc.use_local_subchannel_pool", 1)]  # a connection, and so a turn, of its own


def words(draw: random.Random, count: int) -> str:
    return " ".join(
        [SECRET, *(draw.choice(["time", "flies", "like", "an", "arrow", "and", "fruit"]) for _ in range(count))]
    )


def single(client: Client, draw: random.Random) -> None:
    """One short text, as typed into a search box."""
    client.encode(words(draw, draw.randint(1, 8)))
    time.sleep(draw.expovariate(40))


def bulk(client: Client, draw: random.Random) -> None:
    """A request of many texts of very different lengths, some too long for the model."""
    client.encode([words(draw, int(draw.lognormvariate(2.5, 1.2)) + 1) for _ in range(64)])


def attention(client: Client, draw: random.Random) -> None:
    """Attention of all layers."""
    client.attend(words(draw, 20))


def stream(client: Client, draw: random.Random) -> None:
    """Many items in flight on one stream."""
    requests = (attencode.encode_request(words(draw, draw.randint(1, 30))) for _ in range(200))
    for answer in client.encode_stream(requests):
        assert answer is not None


def mistake(client: Client, draw: random.Random) -> None:
    """What the caller must mend: an empty text, a model that nobody serves, too many words."""
    with suppress(attencode.InvalidRequest):
        client.encode("")
    with suppress(attencode.InvalidRequest):
        client.encode("a", model=SECRET)
    with suppress(attencode.InvalidRequest):
        client.encode(words(draw, 3000), truncation="off")
    client.get_model()
    client.tokenize(words(draw, 5))
    time.sleep(0.2)


def hasty(client: Client, draw: random.Random) -> None:
    """A deadline that cannot be met."""
    with suppress(attencode.AttencodeError):
        client.encode([words(draw, 30)] * 256)
    time.sleep(0.1)


def flood(client: Client, draw: random.Random) -> None:
    """More than fits into the queue."""
    client.encode([words(draw, 30) for _ in range(256)])


def unread(client: Client, draw: random.Random) -> None:
    """A stream of large answers whose reader falls asleep."""
    text = words(draw, 200)
    call = open_stream(client, *(item(number, text) for number in range(20)), timeout_s=20)
    with suppress(grpc.RpcError):
        next(call)
        time.sleep(5)
        call.cancel()


def run(address: str, seconds: float, *kinds: tuple[Callable[[Client, random.Random], None], int]) -> list[Exception]:
    """Run kinds of callers, so many of each, for a time; returns what they did not expect."""
    end_s = time.monotonic() + seconds
    failures: list[Exception] = []

    def keep_calling(kind: Callable[[Client, random.Random], None], seed: int) -> None:
        draw = random.Random(seed)
        options = [*_ANOTHER, *(UNHURRIED if kind is unread else [])]
        with Client(address, timeout_s=_TIMEOUT_S.get(kind.__name__, 20.0), options=options) as client:
            while time.monotonic() < end_s:
                try:
                    kind(client, draw)
                except attencode.QueueFull:
                    time.sleep(0.2)
                except Exception as error:  # noqa: BLE001 - the test's thread raises it
                    failures.append(error)
                    return

    threads = [
        threading.Thread(target=keep_calling, args=(kind, seed)) for kind, count in kinds for seed in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


EVERYTHING = ((single, 4), (bulk, 1), (attention, 1), (stream, 1), (mistake, 1), (hasty, 1), (flood, 3), (unread, 1))
