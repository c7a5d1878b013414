"""What tests of hostile artifacts share: a copy of a whole one, and what its maker would do to it."""

import hashlib
import json
from pathlib import Path

from service.artifact import ARTIFACT_FILE


def describe(folder: Path, **values: object) -> None:
    """Change values of a description."""
    path = folder / ARTIFACT_FILE
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def seal(folder: Path) -> None:
    """Write every file's size and digest anew, as whoever made the files would."""
    files = json.loads((folder / ARTIFACT_FILE).read_text("utf-8"))["files"]
    for name in files:
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    describe(folder, files=files)
