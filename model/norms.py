"""Norms: LayerNorm and its root-mean-square form. May import: config, torch."""

import torch
from torch import Tensor, nn

from model.config import EncoderConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        """Create the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize the last axis."""
        return hidden * torch.rsqrt(hidden.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weight


def make_norm(config: EncoderConfig, width: int) -> nn.Module:
    """Make the config's kind of norm: `layer` (Ba et al. 2016, equation 4) or `rms`."""
    if config.norm == "rms":
        return RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, bias=config.norm_bias)
