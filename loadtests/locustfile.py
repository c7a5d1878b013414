"""Locust: callers of every kind against a server, from one machine or from many.

    locust -f loadtests/locustfile.py --host 127.0.0.1:50051                      # the mix, with locust's pages
    locust -f loadtests/locustfile.py --host ... --headless -u 50 -r 10 -t 60s    # the same, without
    locust -f loadtests/locustfile.py --host ... --headless -u 8 -t 60s Stream    # one kind of caller alone
    LOAD_SHAPE=spike locust -f loadtests/locustfile.py --host ... --headless -u 100 -t 120s --processes 4

`LOAD_SHAPE` is step, spike or soak; -u is then the most callers there are, -t how long it all takes. Each
caller has a connection of its own, sends bytes that are prepared beforehand and repeats nothing that failed.
Statistics are by method and kind of request; a failure is named by its gRPC status. Callers are a closed loop:
a slow server gets less load; `open_loop.py` offers a rate whatever happens.
May import: arguments, texts, wire, service's pb.
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import grpc
import grpc.experimental.gevent
from gevent.lock import Semaphore
from locust import LoadTestShape, User, events, task

from arguments import one_or_more
from service.pb import encoder_pb2 as pb
from texts import TEXT, bulk_texts, in_groups, mixed_texts, short_texts
from wire import CHANNEL_OPTIONS, ENCODE, ENCODE_STREAM, request_bytes, stream_item

SINGLES = [request_bytes([text]) for text in (TEXT, *short_texts(255))]
BULKS = [request_bytes(group) for group in in_groups(bulk_texts(32 * 32), 32)]
ATTENTIONS = [request_bytes([text], attention=[-1]) for text in short_texts(64, seed=1)]
MIXED = [request_bytes([text]) for text in mixed_texts(512)]
STREAM_ITEMS = 200  # of one stream; then the caller opens another


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    """Add what callers can be told, beside locust's own."""
    parser.add_argument("--think-s", type=float, default=0.1, help="Mean pause of a caller between its requests")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="Deadline of a request")
    parser.add_argument("--in-flight", type=one_or_more, default=32, help="Requests in flight on each stream")


@events.init.add_listener
def make_grpc_cooperative(**_arguments: object) -> None:
    """Let gRPC wait as gevent does; in each process anew, so that those forked by --processes have it too."""
    grpc.experimental.gevent.init_gevent()


class Failed(Exception):
    """A gRPC status other than OK; numbers are left out of its message, so that equal failures count as one."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        """Name the status."""
        message = re.sub(r"\b[0-9a-f]*[0-9][0-9a-f]*\b", "#", details or "")
        super().__init__(f"{code.name}: {message[:120]}")


class Caller(User):
    """What all callers have: a connection, a pause between requests, and a seed."""

    abstract = True
    host = "127.0.0.1:50051"  # unless --host says otherwise
    _numbers = count()

    def on_start(self) -> None:
        """Connect."""
        self._options = self.environment.parsed_options
        self._channel = grpc.insecure_channel(self.host.removeprefix("http://"), options=CHANNEL_OPTIONS)
        self._encode = self._channel.unary_unary(ENCODE)
        self._draw = random.Random(next(self._numbers))

    def on_stop(self) -> None:
        """Disconnect."""
        self._channel.close()

    def wait_time(self) -> float:
        """Pause as independent people do: mostly briefly, now and then for long."""
        think_s = self._options.think_s
        return self._draw.expovariate(1 / think_s) if think_s else 0.0

    def ask(self, name: str, body: bytes) -> None:
        """Send one request and report what became of it."""
        started = time.perf_counter()
        answer, failure = b"", None
        try:
            answer = self._encode(body, timeout=self._options.timeout_s)
        except grpc.RpcError as error:
            failure = Failed(error.code(), error.details())
        self.report(name, started, len(answer), failure)

    def report(self, name: str, started: float, size_bytes: int, failure: Exception | None) -> None:
        """Tell locust of one request's end."""
        self.environment.events.request.fire(
            request_type="gRPC",
            name=name,
            response_time=1e3 * (time.perf_counter() - started),
            response_length=size_bytes,
            exception=failure,
            context=self.context(),
        )


class Unary(Caller):
    """Single short texts, as a search box sends them."""

    weight = 10

    @task
    def encode(self) -> None:
        """Send one."""
        self.ask("Encode, short text", self._draw.choice(SINGLES))


class Mixed(Caller):
    """Single texts from a query to a page."""

    weight = 4

    @task
    def encode(self) -> None:
        """Send one."""
        self.ask("Encode, mixed lengths", self._draw.choice(MIXED))


class Bulk(Caller):
    """Requests of 32 passages, as an indexing job sends them."""

    weight = 1

    @task
    def encode(self) -> None:
        """Send one."""
        self.ask("Encode, 32 texts", self._draw.choice(BULKS))


class Attention(Caller):
    """Attention of the last layer, as a tool that shows it asks for."""

    weight = 1

    @task
    def attend(self) -> None:
        """Send one."""
        self.ask("Encode, attention", self._draw.choice(ATTENTIONS))


class Stream(Caller):
    """Many requests in flight on one stream; each one's latency counts from its being handed to gRPC."""

    weight = 1

    @task
    def encode_stream(self) -> None:
        """Send one stream of requests."""
        name = "EncodeStream, short text"
        sent: dict[int, float] = {}
        free = Semaphore(self._options.in_flight)
        call = self._channel.stream_stream(ENCODE_STREAM)(self._items(sent, free))
        try:
            for data in call:
                message = pb.EncodeStreamResponse.FromString(data)
                failure = None
                if message.HasField("error"):
                    failure = Failed(_code(message.error.code), message.error.message)
                self.report(name, sent.pop(message.id), len(data), failure)
                free.release()
        except grpc.RpcError as error:
            started = min(sent.values(), default=time.perf_counter())
            self.report(f"{name}, stream", started, 0, Failed(error.code(), error.details()))
        finally:
            call.cancel()

    def _items(self, sent: dict[int, float], free: Semaphore) -> Iterator[bytes]:
        for number in range(STREAM_ITEMS):
            free.acquire()
            item = stream_item(number, self._draw.choice(SINGLES))
            sent[number] = time.perf_counter()
            yield item


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)


def step(share: float) -> float:
    """Climb in five equal steps, to see where latency turns up."""
    return min(int(share * 5) + 1, 5) / 5


def spike(share: float) -> float:
    """Go from a tenth to all at once for a fifth of the time, and back, to see how it recovers."""
    return 1.0 if 0.4 <= share < 0.6 else 0.1


def soak(share: float) -> float:
    """Climb for a tenth of the time, then hold, to see what grows."""
    return min(10 * share, 1.0)


SHAPES: dict[str, Callable[[float], float]] = {"step": step, "spike": spike, "soak": soak}
SHAPE = os.environ.get("LOAD_SHAPE", "")
if SHAPE and SHAPE not in SHAPES:
    raise SystemExit(f"LOAD_SHAPE is {SHAPE!r}, expected one of {', '.join(SHAPES)}")


class Shape(LoadTestShape):
    """The shape that `LOAD_SHAPE` names, over the time of -t, up to the callers of -u."""

    abstract = not SHAPE  # without one, -u, -r and -t mean what they always do
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Give how many callers there should be now, and how many may come or go in a second."""
        options = self.runner.environment.parsed_options
        seconds, most = options.run_time or 120.0, options.num_users or 20
        share = self.get_run_time() / seconds
        if share >= 1:
            return None
        return max(1, round(most * SHAPES[SHAPE](share))), float(most)  # all at once: a spike is none at one a second
