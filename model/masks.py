"""Masks and position biases: what a query may look at, and what it is told of distance.

A boolean mask is True where a query may look. An additive one is 0 there and very negative elsewhere.
All broadcast to (batch, heads, query, key). May import: torch.
"""

import math

import torch
from torch import Tensor, nn


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into an additive one; an additive one stays as it is.

    Half of the dtype's lowest number masks a column: far enough for a weight of exactly 0, and still
    finite after a score is added to it or after a cast from float32 to bfloat16 (whose largest number is
    a little smaller). A row that may look nowhere is therefore uniform, never NaN.
    """
    if mask.dtype != torch.bool:
        return mask
    return (1.0 - mask.to(dtype)) * (torch.finfo(dtype).min / 2)


def padding_mask(attention_mask: Tensor) -> Tensor:
    """Allow keys that are tokens: (batch, key) of 1 = token, 0 = padding -> (batch, 1, 1, key) bool."""
    return (attention_mask != 0)[:, None, None, :]


def causal_mask(query_length: int, key_length: int) -> Tensor:
    """Allow keys up to the query's own place: (query, key) bool (Vaswani et al. 2017, section 3.2.3).

    With more keys than queries the queries are the last ones, as with a cache.
    """
    return _distance(query_length, key_length) <= 0


def window_mask(query_length: int, key_length: int, window: int) -> Tensor:
    """Allow keys at most `window` places away: (query, key) bool (Beltagy et al. 2020, section 3.1)."""
    return _distance(query_length, key_length).abs() <= window


def relative_position_bucket(
    relative_position: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Number the distance from a query to a key (Raffel et al. 2020, section 2.1).

    Near distances have a bucket each; far ones share logarithmically growing buckets up to
    `max_distance`, beyond which all share the last. Bidirectional buckets are halved between the sides;
    otherwise keys ahead of the query share bucket 0.

    Args:
        relative_position: Key place minus query place, int64.
        num_buckets: Buckets in all.
        max_distance: Distance from which on the last bucket holds.
        bidirectional: Whether keys ahead of the query have buckets of their own.

    Returns:
        Bucket numbers from 0, int64, of the same shape.
    """
    offset = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        offset = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(0, max_distance)
    exact = num_buckets // 2
    # Two bounds, since OpenVINO gives 0 for whole numbers that have none above.
    ratio = torch.log(distance.clamp(1, max_distance).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


class RelativePositionBias(nn.Module):
    """A learned number for each bucket of distance and each head, added to the scores."""

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, *, bidirectional: bool = True) -> None:
        """Create the table (buckets, heads)."""
        super().__init__()
        self.bias = nn.Embedding(num_buckets, num_heads)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """Give the biases (1, heads, query, key); fewer queries than keys are the last ones."""
        bucket = relative_position_bucket(
            _distance(query_length, key_length, self.bias.weight.device),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        values: Tensor = self.bias(bucket)  # (query, key, heads)
        return values.permute(2, 0, 1).unsqueeze(0)


def _distance(query_length: int, key_length: int, device: torch.device | None = None) -> Tensor:
    """Give key place minus query place, (query, key) int64."""
    keys = torch.arange(key_length, device=device)
    queries = torch.arange(query_length, device=device) + (key_length - query_length)
    return keys[None, :] - queries[:, None]
