"""Rotary position embedding (Su et al., 2021), with the ways of stretching it that our families publish.

All of it is float32, whatever the model's dtype: a position near 10⁵ times a frequency near one needs every bit.
"""

import math

import torch

from engine.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, [rotated / 2] float32."""
    rotated = rope.rotated or head_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    waves = rope.theta**exponents
    match rope.kind:
        case "default":
            return 1.0 / waves
        case "linear":
            return 1.0 / waves / rope.factor
        case "llama3":
            return _stretch_long_waves(1.0 / waves, rope)
        case "yarn":
            return _yarn(waves, rope, rotated)
        case "longrope":
            return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * waves)


def _stretch_long_waves(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Llama 3.1: waves that fit the original context often stay, those that don't fit are stretched by `factor`.

    Between the two limits, counted in turns over the original context, the frequency is blended linearly.
    """
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(waves: torch.Tensor, rope: RopeSpec, rotated: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023): as Llama 3.1, but the blend is linear in the number of the pair, between the pairs that
    turn `beta_fast` and `beta_slow` times over the original context."""

    def pair(turns: float) -> float:
        """The number of the pair that turns so often, as a fraction."""
        return rotated * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    unstretched = 1 - stretched
    return 1.0 / (rope.factor * waves) * (1 - unstretched) + 1.0 / waves * unstretched


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each token's angles times `factor`, both [tokens, 1, rotated / 2] float32; `positions` is
    [tokens]."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] of any float dtype. Of the elements that are rotated, element i turns with element
    i + rotated / 2. Those behind them stay."""
    cos, sin = turn
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    first, second = first.float(), second.float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
