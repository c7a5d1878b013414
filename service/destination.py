"""Destination: the file that a command shall make; what can be known of it before the work, and why writing it failed.

May import: errors.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from service.errors import NotWritten

_NO_ROOM = {
    errno.EFBIG: "it is larger than a file may be here, see `ulimit -f`",
    getattr(errno, "EDQUOT", errno.ENOSPC): "the quota of its disk is used up",
    errno.ENOSPC: "no room is left on its disk",
}
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


# ---------------------------------------------------------------- before the work


def trouble(given: str | Path, companions: Sequence[str] = ()) -> str:
    """Tell why a file could not be written; empty where nothing speaks against it. Leaves nothing behind.

    Args:
        given: The path as the user wrote it.
        companions: Endings of the files that lie beside it during the work.
    """
    path = Path(given)
    if found := _name_trouble(os.fspath(given)):
        return found
    try:
        if not path.parent.is_dir():
            what = "is no folder" if path.parent.exists() else "is not there"
            return f"the output's folder {path.parent} {what}; make it first, or write elsewhere"
        places = (path, *(path.with_name(path.name + ending) for ending in companions))
        found = next(filter(None, map(_place_trouble, places)), "")
        if not found:
            trial = part_of(path)
            trial.open("xb").close()
            trial.unlink()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            further = f", {path.name}{max(companions, key=len)} beside it included" if companions else ""
            return f"the output's name {path.name} is too long{further}; give a shorter one"
        return f"the output's folder {path.parent} takes no file: {_reason(error)}; write elsewhere"
    return found


def _name_trouble(name: str) -> str:
    if "\0" in name:
        return f"the output {name!r} holds a NUL character, which no name may; give another one"
    slashes = {os.sep, os.altsep or os.sep}
    if name.endswith(tuple(slash + dot for slash in slashes for dot in ("", "."))):
        return f"the output {name} names a folder; give the name of a file"
    return ""


def _place_trouble(place: Path) -> str:
    if place.is_dir():
        return f"the output {place} is a folder; give the name of a file"
    if place.exists() and not place.is_file():
        return f"the output {place} is no ordinary file; give another name"
    if place.exists() and not os.access(place, os.W_OK):
        return f"the output {place} may not be written; change its permissions, or give another name"
    return ""


# ---------------------------------------------------------------- while it is written


def part_of(path: Path) -> Path:
    """Give a new name in a file's folder for what shall become that file, short whatever the file's is."""
    return path.with_name(f".{secrets.token_hex(8)}.part")


@contextmanager
def writing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Name a file in whatever goes wrong while it, or what shall become it, is written.

    Args:
        path: The file as the user knows it.
        needed_bytes: About how many it takes, where that is known.

    Raises:
        NotWritten: What the file system says, with the room that is needed and that there is.
    """
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        told = NotWritten(f"{path} cannot be written: {_reason(error)}{_room(error, path, needed_bytes)}")
        told.errno = error.errno
        raise told from error


def is_no_room(error: OSError) -> bool:
    """Tell whether more room would have helped."""
    return error.errno in _NO_ROOM


def in_words(size_bytes: int) -> str:
    """Write a size with three digits, such as 1.23 MB."""
    unit_bytes, unit = next((entry for entry in _UNITS if size_bytes >= entry[0]), (1, "bytes"))
    return f"{size_bytes / unit_bytes:.3g} {unit}"


def _room(error: OSError, path: Path, needed_bytes: int) -> str:
    if not is_no_room(error):
        return ""
    parts = [f"about {in_words(needed_bytes)} needed"] if needed_bytes else []
    if error.errno != errno.EFBIG:  # whatever is free, a file is not to be so large
        parts.append(f"{in_words(shutil.disk_usage(path.parent).free)} free")
    return f" ({', '.join(parts)})" if parts else ""


def _reason(error: OSError) -> str:
    return _NO_ROOM.get(error.errno or 0) or (error.strerror or str(error)).lower()
