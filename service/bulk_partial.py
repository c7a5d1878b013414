"""Bulk partial: the rows of an output that is not whole yet, and the journal that says how many of them count.

Knows neither the input nor the server. May import: bulk_files, destination, errors, numpy.
"""

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import bulk_files, destination
from service.errors import ConfigError, NotWritten

if sys.platform != "win32":
    import fcntl

COMPANIONS = (".partial", ".partial.json", ".partial.json.new", ".partial.final")  # of an output, while it is made

_CHECKPOINT_S = 0.25
_JOURNAL_ROOM_BYTES = 16 * 2**10  # a few blocks of a file system, more than a journal takes
_FORMAT_VERSION = 2


class Partial:
    """The rows made so far, and the journal beside them.

    What counts are the rows that the journal names, always whole requests; what a killed run wrote beyond them is cut
    off, so that the requests after a kill are the ones that there would have been without it.
    """

    def __init__(self, output: Path) -> None:
        """Store the places; nothing is opened yet."""
        self._output = output
        self._data_path, self._journal_path, self._fresh_path, self._final_path = (
            output.with_name(output.name + ending) for ending in COMPANIONS
        )
        self._file: FileIO | None = None
        self._facts: dict[str, Any] = {}
        self._row_bytes = 0
        self._written_s = 0.0
        self._counted = 0  # rows that the journal names
        self._since: list[tuple[int, int, str]] = []  # rows, skipped, digest after each chunk since the last checkpoint
        self.rows = self.skipped = 0
        self.digest = hashlib.sha256().hexdigest()

    @property
    def exists(self) -> bool:
        """Whether an earlier run left something."""
        return self._data_path.exists() or self._journal_path.exists()

    @property
    def is_over(self) -> bool:
        """Whether the output is there and no run is under way to it.

        Rows without a journal are of a run that was killed at its very end, after the output was whole.
        """
        done = not self._data_path.exists() or self._data_path.stat().st_size > 0
        return done and self._output.exists() and not self._journal_path.exists()

    def check(self, *, resume: bool) -> None:
        """Refuse to begin over what an earlier run left.

        Raises:
            ConfigError: It is there, and `resume` is not asked for.
        """
        if self.is_over:
            self._data_path.unlink(missing_ok=True)
        if not resume and self.exists:
            raise ConfigError(
                f"{self._data_path} is there, from a run that did not end; go on with it by --resume, "
                f"or remove it and {self._journal_path.name} to begin anew"
            )

    @property
    def counted(self) -> int:
        """How many rows are kept, whatever happens now."""
        return self._counted

    def open(self, facts: dict[str, Any], row_bytes: int, remedies: dict[str, str]) -> None:
        """Open the rows, go on after those that count, and hold off other runs.

        Args:
            facts: What must be the same as in the earlier run.
            row_bytes: Bytes of a row.
            remedies: What to do where a fact of that name differs, with {} for what it was.

        Raises:
            ConfigError: A fact differs, the journal is damaged, rows are missing, or another run is at work.
            NotWritten: The file system does not take it.
        """
        with destination.writing(self._data_path):
            self._file = FileIO(self._data_path, "a+")  # no buffer, whose bytes a full disk would leave in it
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another run is writing {self._data_path}") from error
        self._facts, self._row_bytes = facts, row_bytes
        if self._journal_path.exists():
            self._read_journal(remedies)
        if self._data_path.stat().st_size < self.rows * row_bytes:
            raise ConfigError(f"{self._data_path} is shorter than its journal says; {self.anew}")
        self._cut()
        try:
            self.checkpoint()
        except NotWritten:
            self.leave(count=False)
            raise

    def add(self, vectors: NDArray[np.floating], skipped: int, digest: str) -> None:
        """Append the rows (rows, dim) of a chunk; they count from the next checkpoint on.

        Raises:
            NotWritten: The file system does not take them.
        """
        assert self._file is not None
        with destination.writing(self._data_path):
            left = memoryview(vectors.tobytes())
            while left:
                left = left[self._file.write(left) :]
        self.rows += len(vectors)
        self.skipped += skipped
        self.digest = digest
        self._since.append((self.rows, self.skipped, self.digest))

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the last checkpoint was so long ago that another one costs little."""
        return time.monotonic() - self._written_s >= _CHECKPOINT_S

    def checkpoint(self) -> None:
        """Write down what counts, after its bytes have reached the disk.

        Raises:
            NotWritten: The file system does not take it; what the last checkpoint wrote down is as it was.
        """
        assert self._file is not None
        journal = {
            "version": _FORMAT_VERSION,
            **self._facts,
            "rows": self.rows,
            "skipped": self.skipped,
            "digest": self.digest,
        }
        with destination.writing(self._data_path):
            os.fsync(self._file.fileno())
        with destination.writing(self._journal_path):
            try:
                self._fresh_path.write_text(json.dumps(journal, indent=1))
                self._fresh_path.replace(self._journal_path)
            finally:
                self._fresh_path.unlink(missing_ok=True)
        self._counted = self.rows
        self._since.clear()
        self._written_s = time.monotonic()

    def finish(self, form: str, width: int, data_type: str) -> None:
        """Write the rows in their final format, give that its name, and remove the rest.

        Raises:
            NotWritten: The file system does not take it; the rows are kept.
        """
        self.checkpoint()
        with destination.writing(self._output, bulk_files.final_bytes(form, self.rows, width, data_type)):
            try:
                with self._final_path.open("wb") as file, self._data_path.open("rb") as raw:
                    bulk_files.write_vectors(form, file, raw, (self.rows, width), data_type)
                    file.flush()
                    os.fsync(file.fileno())
                self._final_path.replace(self._output)
            finally:
                self._final_path.unlink(missing_ok=True)
        self._journal_path.unlink()  # first: rows without a journal do not count
        self._data_path.unlink()

    def leave(self, *, count: bool) -> None:
        """Keep what counts for a later run; remove what would be nothing to go on with.

        Args:
            count: Whether the rows since the last checkpoint count, if there is room to write that down.
        """
        with suppress(NotWritten):  # whoever ends the run says why; the last checkpoint stands
            if count and self.rows:
                try:
                    self._cut()
                    self.checkpoint()
                except NotWritten:
                    self._make_room()
                    self.checkpoint()
        if not self._counted:
            self._journal_path.unlink(missing_ok=True)
            self._data_path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Give up the last chunks, so that a full disk takes a journal of those before."""
        most = self.rows * self._row_bytes - _JOURNAL_ROOM_BYTES
        fitting = [state for state in self._since if state[0] * self._row_bytes <= most]
        if fitting:
            self.rows, self.skipped, self.digest = fitting[-1]
            self._cut()

    def _cut(self) -> None:
        """Cut off what lies beyond the rows."""
        assert self._file is not None
        with destination.writing(self._data_path):
            self._file.truncate(self.rows * self._row_bytes)

    def close(self) -> None:
        """Close the rows, and let another run have them."""
        if self._file is not None:
            self._file.close()

    def _read_journal(self, remedies: dict[str, str]) -> None:
        try:
            journal = json.loads(self._journal_path.read_text())
            self.rows, self.skipped, self.digest = (journal.pop(name) for name in ("rows", "skipped", "digest"))
            version = journal.pop("version")
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self._journal_path} is damaged; {self.anew}") from error
        self._counted = self.rows
        if version != _FORMAT_VERSION:
            raise ConfigError(f"{self._journal_path} is of another version of attencode; {self.anew}")
        changed = [(name, fact, journal.get(name)) for name, fact in self._facts.items() if journal.get(name) != fact]
        if changed:
            what = ", ".join(f"{name} is {fact!r}, but was {was!r}" for name, fact, was in changed)
            ways = (remedies.get(name, "make {name} the same again").format(was, name=name) for name, _, was in changed)
            raise ConfigError(f"{what} when {self._data_path} was begun; {', '.join(ways)}, or {self.anew}")

    @property
    def anew(self) -> str:
        """What to do to begin anew, in words."""
        return f"remove {self._data_path} and {self._journal_path.name} to begin anew"
