"""A tiny checkpoint to read, and a copy of it to spoil."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def plain(make_bert: Callable[..., Path]) -> Path:
    """Give a plain Hugging Face checkpoint, whose model takes 40 tokens."""
    return make_bert()


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Give a copy of the plain checkpoint."""
    return Path(shutil.copytree(plain, tmp_path / "checkpoint"))
