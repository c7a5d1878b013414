"""Small files: one way to read those that settings name, such as keys and certificates.

Only regular files are read, and no more of them than they may have: a pipe would never end, nor would a device. Links
are followed, as volumes of Kubernetes are made of them. May import: nothing.
"""

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 2**20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def read_small(path: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole file; never waits for somebody who writes it.

    Args:
        path: The file, or a link to it.
        most_bytes: How many it may have.

    Raises:
        OSError: It is not there, cannot be read, is no regular file, or has more; `strerror` says which.
    """
    _check_kind(Path(path).stat().st_mode)  # before it is opened: that alone may do something to a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_kind(os.fstat(descriptor).st_mode)  # it may be another one by now
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes, the most that are read; name another file")
    return content


def _check_kind(mode: int) -> None:
    """Raise unless a file is a regular one."""
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, f"{os.strerror(errno.EISDIR)}; name a regular file")
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}; name a regular file, or a link to one")
