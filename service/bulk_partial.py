"""Bulk partial: the rows of an output that is not whole yet, and the journal that says how many of them count.

Knows neither the input nor the server. May import: bulk_files, errors, numpy.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from service import bulk_files
from service.errors import ConfigError

if sys.platform != "win32":
    import fcntl

_CHECKPOINT_S = 0.25
_FORMAT_VERSION = 1


class Partial:
    """The rows made so far, and the journal beside them.

    What counts are the rows that the journal names, always whole requests; what a killed run wrote beyond them is cut
    off, so that the requests after a kill are the ones that there would have been without it.
    """

    def __init__(self, output: Path) -> None:
        """Store the places; nothing is opened yet."""
        self._output = output
        self._data_path = output.with_name(output.name + ".partial")
        self._journal_path = output.with_name(output.name + ".partial.json")
        self._final_path = output.with_name(output.name + ".partial.final")
        self._file: BinaryIO | None = None
        self._facts: dict[str, Any] = {}
        self._written_s = 0.0
        self.rows = self.skipped = 0
        self.digest = hashlib.sha256().hexdigest()

    @property
    def exists(self) -> bool:
        """Whether an earlier run left something."""
        return self._data_path.exists() or self._journal_path.exists()

    def check(self, *, resume: bool) -> None:
        """Refuse to begin over what an earlier run left.

        Raises:
            ConfigError: It is there, and `resume` is not asked for.
        """
        if not resume and self.exists:
            raise ConfigError(
                f"{self._data_path} is there, from a run that did not end; go on with it by --resume, "
                f"or remove it and {self._journal_path.name} to begin anew"
            )

    def open(self, facts: dict[str, Any], row_bytes: int) -> None:
        """Open the rows, go on after those that count, and hold off other runs.

        Args:
            facts: What must be the same as in the earlier run.
            row_bytes: Bytes of a row.

        Raises:
            ConfigError: A fact differs, the journal is damaged, rows are missing, or another run is at work.
        """
        self._file = self._data_path.open("a+b")
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another run is writing {self._data_path}") from error
        self._facts = facts
        if self._journal_path.exists():
            self._read_journal()
        if self._data_path.stat().st_size < self.rows * row_bytes:
            raise ConfigError(f"{self._data_path} is shorter than its journal says; {self.anew}")
        self._file.truncate(self.rows * row_bytes)
        self.checkpoint()

    def add(self, vectors: NDArray[np.floating], skipped: int, digest: str) -> None:
        """Append the rows (rows, dim) of a chunk, and now and then write down that they count."""
        assert self._file is not None
        self._file.write(vectors.tobytes())
        self.rows += len(vectors)
        self.skipped += skipped
        self.digest = digest
        if time.monotonic() - self._written_s >= _CHECKPOINT_S:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write down what counts, after its bytes have reached the disk."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        journal = {
            "version": _FORMAT_VERSION,
            **self._facts,
            "rows": self.rows,
            "skipped": self.skipped,
            "digest": self.digest,
        }
        fresh = self._journal_path.with_name(self._journal_path.name + ".new")
        fresh.write_text(json.dumps(journal, indent=1))
        fresh.replace(self._journal_path)
        self._written_s = time.monotonic()

    def finish(self, form: str, width: int, data_type: str) -> None:
        """Write the rows in their final format, give that its name, and remove the rest."""
        assert self._file is not None
        self.checkpoint()
        self._file.seek(0)
        with self._final_path.open("wb") as file:
            bulk_files.write_vectors(form, file, self._file, (self.rows, width), data_type)
            file.flush()
            os.fsync(file.fileno())
        self._final_path.replace(self._output)
        self._journal_path.unlink()  # first: rows without a journal do not count
        self._data_path.unlink()

    def leave(self) -> None:
        """Keep what counts for a later run; remove what would be nothing to go on with."""
        if self.rows:
            self.checkpoint()
        else:
            self._journal_path.unlink(missing_ok=True)
            self._data_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the rows, and let another run have them."""
        if self._file is not None:
            self._file.close()

    def _read_journal(self) -> None:
        try:
            journal = json.loads(self._journal_path.read_text())
            self.rows, self.skipped, self.digest = (journal.pop(name) for name in ("rows", "skipped", "digest"))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self._journal_path} is damaged; {self.anew}") from error
        for name, fact in {"version": _FORMAT_VERSION, **self._facts}.items():
            if journal.get(name) != fact:
                raise ConfigError(
                    f"{name} is {fact!r}, but was {journal.get(name)!r} when {self._data_path} was begun; "
                    f"make it the same again, or {self.anew}"
                )

    @property
    def anew(self) -> str:
        """What to do to begin anew, in words."""
        return f"remove {self._data_path} and {self._journal_path.name} to begin anew"
