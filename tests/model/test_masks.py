"""Masks and position biases against loops, each other, and transformers' own T5."""

import numpy as np
import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from model.attention import scaled_dot_product_attention
from model.masks import (
    RelativePositionBias,
    additive,
    causal_mask,
    padding_mask,
    relative_position_bucket,
    window_mask,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [(1, 1), (4, 4), (1, 6), (3, 7), (5, 2)]  # query, key
BUCKETS = [(32, 128), (8, 20), (16, 64), (12, 100), (4, 3), (9, 33), (64, 512), (6, 1000)]  # buckets, max distance


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loop(query_length: int, key_length: int, allows: object) -> np.ndarray:
    """Ask for each query and key, the queries being the last places of the keys."""
    mask = np.zeros((query_length, key_length), dtype=bool)
    for row, column in np.ndindex(query_length, key_length):
        mask[row, column] = allows(column - (row + key_length - query_length))
    return mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_additive(dtype: torch.dtype):
    """True becomes 0 and False a finite number so low that its weight is exactly 0."""
    mask = additive(torch.tensor([True, False]), dtype)
    assert mask.dtype == dtype
    assert mask[0] == 0
    assert torch.isfinite(mask).all()
    assert torch.isfinite(2 * mask).all()  # padding and causal masks may be summed
    assert torch.equal((mask + torch.tensor([-50, 50], dtype=dtype)).softmax(dim=-1), torch.tensor([1, 0], dtype=dtype))


def test_an_additive_mask_stays_as_it_is():
    """A mask that is already additive is used unchanged."""
    mask = draw(2, 1, 3, 4)
    assert additive(mask, torch.float32) is mask


def test_padding_mask():
    """Every query may look at the tokens and at no padding, wherever the padding lies."""
    mask = padding_mask(torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]))
    assert mask.dtype == torch.bool
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].tolist() == [[True, True, False], [False, True, True], [False, False, False]]


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_causal_mask(query_length: int, key_length: int):
    """A query may look at its own place and those before it, the queries being the last places."""
    expected = loop(query_length, key_length, lambda distance: distance <= 0)
    mask = causal_mask(query_length, key_length)
    assert mask.dtype == torch.bool
    np.testing.assert_array_equal(mask.numpy(), expected)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_window_mask(query_length: int, key_length: int, window: int):
    """A query may look at most so many places to either side."""
    expected = loop(query_length, key_length, lambda distance: abs(distance) <= window)
    np.testing.assert_array_equal(window_mask(query_length, key_length, window).numpy(), expected)


MASKS = {
    "padding": padding_mask(torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]])),
    "causal": causal_mask(5, 5),
    "window": window_mask(5, 5, 1),
    "causal and window": causal_mask(5, 5) & window_mask(5, 5, 2),
    "padding and causal": padding_mask(torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]])) & causal_mask(5, 5),
    "one a head": draw(1, 3, 5, 5, seed=4) > 0,
    "arbitrary": draw(2, 3, 5, 5, seed=5) > -0.5,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_boolean_and_additive_agree(mask: torch.Tensor):
    """The same mask as booleans, as numbers to add, and with minus infinity written out gives the same answer."""
    mask = mask | torch.eye(5, dtype=torch.bool)  # so that each query may look somewhere
    query, key, value = (draw(2, 3, 5, 4, seed=seed) for seed in range(3))
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    added = scaled_dot_product_attention(query, key, value, additive(mask, torch.float32))
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~mask, -torch.inf)
    for got, theirs, written in zip(
        (context, weights), added, (scores.softmax(-1) @ value, scores.softmax(-1)), strict=True
    ):
        assert torch.equal(got, theirs)
        torch.testing.assert_close(got, written, rtol=0, atol=1e-6)
    assert (weights[~mask.expand_as(weights)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["boolean", "additive", "summed"])
def test_a_query_that_may_look_nowhere(form: str, dtype: torch.dtype):
    """A fully masked row gives finite numbers, whatever the form, and leaves the other rows as they are."""
    padding, causal = padding_mask(torch.tensor([[0, 0, 1, 1]])), causal_mask(4, 4)
    mask = {
        "boolean": padding & causal,
        "additive": additive(padding & causal, dtype),
        "summed": additive(padding, dtype) + additive(causal, dtype),
    }[form]
    query, key, value = (draw(1, 2, 4, 3, seed=seed).to(dtype) for seed in range(3))
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    assert torch.isfinite(context).all()
    assert torch.isfinite(weights).all()
    assert (weights[:, :, 2, :2] == 0).all()
    assert (weights[:, :, 2, 2] == 1).all()
    assert (weights[:, :, 3, :2] == 0).all()


# ---------------------------------------------------------------- relative positions


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), BUCKETS)
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int, bidirectional: bool):
    """Every distance, across all borders and beyond the largest, has transformers' bucket number."""
    if not bidirectional and max_distance <= num_buckets // 2:
        max_distance = num_buckets
    distances = torch.arange(-2 * max_distance - 5, 2 * max_distance + 6)
    options = {"num_buckets": num_buckets, "max_distance": max_distance, "bidirectional": bidirectional}
    buckets = relative_position_bucket(distances, **options)
    assert buckets.dtype == torch.int64
    assert torch.equal(buckets, T5Attention._relative_position_bucket(distances, **options))
    assert buckets.min() == 0
    assert buckets.max() < num_buckets


def test_causal_buckets_tell_nothing_of_what_is_ahead():
    """One-sided buckets number the places behind a query, near ones each; all places ahead share bucket 0."""
    options = {"num_buckets": 32, "max_distance": 128, "bidirectional": False}
    assert relative_position_bucket(torch.arange(0, 300), **options).unique().tolist() == [0]
    assert relative_position_bucket(-torch.arange(0, 16), **options).tolist() == list(range(16))
    assert relative_position_bucket(torch.tensor([-127, -128, -5000]), **options).tolist() == [31, 31, 31]


@pytest.mark.parametrize("past", [0, 1, 7, 40])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_position_bias_is_that_of_t5(bidirectional: bool, past: int):
    """The biases (1, heads, query, key) are T5's own, also for queries behind `past` cached keys."""
    config = T5Config(
        d_model=12,
        d_kv=4,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=not bidirectional,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativePositionBias(8, 20, 3, bidirectional=bidirectional)
    ours.bias.weight = torch.nn.Parameter(draw(8, 3))
    theirs.relative_attention_bias.weight = ours.bias.weight
    expected = theirs.compute_bias(5, past + 5, past_seen_tokens=past)
    assert expected.shape == (1, 3, 5, past + 5)
    assert torch.equal(ours(5, past + 5), expected)


def test_position_bias_behind_a_cache_is_the_end_of_the_whole():
    """The biases of the last queries alone are the last rows of those of all queries."""
    bias = RelativePositionBias(16, 64, 2)
    whole = bias(30, 30)
    for queries in (1, 4, 29):
        assert torch.equal(bias(queries, 30), whole[:, :, -queries:])
