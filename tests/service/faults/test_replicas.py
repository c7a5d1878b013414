"""Faults of replicas: what callers notice while they die or hang."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from attencode import Client, DeadlineExceeded, EncodeRequest, EncodeResult, encode_request
from tests.service.conftest import ServerProcess
from tests.service.faults.load import (
    PAIR,
    SINGLE,
    TEXTS,
    check,
    kill_one,
    load,
    metrics,
    processes,
    readiness,
    replicas,
    right_answers,
    serving,
    value,
    wait_until,
)

ray = pytest.importorskip("ray", reason="Ray is not installed; install attencode[ray]")


pytestmark = pytest.mark.ray


def test_deaths_go_unnoticed(pair: ServerProcess) -> None:
    """While replicas die one after the other, no call fails and every answer is as before."""
    expected = right_answers(pair.address, TEXTS)
    with load(pair.address, TEXTS) as answers:
        for _ in range(2):
            time.sleep(2)
            kill_one(PAIR)
            time.sleep(2)
        time.sleep(2)
    check(answers, expected)


def test_streams_outlive_replicas(pair: ServerProcess) -> None:
    """A stream that goes on while a replica dies yields every answer, in order."""
    expected = [answer for answers in right_answers(pair.address, TEXTS).values() for answer in answers]
    wait_until(lambda: len(processes(PAIR)) == len(replicas(pair.address)) == 2)
    started = time.monotonic()
    sent = seen = 0

    def requests() -> Iterator[EncodeRequest]:
        nonlocal sent
        killed = False
        while (age := time.monotonic() - started) < 6:
            if age > 2 and not killed:
                killed = True
                kill_one(PAIR)
            if sent - seen > 500:  # gRPC would take on many thousands, which take a minute to answer
                time.sleep(0.01)
                continue
            sent += len(TEXTS)
            yield from (encode_request(text) for text in TEXTS)

    with Client(pair.address) as client:
        for place, answer in enumerate(client.encode_stream(requests())):
            assert isinstance(answer, EncodeResult), answer
            np.testing.assert_allclose(answer.pooled, expected[place % len(TEXTS)], atol=1e-5)
            seen += 1
    assert seen == sent > len(TEXTS)  # nothing is missing at the end


def test_the_only_replica_dies(single: ServerProcess) -> None:
    """Calls wait for its successor; readiness says so, liveness does not change, its series leave the metrics."""
    large = [TEXTS * 20]  # some 0.1 s, so that a batch dies with its replica
    expected = right_answers(single.address, large)
    (dead,) = replicas(single.address)
    with load(single.address, large, clients=4) as answers:
        time.sleep(0.5)
        assert f'replica="{dead}"' in metrics(single)
        kill_one(SINGLE)
        wait_until(lambda: readiness(single, SINGLE) == (False, False, 0))
        assert serving(single.address, "liveness")
        wait_until(lambda: readiness(single, SINGLE) == (True, True, 1))
    check(answers, expected)
    (successor,) = replicas(single.address)
    assert dead not in metrics(single)
    assert f'replica="{successor}"' in metrics(single)
    assert value(single, f'attencode_batch_retries_total{{model="{SINGLE}",reason="died"}}') >= 1


def test_a_deadline_passes_without_a_replica(single: ServerProcess) -> None:
    """A caller who cannot wait for the successor is told DEADLINE_EXCEEDED; those who can are answered."""
    with Client(single.address) as patient, Client(single.address, timeout_s=0.4) as hasty:
        expected = patient.encode("abc").pooled
        kill_one(SINGLE)
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(client.encode, "abc") for client in (patient, hasty) * 4]
        for answered, failed in zip(calls[::2], calls[1::2], strict=True):
            np.testing.assert_allclose(answered.result().pooled, expected, atol=1e-5)
            with pytest.raises(DeadlineExceeded):
                failed.result()


def test_a_replica_hangs(pair: ServerProcess) -> None:
    """What a stopped replica holds runs on the other one; no call fails."""
    expected = right_answers(pair.address, TEXTS)
    wait_until(lambda: len(processes(PAIR)) == len(replicas(pair.address)) == 2)
    stopped = processes(PAIR)[0]
    try:
        with load(pair.address, TEXTS) as answers:
            time.sleep(1)
            stopped.suspend()
            time.sleep(8)
            before = len(answers)
            time.sleep(3)
            assert len(answers) > before
    finally:
        stopped.kill()
    check(answers, expected)
    assert value(pair, f'attencode_batch_retries_total{{model="{PAIR}",reason="hung"}}') >= 1
