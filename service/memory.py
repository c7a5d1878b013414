"""Memory: how much of its container's memory is used, and where the kernel ends it, from Linux' cgroup files.

Both versions of cgroups. Where no cgroup has a limit the machine's memory is the limit, and this process is what
counts; where there is no Linux, both are NaN. May import: nothing of the project.
"""

import ctypes
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc has it
_NO_LIMIT = 2**60  # version 1 says so with the largest multiple of a page


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of one version's files, relative to the root of its tree."""

    tree: str
    limit: str
    usage: str
    inactive: str


_VERSION_1 = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("", "memory.max", "memory.current", "inactive_file")


def trim() -> None:
    """Have the C library give back what is free, which it would else keep for each thread; nothing where it cannot."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


class Memory:
    """The memory of the container that this process is in."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        """Find the nearest cgroup with a limit.

        Args:
            root: Where cgroups are mounted.
            proc: Where processes are.
        """
        self._proc = proc
        self._folder: Path | None = None
        self._files = _VERSION_2
        for files, place in _places(proc):
            tree = root / files.tree
            for folder in (tree / place, *(tree / place).parents):
                if _limit(folder / files.limit) is not None:
                    self._folder, self._files = folder, files
                    return
                if folder == tree:
                    break

    def limit_bytes(self) -> float:
        """Give the limit, or the machine's memory without one."""
        limit = None if self._folder is None else _limit(self._folder / self._files.limit)
        if limit is not None:
            return limit
        return 1024 * _field(self._proc / "meminfo", "MemTotal:")

    def used_bytes(self) -> float:
        """Give what is used without the file pages that the kernel takes back first, as Kubernetes counts it."""
        try:
            if self._folder is None:
                pages = int((self._proc / "self/statm").read_text().split()[1])
                return float(pages * os.sysconf("SC_PAGE_SIZE"))
            usage = int((self._folder / self._files.usage).read_text())
            inactive = _field(self._folder / "memory.stat", self._files.inactive)
        except (OSError, ValueError):
            return math.nan
        return max(0.0, usage - inactive)


def _places(proc: Path) -> list[tuple[_Files, str]]:
    """List this process' memory cgroups, relative to their trees, and these trees' roots, as a container sees them."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    places = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            places.append((_VERSION_1, place.lstrip("/")))
        elif not controllers:
            places.append((_VERSION_2, place.lstrip("/")))
    return places


def _limit(path: Path) -> float | None:
    """Read a limit; None where there is none."""
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):  # no such file, or the word `max`
        return None
    return None if limit >= _NO_LIMIT else float(limit)


def _field(path: Path, name: str) -> float:
    """Read one number of a file of names and numbers; NaN where it is not."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return math.nan
    return next((float(line.split()[1]) for line in lines if line.split()[:1] == [name]), math.nan)
