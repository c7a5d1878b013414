"""Folder: an artifact's, written aside and then renamed into place, so that it is whole or absent under its name.

May import: errors.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import ExportError

ARTIFACT_FILE = "artifact.json"
_PARTIAL = ".partial-"
_OLD = ".old"


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Add each file's size and digest, and write `artifact.json` last."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    text = json.dumps({**description, "files": files}, indent=2, ensure_ascii=False)
    with (folder / ARTIFACT_FILE).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def refuse_foreign(output: Path) -> None:
    """Refuse to replace what is not an artifact."""
    if output.is_dir() and (not any(output.iterdir()) or (output / ARTIFACT_FILE).is_file()):
        return
    if output.exists() or output.is_symlink():
        raise ExportError(f"{output} exists and is not an artifact; choose another folder or remove it")


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """Yield a folder beside `output` that takes its name when the block ends well, else vanishes."""
    output = output.resolve()  # a link stays, and what it leads to is replaced
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(output)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}{_PARTIAL}", dir=output.parent))
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
            folder.chmod(0o755)
            _replace(folder, output)
            (output / ".lock").unlink()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        reason = os.strerror(error.errno)
        raise ExportError(f"{output} cannot be written: {reason}; make room there, or choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, output: Path) -> None:
    """Give `folder` the name `output`; an older artifact there is moved aside first and then removed."""
    old = folder.with_name(folder.name + _OLD)
    if output.is_dir():
        output.rename(old)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(output: Path) -> None:
    """Remove folders of exports that were killed: those whose lock nobody holds, and what they moved aside."""
    for folder in sorted(output.parent.glob(f".{glob.escape(output.name)}{_PARTIAL}*")):
        if folder.name.endswith(_OLD) and not folder.with_name(folder.name.removesuffix(_OLD)).exists():
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            with (folder / ".lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # just made, being written, or somebody else's
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
