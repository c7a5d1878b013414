"""Attention in all its forms, each against another way to compute it, and the laws that all of them keep."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import MultiHeadAttention, fuse_projections, scaled_dot_product_attention, split_heads
from model.masks import RelativePositionBias, causal_mask, padding_mask, window_mask

HEADS, HIDDEN = 3, 24


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(**options: object) -> MultiHeadAttention:
    """Make an attention of 24 numbers and 3 heads with random weights and biases, in evaluation mode."""
    attention = MultiHeadAttention(HIDDEN, HEADS, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(attention.parameters()):
            parameter.copy_(0.3 * draw(*parameter.shape, seed=seed))
    return attention.eval().requires_grad_(requires_grad=False)


# ---------------------------------------------------------------- one head, many heads, one map


@pytest.mark.parametrize("scale", [None, 1.0, 0.37])
def test_one_head_on_raw_arrays(scale: float | None):
    """On plain matrices, without batch or heads, the result is numpy's, with values of a width of their own."""
    query, key, value = draw(4, 3), draw(6, 3, seed=1), draw(6, 2, seed=2)
    context, weights = scaled_dot_product_attention(query, key, value, scale=scale)
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    powers = np.exp(q @ k.T * (3**-0.5 if scale is None else scale))
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(context, expected @ v, rtol=0, atol=1e-6)


def test_heads_in_a_loop_equal_heads_at_once():
    """One matrix after another gives what all batches and heads give at once, with mask, bias and head mask."""
    query, key, value = draw(2, 3, 4, 5), draw(2, 3, 6, 5, seed=1), draw(2, 3, 6, 7, seed=2)
    mask, bias, factors = draw(2, 3, 4, 6, seed=3) > -1, draw(1, 3, 4, 6, seed=4), draw(3, 1, 1, seed=5)
    context, weights = scaled_dot_product_attention(query, key, value, mask, position_bias=bias, head_mask=factors)
    for b, h in np.ndindex(2, 3):
        one, own = scaled_dot_product_attention(
            query[b, h], key[b, h], value[b, h], mask[b, h], position_bias=bias[0, h], head_mask=factors[h]
        )
        torch.testing.assert_close(context[b, h], one, rtol=0, atol=1e-6)
        torch.testing.assert_close(weights[b, h], own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_one_fused_projection_equals_three(bias: bool):
    """One map, its output cut in three, gives the query, key and value of the separate maps."""
    attention, hidden = make(bias=bias, head_dim=5), draw(2, 4, HIDDEN)
    fused = fuse_projections(attention)
    assert (fused.in_features, fused.out_features, fused.bias is not None) == (HIDDEN, 3 * 15, bias)
    parts = fused(hidden).chunk(3, dim=-1)
    for part, separate in zip(parts, (attention.query, attention.key, attention.value), strict=True):
        torch.testing.assert_close(part, separate(hidden), rtol=0, atol=1e-6)
    context, _ = scaled_dot_product_attention(*(split_heads(part, HEADS) for part in parts))
    merged = attention.output(context.transpose(1, 2).reshape(2, 4, 15))
    torch.testing.assert_close(attention(hidden).output, merged, rtol=0, atol=1e-5)


def test_scaling_is_a_factor_of_the_queries():
    """Without scaling, queries that are sqrt(head_dim) times smaller give what scaling gives."""
    scaled, plain = make(), make(scaled=False)
    hidden = draw(2, 5, HIDDEN)
    assert not torch.allclose(scaled(hidden).output, plain(hidden).output, atol=1e-3)
    plain.query.weight /= math.sqrt(HIDDEN // HEADS)
    plain.query.bias /= math.sqrt(HIDDEN // HEADS)
    torch.testing.assert_close(scaled(hidden).output, plain(hidden).output, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- fresh modules, training


@pytest.mark.parametrize("head_dim", [None, 40])
def test_a_fresh_module_is_xavier_initialized(head_dim: int | None):
    """Weights are uniform within sqrt(6 / (fan_in + fan_out)), not narrower; biases are 0."""
    torch.manual_seed(3)
    attention = MultiHeadAttention(96, 4, head_dim=head_dim)
    for linear in (attention.query, attention.key, attention.value, attention.output):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert 0.99 * bound < linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert (linear.bias == 0).all()


def test_dropout_in_training_mode_only():
    """In training some weights become 0 and the others grow by 1 / (1 - p); in evaluation none changes."""
    attention, plain, hidden = make(dropout=0.5), make(), draw(2, 6, HIDDEN)
    expected = plain(hidden, output_attentions=True)
    got = attention(hidden, output_attentions=True)
    assert torch.equal(got.output, expected.output)
    assert torch.equal(got.weights, expected.weights)
    torch.manual_seed(0)
    weights = attention.train()(hidden, output_attentions=True).weights
    dropped = weights == 0
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(weights[~dropped], 2 * expected.weights[~dropped], rtol=0, atol=1e-6)
    assert torch.equal(plain.train()(hidden).output, expected.output)


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pruned", [{0}, {1}, {0, 2}, {1, 2}, set()], ids=str)
def test_pruning_equals_masking(pruned: set[int], bias: bool):
    """A module without some heads gives what it gave with those heads masked, in smaller projections."""
    attention, hidden, mask = (
        make(bias=bias),
        draw(2, 5, HIDDEN),
        padding_mask(torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])),
    )
    kept = [head for head in range(HEADS) if head not in pruned]
    head_mask = torch.tensor([float(head in kept) for head in range(HEADS)])
    masked = attention(hidden, mask, head_mask=head_mask, output_attentions=True)
    assert all((masked.weights[:, head] == 0).all() for head in pruned)
    attention.prune_heads(pruned)
    got = attention(hidden, mask, output_attentions=True)
    width = len(kept) * HIDDEN // HEADS
    assert attention.num_heads == len(kept)
    assert [tuple(part.weight.shape) for part in (attention.query, attention.key, attention.value)] == [
        (width, HIDDEN)
    ] * 3
    assert tuple(attention.output.weight.shape) == (HIDDEN, width)
    torch.testing.assert_close(got.output, masked.output, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.weights, masked.weights[:, kept], rtol=0, atol=1e-5)


def test_pruning_twice():
    """Heads that are left can be pruned again, by their new numbers; a gradient still flows where it did."""
    attention, hidden = make().requires_grad_(), draw(1, 4, HIDDEN)
    expected = attention(hidden, head_mask=torch.tensor([0.0, 0.0, 1.0])).output
    attention.prune_heads({0})
    attention.prune_heads({0})
    torch.testing.assert_close(attention(hidden).output, expected, rtol=0, atol=1e-5)
    assert all(parameter.requires_grad for parameter in attention.parameters())


@pytest.mark.parametrize("heads", [{0, 1, 2}, {3}, {-1}, {0, 7}], ids=str)
def test_pruning_all_or_an_unknown_head_is_refused(heads: set[int]):
    """Pruning every head, or one that is not there, is refused and changes nothing."""
    attention = make()
    with pytest.raises(ValueError, match=r"heads \[.*\] cannot be pruned from 3; one must stay"):
        attention.prune_heads(heads)
    assert attention.num_heads == HEADS
    assert attention.query.out_features == HIDDEN


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 2, 1), (7,)], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_decoding_with_a_cache_equals_the_causal_whole(chunks: tuple[int, ...], relative: bool):
    """Token by token, or some at a time, with cached keys and values: outputs and weights of one causal pass."""
    attention, hidden = make(scaled=not relative), draw(2, 7, HIDDEN)
    bias = RelativePositionBias(8, 20, HEADS, bidirectional=False).requires_grad_(requires_grad=False)
    whole = attention(hidden, causal_mask(7, 7), position_bias=bias(7, 7) if relative else None, output_attentions=True)
    cache, done = attention.empty_cache(2), 0
    for size in chunks:
        end = done + size
        output, weights, cache = attention(
            hidden[:, done:end],
            causal_mask(size, end),
            position_bias=bias(size, end) if relative else None,
            cache=cache,
            output_attentions=True,
        )
        assert cache.key.shape == cache.value.shape == (2, HEADS, end, HIDDEN // HEADS)
        torch.testing.assert_close(output, whole.output[:, done:end], rtol=0, atol=1e-5)
        torch.testing.assert_close(weights, whole.weights[:, :, done:end, :end], rtol=0, atol=1e-5)
        done = end


# ---------------------------------------------------------------- on request


FORMS = {
    "self": {},
    "padding": {"mask": padding_mask(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))},
    "causal": {"mask": causal_mask(4, 4)},
    "window": {"mask": window_mask(4, 4, 1)},
    "cross": {"key_value_states": draw(2, 6, HIDDEN, seed=1)},
    "cache": {"cache": make().empty_cache(2)},
    "bias": {"position_bias": draw(1, HEADS, 4, 4, seed=2)},
    "head mask": {"head_mask": torch.tensor([1.0, 0.0, 0.5])},
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights_only_on_request(form: dict[str, object], training: bool):
    """In every form weights come only when asked for, a cache only when one was given; the output is the same."""
    attention, hidden = make().train(training), draw(2, 4, HIDDEN)
    quiet, asked = attention(hidden, **form), attention(hidden, **form, output_attentions=True)
    assert quiet.weights is None
    assert (quiet.cache is not None) == ("cache" in form)
    assert asked.weights.shape[:3] == (2, HEADS, 4)
    assert torch.equal(quiet.output, asked.output)


# ---------------------------------------------------------------- laws


SIZES = {name: st.integers(1, 5) for name in ("batch", "heads", "queries", "keys", "width")}
law = settings(deadline=None, max_examples=60)


def inputs(*, batch: int, heads: int, queries: int, keys: int, width: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw query, key, value and a mask that lets each query look somewhere."""
    query, key, value = (draw(batch, heads, n, width, seed=seed + i) for i, n in enumerate((queries, keys, keys)))
    mask = draw(batch, 1, queries, keys, seed=seed + 3) > 0
    mask[..., 0] |= ~mask.any(dim=-1)
    return 3 * query, key, value, mask


@law
@given(**SIZES, seed=st.integers(0, 2**20))
def test_rows_sum_to_one_and_masked_columns_are_zero(**drawn: int):
    """Whatever shapes and mask: each row of weights sums to 1, masked columns weigh exactly 0, none is negative."""
    *tensors, mask = inputs(**drawn)
    _, weights = scaled_dot_product_attention(*tensors, mask)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:3]), rtol=0, atol=1e-6)
    assert (weights[~mask.expand_as(weights)] == 0).all()
    assert (weights >= 0).all()


@law
@given(**SIZES, seed=st.integers(0, 2**20))
def test_permuting_the_batch_permutes_the_answer(**drawn: int):
    """The rows of a batch know nothing of each other."""
    tensors = inputs(**drawn)
    order = torch.randperm(drawn["batch"], generator=torch.Generator().manual_seed(drawn["seed"]))
    answers = scaled_dot_product_attention(*tensors)
    permuted = scaled_dot_product_attention(*(tensor[order] for tensor in tensors))
    for answer, other in zip(answers, permuted, strict=True):
        torch.testing.assert_close(answer[order], other, rtol=0, atol=1e-6)


@law
@given(**SIZES, seed=st.integers(0, 2**20), extra=st.integers(1, 4), left=st.booleans())
def test_padding_changes_nothing(extra: int, left: bool, **drawn: int):
    """Masked keys before or behind the others, whatever they hold, leave the answer as it is."""
    query, key, value, mask = inputs(**drawn)
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    padding = 100 * draw(*key.shape[:2], extra, key.shape[3], seed=drawn["seed"])
    forbidden = torch.zeros(*mask.shape[:3], extra, dtype=torch.bool)

    def pad(tensor: torch.Tensor, more: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((more, tensor) if left else (tensor, more), dim=dim)

    padded, more = scaled_dot_product_attention(
        query, pad(key, padding, 2), pad(value, padding, 2), pad(mask, forbidden, 3)
    )
    torch.testing.assert_close(padded, context, rtol=0, atol=1e-5)
    torch.testing.assert_close(more[..., extra:] if left else more[..., :-extra], weights, rtol=0, atol=1e-6)
