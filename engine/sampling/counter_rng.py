"""Random numbers that are a pure function of what they are for.

A draw must be the same on every worker and in every batch, so there is no generator with a state. (seed, sample index,
position) is hashed into a key, and (key, token id) into that token's number. The hash is the output function of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
Stafford's variant 13). For one key, the tokens' numbers are the outputs of one such generator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio, odd: the step between one generator's states
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def key(seed: int, index: int, position: int) -> int:
    """64 bits for one draw: the `position`-th token of output `index` of a request with this seed."""
    state = 0
    for word in (seed, index, position):
        state = _mix((state + (word + 1) * _GOLDEN) & _MASK)
    return state


def uniform(draw_key: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each token id, any shape."""
    # NumPy's integers wrap silently in arrays, which is what is wanted here.
    bits = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(draw_key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gumbel(draw_key: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise for each token id: the token with the largest logit + noise is a draw from the softmax."""
    return -np.log(-np.log(uniform(draw_key, tokens)))


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _MASK
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _MASK
    return bits ^ (bits >> 31)
