"""Faults of batches: who is told, what goes on, and when the device counts as gone. Real sessions, real servers."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException
from prometheus_client import REGISTRY

from attencode import Client, InternalFault, Unavailable, encode_request
from service.batching import Batch
from service.errors import DeviceLost
from tests.checkpoints import VOCABULARY
from tests.service.faulty import Faults, Running, always, raise_for, serving
from tests.service.gate import OUTPUT, GateRunner, run, sequence, started

POISON = VOCABULARY.index("z")
TEXTS = [f"{letter} b c" for letter in "adefghij"]
LAUNCH = Fail("Non-zero status code returned while running MatMul node. CUDA failure 719: unspecified launch failure")


@pytest.fixture
def faults() -> Faults:
    """Give what the sessions of a server are told to do; nothing yet."""
    return Faults()


@pytest.fixture
def running(tiny_artifact: Path, faults: Faults) -> Iterator[Running]:
    """Give a server whose batches have the time to meet, with such sessions."""
    with serving(tiny_artifact, faults.session, max_queue_delay_ms=100, streams=1, threads=1) as server:
        yield server


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def health(address: str, name: str = "") -> str:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def wait_until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def together(client: Client, texts: list[str]) -> list[np.ndarray | Exception]:
    """Send each text as a call of its own, all at once; gives answers and errors in order."""

    def one(text: str) -> np.ndarray | Exception:
        try:
            return client.encode(text).pooled
        except Exception as error:  # noqa: BLE001 - told
            return error

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(one, texts))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeException("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code"), "error"),
        (MemoryError(), "memory"),
        (Fail("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 8"), "memory"),
        (LAUNCH, "device"),
    ],
)
def test_a_failed_batch_fails_its_callers_alone(
    running: Running, faults: Faults, caplog: pytest.LogCaptureFixture, error: Exception, cause: str
) -> None:
    """Whatever a session raises is INTERNAL with an id that is in the log, is counted, and later batches are well."""
    expected = running.client.encode("a").pooled
    before = counted("attencode_batch_faults_total", model="tiny", cause=cause)
    faults.before = raise_for(POISON, error)
    with pytest.raises(InternalFault) as caught:
        running.client.encode("z")
    (told,) = re.findall(r"internal error (\w+);", str(caught.value))
    assert told in caplog.text
    assert "allocate" not in str(caught.value)
    np.testing.assert_array_equal(running.client.encode("a").pooled, expected)
    assert counted("attencode_batch_faults_total", model="tiny", cause=cause) == before + 1
    assert health(running.address) == "SERVING"  # a trial batch did well


def test_a_batch_without_memory_runs_in_halves(running: Running, faults: Faults) -> None:
    """Callers of a batch that is too large for the memory are answered as ever; a row that is too large fails alone."""
    expected = [running.client.encode(text).pooled for text in TEXTS]
    large = faults.batches[-1].input_ids.shape[0]
    assert large == 1

    def scarce(batch: Batch) -> None:
        if len(batch.lengths) > 2 or POISON in batch.input_ids:
            raise MemoryError("bad allocation")

    faults.before = scarce
    faults.batches.clear()
    *answers, poisoned = together(running.client, [*TEXTS, "z b c"])
    assert any(len(batch.lengths) > 2 for batch in faults.batches)
    for answer, wanted in zip(answers, expected, strict=True):
        assert not isinstance(answer, Exception), answer
        np.testing.assert_allclose(answer, wanted, atol=1e-5)
    assert isinstance(poisoned, InternalFault)


def test_a_broken_device_takes_the_server_out_of_service(
    running: Running, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of CUDA that a trial batch meets too: INTERNAL, then UNAVAILABLE, neither ready nor alive."""
    running.client.encode("a")
    faults.before = always(LAUNCH)
    with caplog.at_level(logging.CRITICAL), pytest.raises(InternalFault):
        running.client.encode("b")
    wait_until(lambda: health(running.address) == "NOT_SERVING")
    assert health(running.address, "liveness") == "NOT_SERVING"
    assert health(running.address, "attencode.v1.Encoder/tiny") == "NOT_SERVING"
    assert counted("attencode_ready", model="tiny") == 0
    with pytest.raises(Unavailable):
        running.client.encode("c")
    assert "THE DEVICE IS GONE" in caplog.text
    with pytest.raises(DeviceLost, match="CUDA failure 719"):
        running.call(running.server.lost())
    with pytest.raises(DeviceLost):
        running.server.check()


def test_failures_in_a_row_have_the_device_tried(running: Running, faults: Faults) -> None:
    """Five batches that fail are no reason to end where a trial batch does well, and one where it does not."""
    faults.before = raise_for(POISON, RuntimeError("no"))
    for _ in range(7):
        with pytest.raises(InternalFault):
            running.client.encode("z")
    assert running.client.encode("a").pooled.shape == (1, 24)
    assert health(running.address) == "SERVING"
    faults.before = always(RuntimeError("no"))
    for _ in range(4):
        with pytest.raises(InternalFault):
            running.client.encode("a")
    assert health(running.address) == "SERVING"
    with pytest.raises(InternalFault):
        running.client.encode("a")
    wait_until(lambda: health(running.address) == "NOT_SERVING")


def test_a_device_that_yields_nonsense_is_gone(running: Running, faults: Faults) -> None:
    """Batches of which no row is finite count as failed, and so does a trial batch."""
    faults.after = lambda _batch, arrays: {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    for _ in range(5):
        with pytest.raises(InternalFault):
            running.client.encode("a")
    wait_until(lambda: health(running.address) == "NOT_SERVING")


def test_a_dead_thread_is_a_lost_device(running: Running, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """What ends the thread that runs batches: its batch is failed, and the server is out of service."""
    hook, threading.excepthook = threading.excepthook, lambda _told: None
    try:
        faults.before = raise_for(POISON, SystemExit("from a driver"))
        with caplog.at_level(logging.CRITICAL), pytest.raises(InternalFault):
            running.client.encode("z")
        wait_until(lambda: health(running.address) == "NOT_SERVING")
    finally:
        threading.excepthook = hook
    assert "a thread that runs batches has ended" in caplog.text


def test_a_batch_that_does_not_end_is_given_up(
    tiny_artifact: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Its callers get INTERNAL once its time is up, those behind it UNAVAILABLE, and the server is out of service."""
    ended = threading.Event()

    def hang(batch: Batch) -> None:
        if POISON in batch.input_ids:
            ended.wait(60)

    settings = {"stuck_after_s": 1.0, "streams": 1, "threads": 1, "max_batch_tokens": 8}
    with serving(tiny_artifact, faults.session, **settings) as running, caplog.at_level(logging.ERROR):
        faults.before = hang
        begun = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            stuck = pool.submit(running.client.encode, "z")
            time.sleep(0.2)
            behind = [pool.submit(running.client.encode, text) for text in TEXTS[:5]]
            with pytest.raises(InternalFault) as caught:
                stuck.result()
            for call in behind:
                with pytest.raises(Unavailable):
                    call.result()
        assert time.monotonic() - begun < 15
        (told,) = re.findall(r"internal error (\w+);", str(caught.value))
        assert told in caplog.text
        assert counted("attencode_batch_faults_total", model="tiny", cause="stuck") >= 1
        assert health(running.address) == health(running.address, "liveness") == "NOT_SERVING"
        with pytest.raises(DeviceLost, match="1 inputs, 3 tokens each, has run for 1 s"):
            running.call(running.server.lost())
        ended.set()


def test_a_slow_batch_is_not_stuck(tiny_artifact: Path, faults: Faults) -> None:
    """Batches that take their time one after the other are none that does not end."""
    with serving(tiny_artifact, faults.session, stuck_after_s=1.0, streams=1, threads=1) as running:
        faults.before = lambda _batch: time.sleep(0.3)
        for text in TEXTS[:6]:
            assert running.client.encode(text).pooled.shape == (1, 24)
        assert health(running.address) == "SERVING"


def test_errors_of_ours_are_told_too(tiny_artifact: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that lacks an output, or a plan that fails, leaves no caller waiting for ever."""
    with serving(tiny_artifact, faults.session) as running:
        faults.after = lambda _batch, arrays: {name: array[:0] for name, array in arrays.items()}
        with pytest.raises(InternalFault):
            running.client.encode("a")
        faults.after = lambda _batch, arrays: arrays
        assert running.client.encode("a").pooled.shape == (1, 24)
        engine = running.server._models.find("tiny").engine

        def broken(*_arguments: object) -> None:
            raise KeyError("a fault of the plan")

        take, engine._waiting.take = engine._waiting.take, broken  # type: ignore[method-assign]
        with pytest.raises(InternalFault):
            running.client.encode("a")
        assert "a fault of the plan" in caplog.text
        engine._waiting.take = take  # type: ignore[method-assign]
        assert running.client.encode("a").pooled.shape == (1, 24)


def test_a_stream_shows_no_words_of_a_fault(
    tiny_artifact: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails in a stream outside its items is INTERNAL with an id in the log, and nothing more."""
    with serving(tiny_artifact, faults.session) as running:
        servicer = running.server._servicer

        async def broken(*_arguments: object) -> None:
            raise KeyError("a secret of ours")

        servicer._send = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(InternalFault) as caught:
            list(running.client.encode_stream([encode_request("a")]))
        (told,) = re.findall(r"internal error (\w+);", str(caught.value))
        assert told in caplog.text
        assert "a secret" not in str(caught.value)
        assert "a secret" in caplog.text


def test_an_engine_that_gives_up() -> None:
    """What runs ends as it will, what waits is given back at once, and nothing more is taken in."""

    async def test() -> None:
        runner = GateRunner()
        engine = await started(runner)
        running = asyncio.create_task(engine.submit([sequence(1)], OUTPUT, None))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(engine.submit([sequence(2, 16)] * 40, OUTPUT, None))
        await asyncio.sleep(0.01)
        engine.give_up()
        with pytest.raises(Unavailable, match="about to end"):
            await waiting
        with pytest.raises(Unavailable):
            await engine.submit([sequence(3)], OUTPUT, None)
        runner.gate.set()
        assert len((await running).rows) == 1

    run(test)
