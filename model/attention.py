"""Attention as in "Attention Is All You Need" (Vaswani et al. 2017, section 3.2), in all its usual forms.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k) + mask) V
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O
    head_i             = Attention(Q W_i^Q, K W_i^K, V W_i^V)

Shapes use one vocabulary: batch, heads, query (rows), key (columns), head_dim, hidden.
A boolean mask says where a query may look (True); an additive one is added to the scores. Masks, like
position biases, broadcast to (batch, heads, query, key). May import: masks, rotary, torch.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.masks import additive
from model.rotary import Rotation, rotate


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(Q K^T * scale + position_bias + mask), the first factor of section 3.2.1, equation 1.

    Args:
        query: (..., query, head_dim); the leading axes, if any, are batch and heads.
        key: (..., key, head_dim).
        mask: Boolean (True = may look) or additive.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        position_bias: Added to the scores before the mask.

    Returns:
        The weights (..., query, key); rows sum to 1.

    Raises:
        ValueError: Axes that do not fit, by their names.
    """
    _check_axes(query, key, key)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    for name, term in (("position_bias", position_bias), ("mask", mask)):
        if term is not None:
            _check_broadcast(name, term, scores)
            _check_kind(name, term)
            scores = scores + additive(term, scores.dtype)
    return scores.softmax(dim=-1)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    position_bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T * scale + position_bias + mask) V (section 3.2.1, equation 1).

    Args:
        query: As `attention_weights` takes it, and so are key, mask, scale and position_bias.
        key: (..., key, head_dim).
        value: (..., key, value_dim).
        mask: Boolean (True = may look) or additive.
        scale: Factor of the scores; 1 / sqrt(head_dim) when None.
        position_bias: Added to the scores before the mask.
        head_mask: Factor of each head's weights, (heads, 1, 1) or anything that broadcasts.
        dropout: Share of weights that is dropped; 0 outside of training.

    Returns:
        The context (..., query, value_dim) and the weights (..., query, key).

    Raises:
        ValueError: Axes that do not fit, by their names.
    """
    _check_axes(query, key, value)
    weights = attention_weights(query, key, mask, scale=scale, position_bias=position_bias)
    if dropout:
        weights = functional.dropout(weights, dropout)
    if head_mask is not None:
        _check_broadcast("head_mask", head_mask, weights)
        weights = weights * head_mask
    return weights @ value, weights


def split_heads(hidden: Tensor, num_heads: int) -> Tensor:
    """Cut the hidden axis into heads: (batch, seq, hidden) -> (batch, heads, seq, head_dim)."""
    batch, seq, width = hidden.shape
    return hidden.view(batch, seq, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(context: Tensor) -> Tensor:
    """Concatenate the heads: (batch, heads, seq, head_dim) -> (batch, seq, hidden)."""
    return context.transpose(1, 2).flatten(2)


class Attend(Protocol):
    """A way to compute the context of queries, keys and values without all of the weights at once."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Give softmax(Q K^T * scale + ...) V, all (batch, heads, seq, head_dim)."""
        ...


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far, each (batch, heads, key, head_dim)."""

    key: Tensor
    value: Tensor


class AttentionOutput(NamedTuple):
    """What one attention yields.

    Attributes:
        output: (batch, query, hidden).
        weights: (batch, heads, query, key), None unless asked for.
        cache: Keys and values with this call's own appended, None unless a cache was given.
    """

    output: Tensor
    weights: Tensor | None
    cache: KeyValueCache | None


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own subspace (section 3.2.2)."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        scaled: bool = True,
        dropout: float = 0.0,
    ) -> None:
        """Create the four projections, Xavier-initialized (Glorot and Bengio 2010, equation 16).

        Args:
            hidden_size: Width of the inputs and of the output.
            num_heads: Heads.
            head_dim: Width of one head; hidden_size / num_heads when None.
            bias: Whether the projections have one.
            scaled: Whether scores are divided by sqrt(head_dim); T5 leaves it to the weights.
            dropout: Share of attention weights dropped in training mode.

        Raises:
            ValueError: `hidden_size` is not divisible by `num_heads` and no `head_dim` is given.
        """
        super().__init__()
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden size {hidden_size} is not divisible by {num_heads} heads")
        self.num_heads = num_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = self.head_dim**-0.5 if scaled else 1.0
        self.dropout = dropout
        inner_size = num_heads * self.head_dim
        self.query = nn.Linear(hidden_size, inner_size, bias)  # W^Q of all heads, stacked
        self.key = nn.Linear(hidden_size, inner_size, bias)  # W^K
        self.value = nn.Linear(hidden_size, inner_size, bias)  # W^V
        self.output = nn.Linear(inner_size, hidden_size, bias)  # W^O
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            if bias:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        *,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        head_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        rotation: Rotation | None = None,
        attend: Attend | None = None,
        output_attentions: bool = False,
    ) -> AttentionOutput:
        """Let every position of `hidden` look at every other, or at those of `key_value_states`.

        Args:
            hidden: (batch, query, hidden).
            mask: Boolean or additive, broadcasts to (batch, heads, query, key).
            key_value_states: (batch, key, hidden) for cross-attention; `hidden` itself when None.
            position_bias: Added to the scores, broadcasts likewise.
            head_mask: (heads,), a factor of each head's weights; 0 silences a head.
            cache: Keys and values of earlier tokens, to which this call's are appended.
            rotation: Turns queries and keys by their places.
            attend: Computes the context in place of the whole matrix of weights, mask included.
            output_attentions: Whether the weights are wanted.
        """
        self._check_inputs(hidden, key_value_states, head_mask, cache)
        source = hidden if key_value_states is None else key_value_states
        query, key = self.queries_and_keys(hidden, source, rotation)
        value = split_heads(self.value(source), self.num_heads)  # (batch, heads, key, head_dim)
        if cache is not None:
            cache = KeyValueCache(torch.cat((cache.key, key), dim=2), torch.cat((cache.value, value), dim=2))
            key, value = cache
        if attend is not None:
            return AttentionOutput(self.output(merge_heads(attend(query, key, value, self.scale))), None, cache)
        context, weights = scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            scale=self.scale,
            position_bias=position_bias,
            head_mask=None if head_mask is None else head_mask.view(-1, 1, 1),
            dropout=self.dropout if self.training else 0.0,
        )
        output = self.output(merge_heads(context))  # (batch, query, hidden)
        return AttentionOutput(output, weights if output_attentions else None, cache)

    def queries_and_keys(
        self, hidden: Tensor, source: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Project what looks, and what is looked at, as they are multiplied.

        Shape:
            hidden: (batch, query, hidden); source: (batch, key, hidden)
            returns: (batch, heads, query, head_dim), (batch, heads, key, head_dim)
        """
        query, key = split_heads(self.query(hidden), self.num_heads), split_heads(self.key(source), self.num_heads)
        return (query, key) if rotation is None else (rotate(query, rotation), rotate(key, rotation))

    def _check_inputs(
        self, hidden: Tensor, source: Tensor | None, head_mask: Tensor | None, cache: KeyValueCache | None
    ) -> None:
        """Refuse shapes that do not fit, by the axes' names."""
        if _tracing():
            return
        width = self.query.in_features
        for name, tensor in (("hidden", hidden), ("key_value_states", source)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[2] != width):
                raise ValueError(f"{name} must be (batch, seq, hidden={width}), got {tuple(tensor.shape)}")
        if head_mask is not None and head_mask.shape != (self.num_heads,):
            raise ValueError(f"head_mask must be (heads={self.num_heads},), got {tuple(head_mask.shape)}")
        batch = len(hidden)
        for name, tensor in () if cache is None else (("key", cache.key), ("value", cache.value)):
            if tensor.dim() != 4 or (*tensor.shape[:2], tensor.shape[3]) != (batch, self.num_heads, self.head_dim):
                wanted = f"(batch={batch}, heads={self.num_heads}, key, head_dim={self.head_dim})"
                raise ValueError(f"the cache's {name} must be {wanted}, got {tuple(tensor.shape)}")

    def empty_cache(self, batch: int) -> KeyValueCache:
        """Give the cache of a sequence that has not begun."""
        nothing = self.key.weight.new_zeros(batch, self.num_heads, 0, self.head_dim)
        return KeyValueCache(nothing, nothing)

    def prune_heads(self, heads: set[int]) -> None:
        """Remove heads for good; the module then computes what masking them computed (Michel et al. 2019).

        Raises:
            ValueError: A head that is not there, or all of them.
        """
        kept = [head for head in range(self.num_heads) if head not in heads]
        if not kept or not heads <= set(range(self.num_heads)):
            raise ValueError(f"heads {sorted(heads)} cannot be pruned from {self.num_heads}; one must stay")
        rows = torch.cat([torch.arange(head * self.head_dim, (head + 1) * self.head_dim) for head in kept])
        for name in ("query", "key", "value"):
            projection: nn.Linear = getattr(self, name)
            bias = None if projection.bias is None else projection.bias[rows]
            setattr(self, name, _linear(projection.weight[rows], bias))
        self.output = _linear(self.output.weight[:, rows], self.output.bias)
        self.num_heads = len(kept)


def fuse_projections(attention: MultiHeadAttention) -> nn.Linear:
    """Stack W^Q, W^K and W^V into one map: its output, cut in three along the last axis, is theirs."""
    parts = (attention.query, attention.key, attention.value)
    bias = None if attention.query.bias is None else torch.cat([part.bias for part in parts])
    return _linear(torch.cat([part.weight for part in parts]), bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear map of given numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear


def _check_axes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse shapes that do not fit, by the axes' names."""
    if _tracing():
        return
    if query.dim() < 2 or query.dim() != key.dim() or query.dim() != value.dim():
        raise ValueError(
            "query, key and value must have the same number of axes, (..., seq, head_dim): "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    for axis, a, b in (
        ("batch and heads of query and key", query.shape[:-2], key.shape[:-2]),
        ("batch and heads of key and value", key.shape[:-2], value.shape[:-2]),
        ("head_dim of query and key", query.shape[-1], key.shape[-1]),
        ("key axis of key and value", key.shape[-2], value.shape[-2]),
    ):
        if a != b:
            raise ValueError(f"{axis} must be equal, got {_plain(a)} and {_plain(b)}")


def _check_broadcast(name: str, term: Tensor, scores: Tensor) -> None:
    """Refuse a mask or bias that does not broadcast to the scores."""
    if _tracing():
        return
    axes = ("batch", "heads", "query", "key")[-scores.dim() :]
    if term.dim() > scores.dim():
        raise ValueError(f"{name} has {term.dim()} axes, the scores ({', '.join(axes)}) have {scores.dim()}")
    for axis, size, wanted in zip(reversed(axes), reversed(term.shape), reversed(scores.shape), strict=False):
        if size not in (1, wanted):
            raise ValueError(f"{name} has {size} on the {axis} axis, the scores have {wanted}; 1 would broadcast")


def _check_kind(name: str, term: Tensor) -> None:
    """Refuse whole numbers, a tokenizer's attention mask for instance, which would be added as they are."""
    if term.dtype != torch.bool and not term.is_floating_point():
        raise ValueError(f"{name} must be boolean (True = may look) or floating point (added), got {term.dtype}")


def _tracing() -> bool:
    """Tell whether a graph is being traced, which records numbers and cannot record questions."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def _plain(axis: torch.Size | int) -> object:
    return tuple(axis) if isinstance(axis, torch.Size) else axis
