"""Long texts: attention without whole matrices gives the numbers of the whole ones, and of transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import families
from model.attention import scaled_dot_product_attention
from model.checkpoint import load_encoder
from model.graphs import LONG_FILE, LONG_TOKENS
from model.long import PARTS, Neighbours, Parts
from model.masks import additive, padding_mask, window_mask
from service import artifact as served

CASE = "modernbert, long texts"
LENGTHS = (1100, 1337, 30)


def vectors(seq: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seq)
    return tuple(torch.randn(2, 3, seq, 8, generator=draw) for _ in range(3))


def padded(seq: int) -> torch.Tensor:
    return torch.stack([torch.ones(seq, dtype=torch.int64), (torch.arange(seq) < max(1, seq // 3)).long()])


@pytest.mark.parametrize("reach", [1, 4, 7])
@pytest.mark.parametrize("seq", [1, 3, 4, 5, 7, 8, 15, 16, 17, 50])
def test_neighbours(seq: int, reach: int) -> None:
    """Blocks look as far as the window does, on both sides of a block's borders, and never at padding."""
    mask = padded(seq)
    window = additive(padding_mask(mask) & window_mask(seq, seq, reach), torch.float32)
    query, key, value = vectors(seq)
    expected, _ = scaled_dot_product_attention(query, key, value, window, scale=0.3)
    got = Neighbours(mask, reach)(query, key, value, 0.3)
    places = mask.bool()[:, None, :, None].expand_as(got)
    torch.testing.assert_close(got[places], expected[places], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seq", [1, PARTS - 1, PARTS, PARTS + 1, 3 * PARTS + 5])
def test_parts(seq: int) -> None:
    """Parts of the queries give what all of them give at once."""
    mask = additive(padding_mask(padded(seq)), torch.float32)
    query, key, value = vectors(seq)
    expected, _ = scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(Parts(mask)(query, key, value, 0.3), expected, rtol=0, atol=1e-5)


def test_no_part_is_empty() -> None:
    """The service takes the graph for long texts from where every part has queries."""
    assert served.LONG_TOKENS == LONG_TOKENS
    assert served.LONG_GRAPH == LONG_FILE
    assert all((PARTS - 1) * -(-seq // PARTS) < seq for seq in range(LONG_TOKENS + 1, 9000))


def test_long_texts_equal_transformers(tmp_path: Path, export_artifact: Callable[[Path], Path]) -> None:
    """In torch, whole and in parts, and in the graph for long texts, with texts on both sides of the window."""
    model = families.save(CASE, tmp_path)
    ids, mask = families.padded_batch(model, LENGTHS)
    expected = families.oracle(model, ids, mask)
    real = mask.bool()
    with torch.inference_mode():
        for long in (False, True):
            got = load_encoder(tmp_path)(ids, mask, output_hidden_states=True, long=long)
            for ours, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-5)
    session = onnxruntime.InferenceSession(export_artifact(tmp_path) / LONG_FILE, providers=["CPUExecutionProvider"])
    fed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "state_rows": np.array([0, 2])}
    last, states = session.run(["last_hidden_state", "hidden_states"], fed)
    np.testing.assert_allclose(last[real], expected.last_hidden_state[real], rtol=0, atol=1e-4)
    rows = real[[0, 2]]
    for ours, theirs in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours[rows], theirs[[0, 2]][rows], rtol=0, atol=1e-4)


def test_a_short_model_has_no_graph_for_long_texts(export_artifact: Callable[[Path], Path], tmp_path: Path) -> None:
    """A model whose longest text is short is exported without it."""
    families.save("gte", tmp_path)
    assert not (export_artifact(tmp_path) / LONG_FILE).exists()
