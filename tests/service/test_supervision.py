"""Supervision: what runs beside the requests never ends in silence."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from service import supervision
from service.errors import TaskLost
from service.supervision import keep, watch_loop, watch_threads
from tests.service.faulty import Faults, serving
from tests.service.gate import run
from tests.service.test_faults import health, wait_until


def crashes(task: str) -> float:
    return REGISTRY.get_sample_value("attencode_crashes_total", {"task": task}) or 0.0


def failing(times: int, seen: list[int]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def work() -> None:
        seen.append(len(seen))
        await asyncio.sleep(0)
        if len(seen) <= times:
            raise OSError("no such luck")

    return work


def test_a_task_that_fails_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with its traceback and counted, and goes on until it ends by itself."""

    async def test() -> None:
        seen: list[int] = []
        lost: asyncio.Future[None] = asyncio.Future()
        before = crashes("pulse")
        await keep("pulse", failing(2, seen), lost)
        assert seen == [0, 1, 2]
        assert not lost.done()
        assert crashes("pulse") == before + 2
        assert "pulse failed, 2 times in a row now" in caplog.text
        assert "no such luck" in caplog.text

    run(test)


def test_a_task_that_fails_again_and_again_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the fifth time in a row it is given up, and whoever waits for the server's end is told."""
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_S", 0.001)

    async def test() -> None:
        seen: list[int] = []
        lost: asyncio.Future[None] = asyncio.Future()
        await keep("pulse", failing(99, seen), lost)
        assert len(seen) == 5
        with pytest.raises(TaskLost, match="pulse failed 5 times in a row"):
            await lost

    run(test)


def test_what_nobody_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks and threads that fail are logged and counted, without the values that they were given."""
    hook = threading.excepthook
    watch_threads()

    def fail(_secret: str) -> None:
        raise ValueError("in a thread or a callback")

    async def test() -> None:
        loop = asyncio.get_running_loop()
        watch_loop(loop)
        before = crashes("event loop"), crashes("thread")
        loop.call_soon(fail, "a caller's text")
        await asyncio.sleep(0.01)
        thread = threading.Thread(target=fail, args=("a caller's text",), name="a-thread")
        thread.start()
        await asyncio.to_thread(thread.join)
        assert (crashes("event loop"), crashes("thread")) == (before[0] + 1, before[1] + 1)

    try:
        run(test)
    finally:
        threading.excepthook = hook
    assert "what nobody awaits has failed: Exception in callback" in caplog.text
    assert "the thread a-thread ended by an error" in caplog.text
    assert "a caller's text" not in caplog.text


def test_health_is_announced_by_a_kept_task(tiny_artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the task that tells health fails, the next change of readiness is told all the same."""
    with serving(tiny_artifact, Faults().session) as running, caplog.at_level(logging.CRITICAL):
        announce, models = running.server._announce, running.server._models

        async def broken(**_: bool) -> None:
            raise OSError("no health")

        async def change(ready: bool) -> None:
            models.set_ready("tiny", ready=ready)

        running.server._announce = broken  # type: ignore[method-assign,assignment]
        running.call(change(False))
        wait_until(lambda: "health failed, 1 times in a row now" in caplog.text)
        running.server._announce = announce  # type: ignore[method-assign]
        running.call(change(True))
        running.call(change(False))
        wait_until(lambda: health(running.address) == "NOT_SERVING")
        running.call(change(True))
        wait_until(lambda: health(running.address) == "SERVING")
        assert "health failed, 2 times" not in caplog.text
