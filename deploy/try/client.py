"""A caller from outside: what a running server must answer, and what it must still answer when it is told to end.

    python client.py call ADDRESS
    python client.py drain ADDRESS COMMAND ...

Needs attencode alone, as its clients have it.
"""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from attencode import Client, EncodeResult, Unavailable, encode_request

TEXTS = ["a dog runs over the grass", "a puppy runs across the lawn", "interest rates were raised again"]
LONG = "the dog did not attack the old man because it was sleepy and the weather was far too warm for that " * 12
WORK_S = 4.0
ROWS = 64


def call(address: str) -> None:
    """Ask for vectors, attention and a stream, and check each answer."""
    with Client(address) as client:
        print(f"model {client.get_model().model_id} on {client.get_model().provider}")
        pooled = client.encode(TEXTS, normalize=True).pooled
        near, far = float(pooled[0] @ pooled[1]), float(pooled[0] @ pooled[2])
        assert np.allclose(np.linalg.norm(pooled, axis=1), 1, atol=1e-3), pooled
        assert near > far + 0.3, (near, far)
        print(f"encode: {pooled.shape}, dog and puppy {near:.2f}, dog and interest rates {far:.2f}")
        item = client.attend("time flies like an arrow", layers=[0])
        assert item.attention is not None
        assert np.allclose(item.attention.sum(axis=-1), 1, atol=0.02), item.attention.sum(axis=-1)
        print(f"attend: {item.attention.shape}, each row sums to 1")
        answers = list(client.encode_stream(encode_request(f"text number {number}") for number in range(200)))
        assert all(isinstance(answer, EncodeResult) for answer in answers), answers[0]
        print(f"stream: {len(answers)} answers")


def drain(address: str, command: list[str]) -> None:
    """Send some seconds of work, run what sends SIGTERM in its middle, and want every answer and then a refusal."""
    texts = [LONG] * ROWS  # cut at the model's most tokens
    with Client(address, timeout_s=60) as client, ThreadPoolExecutor(128) as pool:
        client.encode(texts)
        started = time.monotonic()
        client.encode(texts)
        calls = max(8, min(120, round(WORK_S / (time.monotonic() - started))))
        ends: list[float] = []

        def one() -> None:
            client.encode(texts)
            ends.append(time.monotonic())

        futures = [pool.submit(one) for _ in range(calls)]
        time.sleep(0.5)
        signalled = time.monotonic()
        refused = threading.Thread(target=lambda: subprocess.run(command, check=True))
        refused.start()
        for future in futures:
            future.result()
        late = [end - signalled for end in ends if end > signalled]
        assert late, f"all {calls} calls were answered before the signal; nothing is shown"
        print(
            f"drain: {calls} calls of {ROWS} texts, all answered, {len(late)} after SIGTERM, the last {max(late):.1f} s"
        )
        refused.join()
        ended_s = time.monotonic() - signalled
        print(f"drain: the container ended {ended_s:.1f} s after SIGTERM; {refusal(address)}")


def refusal(address: str) -> str:
    """Say how a call after the end is refused, which a client must be able to take for `try another one`."""
    try:
        with Client(address, timeout_s=2) as client:
            client.encode("too late")
    except Unavailable:
        return "a new call is UNAVAILABLE"
    raise AssertionError("a call was answered after the end")


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    call(where) if what == "call" else drain(where, rest)
