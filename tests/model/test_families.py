"""Families: every one computes what transformers computes, in torch, in ONNX, padded on either side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import families
from model.checkpoint import load_encoder, rename
from model.families import FAMILIES

LENGTHS = ((1,), (5, 17, 3), (40, 8, 64, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Give a function that saves a case's checkpoint once: transformers' model and the folder."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(case: str) -> tuple[Any, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            made[case] = (families.save(case, folder), folder)
        return made[case]

    return get


def test_every_family_has_three_configs() -> None:
    """The cases cover each family of the table at least three times."""
    names = [family for family, _ in families.CASES.values()]
    assert all(names.count(family) >= 3 for family in FAMILIES)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("case", families.CASES)
def test_torch_equals_transformers(
    saved: Callable[[str], tuple[Any, Path]], case: str, lengths: tuple[int, ...], left: bool
) -> None:
    """Hidden states and attention weights at real places differ by at most 1e-5."""
    model, folder = saved(case)
    encoder = load_encoder(folder)
    ids, mask = families.padded_batch(model, lengths, left=left)
    expected = families.oracle(model, ids, mask)
    with torch.inference_mode():
        got = encoder(ids, mask, torch.zeros_like(ids), output_hidden_states=True, output_attentions=True)
    real = mask.bool()
    torch.testing.assert_close(got.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-5, rtol=0)
    assert len(got.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=0)
    for ours, theirs in zip(got.attentions, expected.attentions, strict=True):
        rows = real[:, None, :, None] & real[:, None, None, :]
        torch.testing.assert_close(ours * rows, theirs * rows, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", families.CASES)
def test_onnx_equals_transformers(
    saved: Callable[[str], tuple[Any, Path]], export_artifact: Callable[[Path], Path], case: str
) -> None:
    """The exported graphs differ from transformers by at most 1e-4."""
    model, folder = saved(case)
    artifact = export_artifact(folder)
    for lengths in LENGTHS:
        ids, mask = families.padded_batch(model, lengths)
        expected = families.oracle(model, ids, mask)
        fed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": np.zeros_like(ids.numpy())}
        got = families.run_graphs(artifact, fed)
        real = mask.bool().numpy()
        for layer, theirs in enumerate(expected.hidden_states):
            np.testing.assert_allclose(got[f"hidden_states_{layer}"][real], theirs.numpy()[real], atol=1e-4, rtol=0)
        for layer, theirs in enumerate(expected.attentions):
            rows = real[:, None, :, None] & real[:, None, None, :]
            np.testing.assert_allclose(got[f"attentions_{layer}"] * rows, theirs.numpy() * rows, atol=1e-4, rtol=0)


def test_514_positions_are_512_tokens(saved: Callable[[str], tuple[Any, Path]]) -> None:
    """Positions that begin behind the padding index leave two fewer for tokens."""
    _, folder = saved("roberta")
    assert load_encoder(folder).config.max_tokens == 80


@pytest.mark.parametrize("family", FAMILIES)
def test_rename_knows_every_row(family: str) -> None:
    """Each row of a family's table gives our name, and a name beyond the table none."""
    for theirs, ours in FAMILIES[family].names.items():
        names = (ours,) if isinstance(ours, str) else ours
        assert rename(theirs.format(n=11, m=2, p="bias"), FAMILIES[family]) == tuple(
            name.format(n=11, m=2, p="bias") for name in names
        )
    assert rename("encoder.layer.x.output.dense.bias", FAMILIES[family]) == ()
    assert rename("encoder.layer.1.output.dense.scale", FAMILIES[family]) == ()
