"""Attention as in "Attention Is All You Need" (Vaswani et al. 2017, section 3.2).

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O
    head_i             = Attention(Q W_i^Q, K W_i^K, V W_i^V)

Shapes use one vocabulary: batch, heads, query (rows), key (columns), head_dim, hidden.
A mask is additive, 0 where a query may look and very negative where it may not.
May import: torch.
"""

import torch
from torch import Tensor, nn


def padding_mask(attention_mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn 1 = token, 0 = padding into an additive mask over the keys.

    Half of the dtype's lowest number masks a column: far enough for a weight of exactly 0, and still
    finite after a score is added to it or after a cast from float32 to bfloat16 (whose largest number is
    a little smaller). A row without any token is therefore uniform, never NaN.

    Shape:
        attention_mask: (batch, key) integers; returns (batch, 1, 1, key) of `dtype`.
    """
    return (1.0 - attention_mask[:, None, None, :].to(dtype)) * (torch.finfo(dtype).min / 2)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T * scale + mask) V, and the weights (section 3.2.1, equation 1).

    Shape:
        query: (batch, heads, query, head_dim); key, value: (batch, heads, key, head_dim)
        mask: broadcasts to (batch, heads, query, key), additive
        returns: context (batch, heads, query, head_dim), weights (batch, heads, query, key)
    """
    scores = query @ key.transpose(-2, -1) * scale  # (batch, heads, query, key)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)  # (batch, heads, query, key), rows sum to 1
    return weights @ value, weights


def split_heads(hidden: Tensor, num_heads: int) -> Tensor:
    """Cut the hidden axis into heads: (batch, seq, hidden) -> (batch, heads, seq, head_dim)."""
    batch, seq, width = hidden.shape
    return hidden.view(batch, seq, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(context: Tensor) -> Tensor:
    """Concatenate the heads: (batch, heads, seq, head_dim) -> (batch, seq, hidden)."""
    return context.transpose(1, 2).flatten(2)


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own subspace (section 3.2.2)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        """Create the four projections.

        Raises:
            ValueError: `hidden_size` is not divisible by `num_heads`.
        """
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden size {hidden_size} is not divisible by {num_heads} heads")
        self.num_heads = num_heads
        self.scale = (hidden_size // num_heads) ** -0.5
        self.query = nn.Linear(hidden_size, hidden_size)  # W^Q of all heads, stacked
        self.key = nn.Linear(hidden_size, hidden_size)  # W^K
        self.value = nn.Linear(hidden_size, hidden_size)  # W^V
        self.output = nn.Linear(hidden_size, hidden_size)  # W^O

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Let every position of `hidden` look at every other.

        Shape:
            hidden: (batch, seq, hidden); mask: additive, broadcasts to (batch, heads, query, key)
            returns: output (batch, seq, hidden), weights (batch, heads, query, key) if asked for
        """
        query = split_heads(self.query(hidden), self.num_heads)  # (batch, heads, query, head_dim)
        key = split_heads(self.key(hidden), self.num_heads)  # (batch, heads, key, head_dim)
        value = split_heads(self.value(hidden), self.num_heads)  # (batch, heads, key, head_dim)
        context, weights = scaled_dot_product_attention(query, key, value, mask, self.scale)
        output = self.output(merge_heads(context))  # (batch, seq, hidden)
        return output, weights if output_attentions else None
