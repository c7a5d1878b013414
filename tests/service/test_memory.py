"""A container's memory, from the files that the kernel shows of cgroups of both versions."""

import math
import os
from pathlib import Path

import psutil
import pytest

from service.memory import Memory

GIB = 2**30


def proc(root: Path, cgroup: str) -> Path:
    """Write what of /proc is read: where this process is, 1000 pages of its own, a machine of 8 GiB."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "statm").write_text("5000 1000 300 1 0 900 0\n")
    (root / "proc" / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree:         1000000 kB\n")
    return root / "proc"


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def version_2(limit: str, usage: int = GIB, inactive: int = GIB // 4) -> dict[str, str]:
    stat = f"anon 5\nfile 7\ninactive_anon 1\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("cgroup", "folder"),
    [("0::/\n", ""), ("0::/kubepods/pod1/box\n", ""), ("0::/pod1/box\n", "pod1")],
    ids=["its own root", "its name on the host", "a limit above it"],
)
def test_version_2(tmp_path: Path, cgroup: str, folder: str) -> None:
    """The nearest limit counts, and what is used without inactive file pages."""
    group(tmp_path / "cgroup" / folder, version_2(str(2 * GIB)))
    if folder:
        group(tmp_path / "cgroup/pod1/box", version_2("max", usage=5))
    memory = Memory(tmp_path / "cgroup", proc(tmp_path, cgroup))
    assert memory.limit_bytes() == 2 * GIB
    assert memory.used_bytes() == 0.75 * GIB


def test_version_1(tmp_path: Path) -> None:
    """The older files are read from the tree of the memory controller."""
    files = {"memory.limit_in_bytes": f"{GIB}\n", "memory.usage_in_bytes": f"{GIB // 2}\n"}
    group(tmp_path / "cgroup/memory/box", files | {"memory.stat": "inactive_file 1\ntotal_inactive_file 1024\n"})
    memory = Memory(tmp_path / "cgroup", proc(tmp_path, "9:cpu:/\n4:memory:/box\n0::/\n"))
    assert memory.limit_bytes() == GIB
    assert memory.used_bytes() == GIB // 2 - 1024


@pytest.mark.parametrize(
    ("cgroup", "folder", "files"),
    [
        ("0::/box\n", "box", version_2("max")),
        ("4:memory:/box\n", "memory/box", {"memory.limit_in_bytes": "9223372036854771712\n"}),
        ("", "", {}),
    ],
    ids=["version 2", "version 1", "no cgroup"],
)
def test_without_a_limit_the_machine_is_it(tmp_path: Path, cgroup: str, folder: str, files: dict[str, str]) -> None:
    """Then the process counts alone, against the machine's memory."""
    group(tmp_path / "cgroup" / folder, files)
    memory = Memory(tmp_path / "cgroup", proc(tmp_path, cgroup))
    assert memory.limit_bytes() == 8 * GIB
    assert memory.used_bytes() == 1000 * os.sysconf("SC_PAGE_SIZE")


def test_a_limit_may_change(tmp_path: Path) -> None:
    """Each reading is of now, since Kubernetes may resize a container that runs."""
    group(tmp_path / "cgroup", version_2(str(GIB)))
    memory = Memory(tmp_path / "cgroup", proc(tmp_path, "0::/\n"))
    group(tmp_path / "cgroup", version_2(str(4 * GIB), usage=3 * GIB))
    assert memory.limit_bytes() == 4 * GIB
    assert memory.used_bytes() == 2.75 * GIB


def test_where_there_is_no_linux(tmp_path: Path) -> None:
    """Nothing is known then, and nothing breaks."""
    memory = Memory(tmp_path / "cgroup", tmp_path / "proc")
    assert math.isnan(memory.limit_bytes())
    assert math.isnan(memory.used_bytes())


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux has cgroups")
def test_on_this_machine() -> None:
    """Here the limit is at most the machine's memory, and something is used of it."""
    memory = Memory()
    assert 0 < memory.used_bytes() < memory.limit_bytes() <= psutil.virtual_memory().total
