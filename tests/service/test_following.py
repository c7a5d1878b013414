"""Files that a server follows: looks that find, fail, or come to no end."""

import asyncio
import threading

import pytest

from service import following
from service.following import follow
from service.small_files import read_small
from tests.service.faults.load import wait_until
from tests.service.keyed import rejected


def test_a_look_that_comes_to_no_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on meanwhile, the metric and the log tell of it, and later looks are as before."""
    monkeypatch.setattr(following, "_SLOW_S", 0.05)
    monkeypatch.setattr(following, "_LOOK_S", 0.01)
    answers, looks = threading.Event(), []

    def look() -> bool:
        looks.append(threading.current_thread())
        return answers.wait(30)

    async def watched() -> None:
        task = asyncio.create_task(follow("tls", look))
        await asyncio.to_thread(wait_until, lambda: rejected("tls") == 1)
        assert len(looks) == 1
        assert looks[0].daemon  # the process need not wait for it
        answers.set()
        await asyncio.to_thread(wait_until, lambda: rejected("tls") == 0)
        task.cancel()

    asyncio.run(watched())
    assert caplog.text.count("has not answered") == 1


def test_a_look_that_fails() -> None:
    """It ends the following by its error, for whoever keeps it up."""

    def look() -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        asyncio.run(follow("tls", look))


def test_what_is_read_is_whole() -> None:
    """A file is given as it is, up to as many bytes as it may have."""
    content = read_small(__file__)
    assert read_small(__file__, len(content)) == content
    with pytest.raises(OSError, match=f"more than {len(content) - 1:,} bytes"):
        read_small(__file__, len(content) - 1)
