"""Attention against its definition, written out as loops in numpy."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.attention import (
    MultiHeadAttention,
    merge_heads,
    scaled_dot_product_attention,
    split_heads,
)
from model.masks import additive, padding_mask

# batch, heads, query, key, head_dim
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 5, 5, 4), (1, 1, 2, 7, 3), (3, 5, 6, 1, 7), (2, 4, 9, 9, 8)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(hidden_size: int, heads: int) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(hidden_size, heads)


def mask_of(*lengths: int) -> torch.Tensor:
    """Give the attention mask (batch, seq) of right-padded rows."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def attend_row(
    query: NDArray[np.float64], key: NDArray[np.float64], value: NDArray[np.float64], may_see: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute one query's attention in float64: softmax over the keys that it may see, one by one."""
    scores = [float(query @ key[place]) / np.sqrt(len(query)) for place in range(len(key))]
    powers = [np.exp(score) if seen else 0.0 for score, seen in zip(scores, may_see, strict=True)]
    weights = np.array([power / sum(powers) for power in powers])
    context = sum(weight * value[place] for place, weight in enumerate(weights))
    return np.asarray(context), weights


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_a_loop_over_rows(shape: tuple[int, ...], masked: bool):
    """Context and weights are those of a loop over batch, heads and query rows."""
    batch, heads, queries, keys, width = shape
    query, key, value = (draw(batch, heads, n, width, seed=seed) for seed, n in enumerate((queries, keys, keys)))
    lengths = [1 + row % keys for row in range(batch)] if masked else [keys] * batch
    may_see = np.arange(keys) < np.array(lengths)[:, None]  # (batch, key)
    mask = padding_mask(torch.from_numpy(may_see).long()) if masked else None
    context, weights = scaled_dot_product_attention(query, key, value, mask, scale=width**-0.5)
    assert context.shape == (batch, heads, queries, width)
    assert weights.shape == (batch, heads, queries, keys)
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    for b, h, row in np.ndindex(batch, heads, queries):
        expected_context, expected_weights = attend_row(q[b, h, row], k[b, h], v[b, h], may_see[b])
        np.testing.assert_allclose(weights[b, h, row].numpy(), expected_weights, rtol=0, atol=1e-6)
        np.testing.assert_allclose(context[b, h, row].numpy(), expected_context, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("batch", "seq", "heads", "width"), [(1, 1, 1, 1), (2, 7, 3, 5), (3, 4, 12, 32)])
def test_merge_heads_undoes_split_heads(batch: int, seq: int, heads: int, width: int):
    """Splitting into heads and merging again gives the same numbers, both ways round."""
    hidden = draw(batch, seq, heads * width)
    split = split_heads(hidden, heads)
    assert split.shape == (batch, heads, seq, width)
    assert torch.equal(merge_heads(split), hidden)
    assert torch.equal(split_heads(merge_heads(split), heads), split)


def test_a_head_is_a_run_of_columns():
    """Head number h holds the h-th run of head_dim columns of the hidden axis."""
    hidden = draw(2, 5, 12)
    split = split_heads(hidden, 3)
    for head in range(3):
        assert torch.equal(split[:, head], hidden[:, :, 4 * head : 4 * head + 4])


@pytest.mark.parametrize(("hidden_size", "heads"), [(24, 3), (20, 1), (35, 7), (16, 16)])
def test_all_heads_at_once_equal_one_head_at_a_time(hidden_size: int, heads: int):
    """The stacked projections give what separate heads with slices of the matrices give."""
    attention = seeded(hidden_size, heads)
    hidden, mask = draw(3, 6, hidden_size), padding_mask(mask_of(6, 2, 4))
    width = hidden_size // heads
    contexts, head_weights = [], []
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        query, key, value = (
            hidden @ linear.weight[rows].T + linear.bias[rows]
            for linear in (attention.query, attention.key, attention.value)
        )
        weights = (query @ key.transpose(1, 2) / width**0.5 + additive(mask, torch.float32)[:, 0]).softmax(dim=-1)
        contexts.append(weights @ value)
        head_weights.append(weights)
    expected = torch.cat(contexts, dim=-1) @ attention.output.weight.T + attention.output.bias
    output, weights, _ = attention(hidden, mask, output_attentions=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights, torch.stack(head_weights, dim=1), rtol=0, atol=1e-6)


def test_weights_sum_to_one_and_are_zero_where_masked():
    """Each row of weights sums to 1, and a masked column weighs exactly 0, whatever lies there."""
    hidden = draw(3, 8, 24)
    attention_mask = mask_of(8, 1, 5)
    weights = seeded(24, 3)(hidden, padding_mask(attention_mask), output_attentions=True).weights
    assert weights is not None
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 3, 8))
    masked = (attention_mask == 0)[:, None, None, :].expand_as(weights)
    assert (weights[masked] == 0).all()
    assert (weights[~masked] > 0).all()


def test_what_is_masked_changes_nothing():
    """Other numbers in the masked places leave the other places' outputs as they are, to the bit."""
    attention, mask = seeded(24, 3), padding_mask(mask_of(5, 2))
    first = draw(2, 5, 24)
    second = first.clone()
    second[1, 2:] = 100 * draw(3, 24, seed=1)
    output, other = attention(first, mask)[0], attention(second, mask)[0]
    assert torch.equal(output[0], other[0])
    assert torch.equal(output[1, :2], other[1, :2])


def test_weights_only_when_asked_for():
    """Weights are None unless asked for, and asking leaves the output as it is."""
    attention, hidden = seeded(24, 3), draw(2, 4, 24)
    output, weights, cache = attention(hidden)
    assert weights is None
    assert cache is None
    asked, weights, _ = attention(hidden, output_attentions=True)
    assert weights is not None
    assert torch.equal(output, asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_tokens_is_uniform(dtype: torch.dtype):
    """A fully masked row gives finite numbers: the same weight everywhere, no NaN."""
    attention = seeded(24, 3).to(dtype)
    mask = padding_mask(torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]))
    assert torch.isfinite(additive(mask, dtype)).all()
    for form in (mask, additive(mask, dtype)):
        output, weights, _ = attention(draw(2, 4, 24).to(dtype), form, output_attentions=True)
        assert torch.isfinite(output).all()
        assert weights is not None
        assert (weights[0] == 0.25).all()


def test_a_mask_survives_a_narrower_dtype():
    """A float32 mask that a runtime casts to bfloat16 stays finite."""
    assert torch.isfinite(additive(padding_mask(torch.tensor([[1, 0]])), torch.float32).to(torch.bfloat16)).all()


def test_heads_must_divide_the_hidden_size():
    """A hidden size that does not divide into the heads is an error that names both."""
    with pytest.raises(ValueError, match=r"hidden size 25 is not divisible by 4 heads"):
        MultiHeadAttention(25, 4)


@pytest.mark.parametrize("module", ["attention", "encoder", "embeddings", "masks", "norms"])
def test_nothing_ready_made(module: str):
    """Attention and encoder are our own: built from torch's tensors and plain layers alone."""
    spec = importlib.util.find_spec(f"model.{module}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    roots, foreign_names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            root = (node.module or "").partition(".")[0]
            roots.add(root)
            if root == "torch":
                foreign_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            foreign_names.add(node.attr)
    assert roots <= {"collections", "functools", "math", "model", "torch", "typing"}
    ready_made = {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
    assert not {name for name in foreign_names if name in ready_made or name.startswith(("Multihead", "Transformer"))}
