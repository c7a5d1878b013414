"""Files that a server follows: looks that find, fail, or come to no end."""

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from authority import Authority, shown_serial

from attencode import Client, Tls, Unauthenticated
from service import following
from service.cli import main
from service.following import follow
from service.small_files import read_small
from tests.service.faults.load import wait_until
from tests.service.keyed import Keys, address, rejected, serving


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


def test_a_pipe_in_place_of_a_file_of_keys(tiny_artifact: Path, tmp_path: Path) -> None:
    """Calls and probes go on as if nothing were; the metric tells of it, until there is a file again."""
    made = Keys(tmp_path)
    stays, gone = made.add("stays"), made.add("gone")
    with (
        serving(tiny_artifact, api_keys=str(made.path), health_port=0) as server,
        Client(address(server), api_key=stays) as client,
        Client(address(server), api_key=gone) as other,
    ):
        wait_until(lambda: rejected("api_keys") == 0)
        before = made.path.with_suffix(".before")
        made.path.rename(before)
        os.mkfifo(made.path)
        wait_until(lambda: rejected("api_keys") == 1)
        for _ in range(3):
            client.encode("abc")
        other.encode("abc")
        assert main(["health", "--address", f"127.0.0.1:{server.health_port}"]) == 0
        pipe, made.path = made.path, before
        made.remove("gone")
        before.replace(pipe)
        wait_until(lambda: rejected("api_keys") == 0)
        client.encode("abc")
        with pytest.raises(Unauthenticated):
            other.encode("abc")


def test_a_pipe_in_place_of_a_certificate(tiny_artifact: Path, tmp_path: Path) -> None:
    """New connections are shown the one of before, and nothing waits; the metric tells of it until there is a file."""
    own = Authority(tmp_path)
    files, renewed = own.sign("server"), own.sign("renewed")
    with serving(tiny_artifact, tls_cert=str(files.cert), tls_key=str(files.key)) as server:
        files.cert.unlink()
        os.mkfifo(files.cert)
        wait_until(lambda: rejected("tls") == 1)
        with Client(address(server), tls=Tls(own.ca)) as client:
            client.get_model()
        assert shown_serial(address(server)) == files.serial
        shutil.copy(renewed.key, files.key)
        renewed.cert.replace(files.cert)
        wait_until(lambda: rejected("tls") == 0)
        assert shown_serial(address(server)) == renewed.serial
