"""The watchdog in processes: one that hangs ends, one that stood still does not; what is written last."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attencode import AttencodeError, Client
from service.watchdog import Watchdog
from tests.service.conftest import ServerProcess, spawning

FAULTY = "tests.service.faulty_server"


@pytest.fixture
def spawn_faulty(tiny_artifact: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Give a function that starts a server which hangs when told to, on one thread, and is impatient."""
    with spawning([], module=(FAULTY,)) as start:
        flags = ("--provider", "cpu", "--threads", "1", "--stuck-after-s", "3")
        yield lambda: start(tiny_artifact, *flags)


def test_what_ends_in_time_is_left_alone() -> None:
    """Work that is over is forgotten; what does not end is told of, once."""
    told = threading.Event()
    calls: list[str] = []

    def stuck(name: str) -> Callable[[], None]:
        return lambda: (calls.append(name), told.set())  # type: ignore[func-returns-value,return-value]

    watchdog = Watchdog(0.3)
    watchdog.start()
    watchdog.end(watchdog.begin(stuck("short")))
    watchdog.begin(stuck("long"))
    assert told.wait(10)
    time.sleep(0.5)
    watchdog.stop()
    assert calls == ["long"]


@contextmanager
def background(address: str, text: str, times: int = 1) -> Iterator[list[object]]:
    """Send a text while the block runs; yields what comes of it."""
    seen: list[object] = []

    def send() -> None:
        with Client(address, timeout_s=60, options=[("grpc.enable_retries", 0)]) as client:
            for _ in range(times):
                try:
                    seen.append(client.encode(text).pooled.shape)
                except AttencodeError as error:
                    seen.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    yield seen
    thread.join(60)


def test_a_process_with_a_batch_that_hangs_ends(spawn_faulty: Callable[..., ServerProcess]) -> None:
    """Its caller is told, the last line says why, and the exit status is one of its own."""
    server = spawn_faulty()
    with background(server.address, "y") as seen:
        assert server.process.wait(30) == 3
    assert "internal error" in str(seen[0])
    assert server.process.stderr is not None
    log = server.process.stderr.read()
    last = log.strip().splitlines()[-1]
    assert last.startswith(
        "attencode: the device is gone: a batch of 1 inputs, 3 tokens each, has run for 3 s and hangs"
    )
    assert "--stuck-after-s" in last
    assert "faulty_server.py" in log  # where each thread was


def test_a_process_whose_event_loop_hangs_ends(spawn_faulty: Callable[..., ServerProcess]) -> None:
    """A batch that hangs on the event loop's own thread: nobody can be told, but the process ends all the same."""
    server = spawn_faulty()
    with background(server.address, "a", times=12):  # alone for so long that its batches run there
        pass
    with background(server.address, "y"):
        assert server.process.wait(40) == 3
    assert server.process.stderr is not None
    assert "hangs on the event loop's own thread" in server.process.stderr.read().strip().splitlines()[-1]


def test_a_process_that_stood_still_goes_on(spawn_faulty: Callable[..., ServerProcess]) -> None:
    """Stopped for longer than a batch may run, in the middle of one, it answers once it goes on."""
    server = spawn_faulty()
    with background(server.address, "x", times=3) as seen:
        time.sleep(1)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        server.process.send_signal(signal.SIGCONT)
    assert seen == [(1, 24)] * 3
    assert server.terminate() == 0
