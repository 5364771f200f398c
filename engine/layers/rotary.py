"""Rotary position embedding (Su et al., 2021), with the two ways of stretching it that our families publish.

All of it is float32, whatever the model's dtype: a position near 10⁵ times a frequency near one needs every bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the wavelengths of the rotations, and how they are stretched for long contexts."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _stretch_long_waves(frequencies, rope)


def _stretch_long_waves(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: waves that fit the original context often stay, those that don't fit are stretched by `factor`.

    Between the two limits, counted in turns over the original context, the frequency is blended linearly.
    """
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each token's angles, both [tokens, 1, head_dim / 2] float32; `positions` is [tokens]."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] of any float dtype, element i rotated with element i + head_dim / 2."""
    cos, sin = turn
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
