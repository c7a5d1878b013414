"""Pooling: from the hidden states of a sequence to one vector, exact under padding.

Defined once; the exported graphs carry every form as an output of its own, so a request may choose.
May import: torch.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def cls_pooling(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Take the first token's vector (BERT's [CLS]; Devlin et al. 2018, section 3)."""
    return _take(hidden, attention_mask.argmax(dim=1))


def last_pooling(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Take the last token's vector, wherever padding begins."""
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)  # (seq,)
    return _take(hidden, (attention_mask * places).argmax(dim=1))


def mean_pooling(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Average the tokens' vectors (Reimers and Gurevych 2019, section 3); zeros without tokens."""
    kept = attention_mask.unsqueeze(-1).to(hidden.dtype)  # (batch, seq, 1)
    return (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


def max_pooling(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Take each dimension's largest value over the tokens (Reimers and Gurevych 2019, section 3)."""
    padded = attention_mask.unsqueeze(-1) == 0  # (batch, seq, 1)
    return hidden.masked_fill(padded, torch.finfo(hidden.dtype).min / 2).amax(dim=1)


def _take(hidden: Tensor, index: Tensor) -> Tensor:
    """Pick one position a sequence: (batch, seq, hidden), (batch,) -> (batch, hidden)."""
    expanded = index[:, None, None].expand(-1, 1, hidden.shape[2])  # (batch, 1, hidden)
    return hidden.gather(1, expanded).squeeze(1)


# Each maps hidden (batch, seq, hidden) and attention_mask (batch, seq) to (batch, hidden).
POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls_pooling,
    "mean": mean_pooling,
    "max": max_pooling,
    "last": last_pooling,
}
