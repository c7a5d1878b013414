"""Confined: a checkpoint's files, read only where they are plain files of its own folder and of a sane size.

Whoever made the checkpoint chose its names, links and sizes. May import: errors.
"""

import os
import stat
from pathlib import Path

from model.errors import CheckpointError

MOST_JSON_BYTES = 64 << 20
"""Of a config or an index of shards; the longest that are published have less than 1 MB."""
MOST_TOKENIZER_BYTES = 128 << 20
"""Of tokenizer.json; the longest that are published have 35 MB."""


def plain_file(path: Path, most_bytes: int | None = None) -> Path:
    """Give a path back if it is one to read.

    A link must lead to a file of the same folder, or, in huggingface_hub's cache, to one of that model's blobs.

    Args:
        path: Of a file of a checkpoint.
        most_bytes: What is read whole must not be larger.

    Raises:
        CheckpointError: It leads out of the folder, is no plain file, or is too large.
        FileNotFoundError: It is not there.
    """
    try:
        real = os.path.realpath(path, strict=True)
        status = os.stat(real)  # noqa: PTH116 - the path is text here
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    folder = Path(os.path.realpath(path.parent))
    cached = [above.parent / "blobs" for above in (folder.parent, folder.parent.parent) if above.name == "snapshots"]
    if not any(Path(real).is_relative_to(place) for place in (folder, *cached)):
        raise CheckpointError(f"{path} is a link to {real}, outside of its folder; put a copy of the file there")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a plain file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise CheckpointError(f"{path} has {status.st_size} bytes, at most {most_bytes} are read")
    return path


def inner_folder(folder: Path, name: str) -> Path:
    """Give the folder of a name that a checkpoint's own file mentions: the checkpoint's, or one right below it.

    Raises:
        CheckpointError: It lies elsewhere.
    """
    if name == "":
        return folder
    if Path(name).name != name or name == ".." or "\0" in name:
        raise CheckpointError(f"{folder} names the folder {name!r}, which is not right below it")
    if not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder)):
        raise CheckpointError(f"{folder / name} is a link that leads out of its folder; put a copy of the folder there")
    return folder / name


def refuse_code(path: Path, raw: dict[str, object], known: tuple[str, ...] = ()) -> None:
    """Refuse a config that names code of the checkpoint's own: it is never run, and without it the numbers differ.

    Args:
        path: For messages.
        raw: The parsed config.
        known: Beginnings of names of code that computes what the encoder does; those may be named.

    Raises:
        CheckpointError: It does.
    """
    named = raw.get("auto_map")
    values = list(named.values()) if isinstance(named, dict) else [named]
    if known and all(isinstance(value, str) and value.startswith(known) for value in values):
        named = None
    if named or raw.get("trust_remote_code"):
        raise CheckpointError(
            f"{path} names code of the checkpoint's own (auto_map), which is never run; "
            "take a checkpoint of a supported family without it"
        )
