"""The numbers of `counter_rng` in torch, on any device that has int64 and float64.

Integers wrap and shifts are made logical, so all 64 bits are NumPy's. Two logarithms follow. A device may round each of
them otherwise in the last place, which moves a draw only between tokens that tie to 1e-15.
"""

import torch

from engine.sampling import counter_rng


def counters(tokens: torch.Tensor) -> torch.Tensor:
    """Return what a draw's key is added to for each token id (int64, any shape): the same for all draws."""
    return (tokens + 1) * _signed(counter_rng.GOLDEN)


def gumbel(states: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, float64, for `counters` + key. `states` (int64, any shape) is overwritten."""
    for by, factor in counter_rng.ROUNDS:
        states.bitwise_xor_(_shifted(states, by)).mul_(_signed(factor))
    states.bitwise_xor_(_shifted(states, counter_rng.LAST_SHIFT))
    uniform = _shifted(states, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right as if the bits had no sign: torch computes with uint64 on no device."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
