"""Rotary positions: queries and keys turned by their places, so that their products tell distances alone.

    angle(place, i) = place * base^(-2i / head_dim) / divisor,   0 <= i < head_dim / 2

The pair of numbers (i, i + head_dim / 2) of each vector is turned by angle(place, i) (Su et al. 2021, section 3.4.2,
with the pairs taken as in GPT-NeoX). May import: config, torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import Rotary


class Rotation(NamedTuple):
    """Cosine and sine of every place's angles, each (seq, head_dim) float32, its two halves equal."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(rotary: Rotary, head_dim: int) -> Tensor:
    """Give how far one place turns each pair: (head_dim / 2,) float32, in radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (rotary.base**exponents) / rotary.divisor


def rotation(frequencies: Tensor, seq: int) -> Rotation:
    """Give the rotation of the places 0 to seq - 1."""
    places = torch.arange(seq, device=frequencies.device).to(torch.float32)
    angles = places[:, None] * frequencies  # (seq, head_dim / 2)
    doubled = torch.cat((angles, angles), dim=-1)
    return Rotation(doubled.cos(), doubled.sin())


def rotate(vectors: Tensor, turned: Rotation) -> Tensor:
    """Turn queries or keys, (batch, heads, seq, head_dim), by their places."""
    half = vectors.shape[-1] // 2
    swapped = torch.cat((-vectors[..., half:], vectors[..., :half]), dim=-1)
    return vectors * turned.cos + swapped * turned.sin
