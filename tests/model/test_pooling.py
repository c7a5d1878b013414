"""Poolings: what a padded batch gives is what each sequence gives alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.pooling import POOLINGS

# What each pooling is, of the unpadded tokens (seq, hidden).
DEFINITIONS = {
    "cls": lambda tokens: tokens[0],
    "mean": lambda tokens: tokens.astype(np.float64).mean(axis=0),
    "max": lambda tokens: tokens.max(axis=0),
    "last": lambda tokens: tokens[-1],
}
SIDES = ("left", "right")


def padded(
    lengths: list[int], hidden: int, seed: int, side: str, extra: int = 0
) -> tuple[list[np.ndarray], torch.Tensor, torch.Tensor]:
    """Draw sequences, and their batch with large numbers in the padded places, and its mask."""
    rng = np.random.default_rng(seed)
    sequences = [rng.normal(size=(length, hidden)).astype(np.float32) for length in lengths]
    seq = max(lengths) + extra
    batch = rng.normal(scale=1e4, size=(len(lengths), seq, hidden)).astype(np.float32)
    mask = np.zeros((len(lengths), seq), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        places = slice(0, len(sequence)) if side == "right" else slice(seq - len(sequence), seq)
        batch[row, places] = sequence
        mask[row, places] = 1
    return sequences, torch.from_numpy(batch), torch.from_numpy(mask)


def test_there_are_four():
    """The poolings are cls, mean, max and last."""
    assert list(POOLINGS) == list(DEFINITIONS)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pooling", POOLINGS)
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    hidden=st.integers(1, 9),
    extra=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_padding_changes_nothing(*, pooling: str, side: str, lengths: list[int], hidden: int, extra: int, seed: int):
    """A pooled vector is that of the unpadded sequence, wherever the padding is and whatever lies there."""
    sequences, batch, mask = padded(lengths, hidden, seed, side, extra)
    pooled = POOLINGS[pooling](batch, mask).numpy()
    assert pooled.shape == (len(lengths), hidden)
    assert pooled.dtype == np.float32
    for row, sequence in enumerate(sequences):
        expected = DEFINITIONS[pooling](sequence)
        if pooling == "mean":
            np.testing.assert_allclose(pooled[row], expected, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(pooled[row], expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_negative_values_are_not_hidden_by_padding(pooling: str):
    """Padding counts as absent, not as zero: a sequence of negative numbers pools to negative numbers."""
    hidden = torch.zeros(1, 4, 3)
    hidden[0, :2] = -5
    pooled = POOLINGS[pooling](hidden, torch.tensor([[1, 1, 0, 0]]))
    assert (pooled == -5).all()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_without_tokens_is_finite(pooling: str):
    """A row without any token pools to finite numbers, and leaves the other rows as they are."""
    _, batch, mask = padded([3, 2], 5, 0, "right")
    expected = POOLINGS[pooling](batch, mask)
    emptied = torch.cat([mask[:1], torch.zeros_like(mask[:1])])
    pooled = POOLINGS[pooling](batch, emptied)
    assert torch.isfinite(pooled).all()
    assert torch.equal(pooled[0], expected[0])


def test_mean_without_tokens_is_zero():
    """The mean of no tokens is the zero vector."""
    assert (POOLINGS["mean"](torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64)) == 0).all()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_poolings_keep_the_dtype(pooling: str, dtype: torch.dtype):
    """A pooled vector has the hidden states' own dtype, and finite numbers in it."""
    pooled = POOLINGS[pooling](torch.ones(2, 4, 3, dtype=dtype), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
    assert pooled.dtype == dtype
    assert (pooled == 1).all()
