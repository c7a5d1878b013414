"""Long texts: attention without a whole matrix of weights, whose values are those of the whole one.

Global attention goes through the queries in parts, so that the weights of one part are in memory at a time. Local
attention goes by blocks as wide as it reaches: the tokens of a block look at it and at its two neighbours alone, which
is all that is near enough (Beltagy et al. 2020, section 3.1), so it costs seq * reach and not seq * seq.
Both are straight lines of operators, without loops, as short texts' graphs are. May import: masks, torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.masks import additive

PARTS = 32
"""Of global attention: 12 heads over 8,192 tokens take 100 MB a part, where all weights would take 3.2 GB."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Global attention in `PARTS` parts.

    Attributes:
        mask: Additive, (batch, 1, 1, key).
    """

    mask: Tensor

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Give the context (batch, heads, seq, head_dim)."""
        width = (query.shape[2] + PARTS - 1) // PARTS
        turned = key.transpose(-2, -1)
        contexts = []
        for number in range(PARTS):
            part = query[:, :, number * width : (number + 1) * width] * scale
            contexts.append((part @ turned + self.mask).softmax(dim=-1) @ value)
        return torch.cat(contexts, dim=2)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Local attention in blocks.

    Attributes:
        attention_mask: (batch, seq) int64, 1 = token, 0 = padding.
        reach: How many places away a token looks at most, and tokens of a block.
    """

    attention_mask: Tensor
    reach: int

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Give the context (batch, heads, seq, head_dim)."""
        seq = query.shape[2]
        rest = (self.reach - seq % self.reach) % self.reach  # places that fill the last block
        queries = self._blocks(functional.pad(query * scale, (0, 0, 0, rest)))
        keys, values = (self._around(functional.pad(vectors, (0, 0, 0, rest))) for vectors in (key, value))
        weights = (queries @ keys.transpose(-2, -1) + self._mask(rest, query.dtype)).softmax(dim=-1)
        context = (weights @ values).flatten(2, 3)  # (batch, heads, blocks * reach, head_dim)
        return context[:, :, :seq]

    def _blocks(self, vectors: Tensor) -> Tensor:
        """Cut the places into blocks: (..., seq, width) -> (..., blocks, reach, width)."""
        return vectors.view(*vectors.shape[:-2], -1, self.reach, vectors.shape[-1])

    def _around(self, vectors: Tensor) -> Tensor:
        """Give each block's own and its neighbours' places: (..., seq, width) -> (..., blocks, 3 * reach, width)."""
        padded = self._blocks(functional.pad(vectors, (0, 0, self.reach, self.reach)))
        return torch.cat((padded[..., :-2, :, :], padded[..., 1:-1, :, :], padded[..., 2:, :, :]), dim=-2)

    def _mask(self, rest: int, dtype: torch.dtype) -> Tensor:
        """Give the additive mask (batch, 1, blocks, reach, 3 * reach): near enough, a token, and inside the text."""
        kept = functional.pad(self.attention_mask.to(dtype), (0, rest))[:, None, :, None]  # (batch, 1, seq, 1)
        around = self._around(kept).transpose(-2, -1) > 0  # (batch, 1, blocks, 1, 3 * reach)
        places = torch.arange(self.reach, device=kept.device)
        others = torch.arange(3 * self.reach, device=kept.device) - self.reach
        near = (others[None, :] - places[:, None]).abs() <= self.reach
        return additive(around & near, dtype)
