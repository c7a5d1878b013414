"""Destinations: what can be known of an output before the work, and in which words a full disk is told."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from attencode import AttencodeError, Attended, Attention, InputResult, InvalidRequest, NotWritten, Tokens
from service import destination, view

COMPANIONS = (".partial", ".partial.json.new")


def test_what_can_be_written_is_no_trouble(tmp_path: Path) -> None:
    """A new name, the longest that there may be, and an old file are fine, and nothing is left behind."""
    (tmp_path / "old.npy").write_bytes(b"old")
    longest = "x" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 4) + ".png"
    for name in ("new.npy", "old.npy", longest):
        assert not destination.trouble(tmp_path / name)
    assert not destination.trouble(tmp_path / "new.npy", COMPANIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
    assert (tmp_path / "old.npy").read_bytes() == b"old"
    view.write(tmp_path / longest, b"whole")
    assert (tmp_path / longest).read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder.npy", "is a folder"),
        ("new.npy/", "names a folder"),
        ("new.npy/.", "names a folder"),
        ("none/new.npy", "is not there; make it first"),
        ("file.npy/new.npy", "file.npy is no folder"),
        ("pipe.npy", "is no ordinary file"),
        ("x" * 252 + ".npy", "is too long; give a shorter one"),
        ("x" * 240 + ".npy", "beside it included; give a shorter one"),
        ("x/" * 3000 + "new.npy", "is too long"),
        ("a\0b.npy", "NUL"),
        ("busy.npy", "busy.npy.partial is a folder"),
    ],
)
def test_trouble_is_told_before_the_work(tmp_path: Path, name: str, words: str) -> None:
    """What a path cannot become is said in words, and what is there stays."""
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "busy.npy.partial").mkdir()
    (tmp_path / "file.npy").touch()
    os.mkfifo(tmp_path / "pipe.npy")
    before = sorted(tmp_path.iterdir())
    told = destination.trouble(f"{tmp_path}/{name}", () if words == "is too long; give a shorter one" else COMPANIONS)
    assert words in told
    assert sorted(tmp_path.iterdir()) == before


def test_what_may_not_be_written(tmp_path: Path) -> None:
    """A folder or file without the right to write is told; to root, who has it, by a file system without."""
    if os.geteuid() == 0:
        assert "takes no file: " in destination.trouble("/proc/new.npy")
        return
    (tmp_path / "old.npy").touch(mode=0o400)
    assert "may not be written; change its permissions" in destination.trouble(tmp_path / "old.npy")
    tmp_path.chmod(0o500)
    assert "takes no file: permission denied" in destination.trouble(tmp_path / "new.npy")


def test_a_file_without_room(tmp_path: Path) -> None:
    """A file that grows too large is named as the user has it, with the room that it takes, and nothing is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(NotWritten, match=r"x\.png cannot be written: .*ulimit -f.*about 5 kB needed") as caught:
            view.write(tmp_path / "x.png", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, AttencodeError)
    assert destination.is_no_room(caught.value)
    assert not list(tmp_path.iterdir())


def test_save_tells_trouble_first(tmp_path: Path) -> None:
    """`Attended.save` says that a path is a folder before it looks at the answer."""
    tokens = Tokens([0], ["a"], [(0, 0)], [(0, 0)], [-1], [0], [False])
    item = Attended(InputResult(1, 1, tokens, attention=np.ones((1, 1), np.float32)), Attention())
    (tmp_path / "x.png").mkdir()
    for name in ("x.png", "y.png/"):
        with pytest.raises(InvalidRequest, match="folder; give the name of a file"):
            item.save(f"{tmp_path}/{name}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_sizes_in_words() -> None:
    """Three digits and a unit."""
    assert [destination.in_words(size) for size in (12, 1234, 5_678_000, 12_345_678_900)] == [
        *("12 bytes", "1.23 kB", "5.68 MB", "12.3 GB")
    ]
