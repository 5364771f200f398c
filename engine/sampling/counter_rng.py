"""Random numbers that are a pure function of what they are for.

A draw must be the same on every worker and in every batch, so there is no generator with a state. (seed, sample index,
position) is hashed into a key, and (key, token id) into that token's number. The hash is the output function of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
Stafford's variant 13). For one key, the tokens' numbers are the outputs of one such generator.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio, odd: the step between one generator's states
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift and factor
LAST_SHIFT = 31
_MASK = (1 << 64) - 1


def key(seed: int, index: int, position: int) -> int:
    """64 bits for one draw: the `position`-th token of output `index` of a request with this seed."""
    state = 0
    for word in (seed, index, position):
        state = _mix((state + (word + 1) * GOLDEN) & _MASK)
    return state


def keys(seeds: Sequence[int], indexes: Sequence[int], positions: Sequence[int]) -> Words:
    """The keys of many draws at once, one for each place in the sequences."""
    state = np.zeros(len(seeds), np.uint64)
    for words in (seeds, indexes, positions):
        mixed = state + (np.array(words, np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        state = scramble(mixed, np.empty_like(mixed))
    return state


@lru_cache(maxsize=2)
def counters(count: int) -> Words:
    """What a draw's key is added to, for the token ids below `count`. Read-only: all callers share it."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    numbers.flags.writeable = False
    return numbers


def scramble(states: Words, room: Words) -> Words:
    """Turn `counters` + key into random bits, in place. `room` is of the same shape."""
    for by, factor in ROUNDS:
        np.right_shift(states, np.uint64(by), out=room)
        np.bitwise_xor(states, room, out=states)
        np.multiply(states, np.uint64(factor), out=states)
    np.right_shift(states, np.uint64(LAST_SHIFT), out=room)
    return np.bitwise_xor(states, room, out=states)


def uniform_of(bits: Words) -> npt.NDArray[np.float64]:
    """The number in the open interval (0, 1) that random bits stand for."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def uniform(draw_key: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each token id, any shape."""
    # NumPy's integers wrap silently in arrays, which is what is wanted here.
    states = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(draw_key)
    return uniform_of(scramble(states, np.empty_like(states)))


def gumbel(draw_key: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise for each token id: the token with the largest logit + noise is a draw from the softmax."""
    return gumbel_of(uniform(draw_key, tokens))


def gumbel_of(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Gumbel noise of numbers in (0, 1)."""
    return -np.log(-np.log(numbers))


def _mix(bits: int) -> int:
    for by, factor in ROUNDS:
        bits = ((bits ^ (bits >> by)) * factor) & _MASK
    return bits ^ (bits >> LAST_SHIFT)
