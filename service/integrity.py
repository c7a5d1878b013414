"""Integrity: whether the files that a running server has mapped still hold what was verified at its start.

ONNX Runtime and numpy map the weights: whoever writes into the file changes the answers of whoever serves it. A file
that was replaced by another one, or removed, does no harm: the mapping is of the old one.
May import: artifact, errors.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from service.artifact import Artifact, mark_of
from service.errors import ArtifactChanged

_PERIOD_S = 5.0


class Integrity:
    """Looks at an artifact's files again and again; reads one only if its size or its time has changed."""

    def __init__(self, artifact: Artifact) -> None:
        """Remember how the files were when they were verified."""
        self._folder = artifact.folder
        self._seen = dict(artifact.marks)
        self._digests = artifact.digests

    def check(self) -> None:
        """Do nothing while no file was written into.

        Raises:
            ArtifactChanged: One was.
        """
        for name, before in self._seen.items():
            path = self._folder / name
            try:
                now = mark_of(path.stat())
                if now == before or now[:2] != before[:2] or _digest(path) == self._digests[name]:
                    self._seen[name] = now if now[:2] == before[:2] else before
                    continue
            except OSError:  # removed, or out of reach: what is mapped is still there
                continue
            raise ArtifactChanged(
                f"{path} was written into while it was served, so that answers would come from other weights; export "
                "the model again, and mount artifacts read-only"
            )


async def watch(artifacts: Iterable[Artifact], changed: Callable[[ArtifactChanged], None]) -> None:
    """Look at artifacts every so often, and tell of one that was written into; then it is over."""
    each = [Integrity(artifact) for artifact in artifacts]
    while True:
        await asyncio.sleep(_PERIOD_S)
        try:
            for one in each:
                await asyncio.to_thread(one.check)
        except ArtifactChanged as error:
            changed(error)
            return


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
