"""Confined: a folder's files, opened only where they are plain files that lie in it.

An artifact may come from anybody, so its names, links and sizes are not trusted.
May import: errors.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from service.errors import ArtifactError


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder for reading.

    A link counts as what it leads to, so that a volume of Kubernetes, whose names are links within it, is as good as a
    plain folder.

    Args:
        folder: May be a link itself.
        name: Of the file, without a path.

    Raises:
        ArtifactError: It is not there, no plain file, or leads out of the folder.
    """
    path = folder / name
    try:
        real = os.path.realpath(path, strict=True)
        if not Path(real).is_relative_to(os.path.realpath(folder)):
            raise ArtifactError(
                f"{path} is a link to {real}, outside of its folder; put a copy of the file in its place"
            )
        # A pipe without a writer would wait for one for ever.
        file = open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: PTH123, SIM115 - given away
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}; export the model again") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArtifactError(f"{path} is not a plain file; export the model again")
    return file


def read_file(folder: Path, name: str, most_bytes: int) -> bytes:
    """Read a file of a folder, of at most so many bytes.

    Raises:
        ArtifactError: As `open_file`, or it is larger.
    """
    with open_file(folder, name) as file:
        return read_bounded(file, folder / name, most_bytes)


def read_bounded(file: BinaryIO, path: Path, most_bytes: int) -> bytes:
    """Read a file that is open, of at most so many bytes; the path is for messages.

    Raises:
        ArtifactError: It is larger.
    """
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ArtifactError(
            f"{path} is larger than the {most_bytes} bytes that any export writes; export the model again"
        )
    return content
