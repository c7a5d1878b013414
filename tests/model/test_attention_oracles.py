"""Attention against transformers' own T5Attention and BartAttention with the same weights; what is refused."""

from typing import Any

import pytest
import torch
from transformers import BartConfig, DynamicCache, T5Config
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.t5.modeling_t5 import T5Attention

from model.attention import MultiHeadAttention, scaled_dot_product_attention
from model.masks import RelativePositionBias, additive, causal_mask, padding_mask

HEADS, HIDDEN, HEAD_DIM = 3, 24, 5
SOURCE_MASK = padding_mask(torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]))  # keys of another sequence


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomize(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * draw(*parameter.shape, seed=seed))


def copy(ours: MultiHeadAttention, query: Any, key: Any, value: Any, output: Any) -> MultiHeadAttention:
    """Give ours the four maps of another implementation."""
    for name, linear in {"query": query, "key": key, "value": value, "output": output}.items():
        getattr(ours, name).load_state_dict(linear.state_dict())
    return ours.eval().requires_grad_(requires_grad=False)


class Bart:
    """BART's attention and ours with the same weights: scaled scores, biases."""

    def __init__(self) -> None:
        config = BartConfig(d_model=HIDDEN)
        config._attn_implementation = "eager"
        self.theirs = BartAttention(HIDDEN, HEADS, is_decoder=True, config=config, layer_idx=0).eval()
        self.theirs.requires_grad_(requires_grad=False)
        randomize(self.theirs)
        parts = (self.theirs.q_proj, self.theirs.k_proj, self.theirs.v_proj, self.theirs.out_proj)
        self.ours = copy(MultiHeadAttention(HIDDEN, HEADS), *parts)

    def expected(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.theirs(hidden, attention_mask=None if mask is None else additive(mask, torch.float32), **more)

    def bias(self, queries: int, keys: int) -> None:
        """BART tells attention nothing of distance."""


class T5:
    """T5's attention and ours with the same weights: no scaling, no biases, heads of a width of their own."""

    def __init__(self, *, relative: bool = True) -> None:
        config = T5Config(
            d_model=HIDDEN,
            d_kv=HEAD_DIM,
            num_heads=HEADS,
            is_decoder=True,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
        )
        config._attn_implementation = "eager"
        self.theirs = T5Attention(config, has_relative_attention_bias=relative, layer_idx=0).eval()
        self.theirs.requires_grad_(requires_grad=False)
        randomize(self.theirs)
        ours = MultiHeadAttention(HIDDEN, HEADS, head_dim=HEAD_DIM, bias=False, scaled=False)
        self.ours = copy(ours, self.theirs.q, self.theirs.k, self.theirs.v, self.theirs.o)
        self.table = RelativePositionBias(8, 20, HEADS, bidirectional=False) if relative else None
        if self.table is not None:
            self.table.bias.weight = self.theirs.relative_attention_bias.weight

    def expected(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, _, weights = self.theirs(hidden, mask=None if mask is None else additive(mask, torch.float32), **more)
        return output, weights

    def bias(self, queries: int, keys: int) -> torch.Tensor | None:
        return None if self.table is None else self.table(queries, keys)


PAIRS = {"bart": Bart, "t5": T5, "t5 without bias": lambda: T5(relative=False)}
pairs = pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)


def assert_same(got: Any, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got.output, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(got.weights, expected[1], rtol=0, atol=1e-5)


@pairs
@pytest.mark.parametrize(
    "mask",
    [None, causal_mask(6, 6), SOURCE_MASK, SOURCE_MASK & causal_mask(6, 6)],
    ids=["unmasked", "causal", "padding", "padding and causal"],
)
def test_self_attention(make: Any, mask: torch.Tensor | None):
    """Outputs and weights of self-attention are transformers' to 1e-5."""
    pair, hidden = make(), draw(2, 6, HIDDEN)
    got = pair.ours(hidden, mask, position_bias=pair.bias(6, 6), output_attentions=True)
    assert_same(got, pair.expected(hidden, mask))


@pytest.mark.parametrize("make", [Bart, lambda: T5(relative=False)], ids=["bart", "t5"])
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention(make: Any, masked: bool):
    """Queries of one sequence look at keys of another with its own padding, as in transformers, to 1e-5."""
    pair, hidden, source = make(), draw(2, 4, HIDDEN), draw(2, 6, HIDDEN, seed=1)
    mask = SOURCE_MASK if masked else None
    got = pair.ours(hidden, mask, key_value_states=source, output_attentions=True)
    assert got.weights.shape == (2, HEADS, 4, 6)
    assert_same(got, pair.expected(hidden, mask, key_value_states=source))


@pairs
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (3, 1, 1), (2, 3)], ids=str)
def test_decoding_with_a_cache(make: Any, chunks: tuple[int, ...]):
    """Each step of incremental decoding gives what transformers gives with its own cache, to 1e-5."""
    pair, hidden = make(), draw(2, 5, HIDDEN)
    cache, theirs, done = pair.ours.empty_cache(2), DynamicCache(), 0
    for size in chunks:
        end = done + size
        mask = causal_mask(size, end)
        got = pair.ours(
            hidden[:, done:end], mask, position_bias=pair.bias(size, end), cache=cache, output_attentions=True
        )
        assert_same(got, pair.expected(hidden[:, done:end], mask, cache=theirs))
        cache, done = got.cache, end
        torch.testing.assert_close(cache.key, theirs.layers[0].keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(cache.value, theirs.layers[0].values, rtol=0, atol=1e-5)


@pairs
@pytest.mark.parametrize("factors", [(0.0, 1.0, 1.0), (1.0, 0.5, 0.0)], ids=str)
def test_head_masks(make: Any, factors: tuple[float, ...]):
    """A head's factor does what scaling its columns of transformers' output map does, to 1e-5."""
    pair, hidden = make(), draw(2, 6, HIDDEN)
    got = pair.ours(hidden, head_mask=torch.tensor(factors), position_bias=pair.bias(6, 6), output_attentions=True)
    output = pair.theirs.o if isinstance(pair, T5) else pair.theirs.out_proj
    output.weight *= torch.tensor(factors).repeat_interleave(pair.ours.head_dim)
    expected, weights = pair.expected(hidden, None)
    assert_same(got, (expected, weights * torch.tensor(factors).view(-1, 1, 1)))


@pairs
def test_pruned_heads(make: Any):
    """With a head pruned the output is transformers' with that head's columns of the output map at 0, to 1e-5."""
    pair, hidden = make(), draw(2, 6, HIDDEN)
    pair.ours.prune_heads({1})
    bias = pair.bias(6, 6)
    got = pair.ours(hidden, position_bias=None if bias is None else bias[:, [0, 2]], output_attentions=True)
    output = pair.theirs.o if isinstance(pair, T5) else pair.theirs.out_proj
    output.weight *= torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(pair.ours.head_dim)
    expected, weights = pair.expected(hidden, None)
    assert_same(got, (expected, weights[:, [0, 2]]))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("query", "key", "value", "named"),
    [
        ((3,), (3,), (3,), r"same number of axes, \(\.\.\., seq, head_dim\): got \(3,\)"),
        ((2, 4, 3), (4, 3), (4, 3), "same number of axes"),
        ((4, 3), (4, 3), (1, 4, 3), "same number of axes"),
        ((2, 4, 3), (1, 4, 3), (1, 4, 3), r"batch and heads of query and key must be equal, got \(2,\) and \(1,\)"),
        ((2, 3, 4, 5), (2, 3, 4, 5), (2, 1, 4, 5), r"batch and heads of key and value .* \(2, 3\) and \(2, 1\)"),
        ((4, 3), (4, 2), (4, 3), "head_dim of query and key must be equal, got 3 and 2"),
        ((4, 3), (5, 3), (6, 3), "key axis of key and value must be equal, got 5 and 6"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], named: str):
    """Query, key and value that do not fit are refused by the names of the axes."""
    with pytest.raises(ValueError, match=named):
        scaled_dot_product_attention(draw(*query), draw(*key), draw(*value))


@pytest.mark.parametrize("form", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mask", "position_bias"])
@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((3, 1, 1, 6), "has 3 on the batch axis, the scores have 2; 1 would broadcast"),
        ((2, 2, 1, 6), "has 2 on the heads axis, the scores have 3"),
        ((5, 6), "has 5 on the query axis, the scores have 4"),
        ((2, 1, 1, 4), "has 4 on the key axis, the scores have 6"),
        ((1, 2, 3, 4, 6), r"has 5 axes, the scores \(batch, heads, query, key\) have 4"),
    ],
    ids=str,
)
def test_masks_that_do_not_broadcast(shape: tuple[int, ...], named: str, name: str, form: torch.dtype):
    """A mask or bias that does not broadcast is refused by its name and the axis."""
    term = torch.ones(shape, dtype=form)
    with pytest.raises(ValueError, match=f"^{name} {named}"):
        scaled_dot_product_attention(draw(2, 3, 4, 5), draw(2, 3, 6, 5), draw(2, 3, 6, 5), **{name: term})


def test_a_hidden_size_that_heads_do_not_divide():
    """A hidden size that is not divisible by the heads is refused with both; a width of one head's own is taken."""
    with pytest.raises(ValueError, match="hidden size 25 is not divisible by 3 heads"):
        MultiHeadAttention(25, 3)
    assert MultiHeadAttention(25, 3, head_dim=4)(draw(1, 2, 25)).output.shape == (1, 2, 25)


def test_another_sequence_of_another_batch():
    """Cross-attention to a batch of another size is refused by the axis."""
    with pytest.raises(ValueError, match="batch and heads of query and key must be equal"):
        MultiHeadAttention(HIDDEN, HEADS)(draw(2, 4, HIDDEN), key_value_states=draw(1, 4, HIDDEN))
