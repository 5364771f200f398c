"""A draw from a whole vocabulary on a CPU, without the noise of every token.

The token with the largest logit + noise wins, and noise is −log(−log u). A token that beats the best score m so far has
−log u < exp(logit − m). Since 1 − u never exceeds −log u, a token with 1 − u above that has lost, whatever its
logarithms are. So all tokens get random bits and one comparison, and only the few that pass get their noise. The result
is that of `counter_rng.gumbel` over the whole vocabulary.

NumPy works on blocks that fit a core's cache: a fifth of the time of whole rows, and no threads of torch.
"""

import math
import sys

import numpy as np
import numpy.typing as npt

from engine.sampling import counter_rng

_FIRST_BLOCK = 4_096  # of tokens; its winner spares most of the others' logarithms
_BLOCK = 32_768
_HIGH = slice(1 if sys.byteorder == "little" else 0, None, 2)  # the upper halves of 64 bits
_SLACK = 32 * math.log(2) + 1e-4
"""Scales exp(logit − m) to the upper 32 bits of 1 − u, and covers what float32 rounds away."""

Row = npt.NDArray[np.float32]


class GumbelArgmax:
    """Owns the arrays that blocks are computed in. Not for several threads at once."""

    def __init__(self) -> None:
        self._states = np.empty(_BLOCK, np.uint64)
        self._shifted = np.empty(_BLOCK, np.uint64)
        self._scaled = np.empty(_BLOCK, np.float32)
        self._bound = np.empty(_BLOCK, np.float32)
        self._high = np.empty(_BLOCK, np.uint32)

    def winner(self, logits: Row, best: int, temperature: float, key: int) -> int:
        """Return the token of the row [vocab] with the largest logit / temperature + noise, of equals the lowest.

        `best` is the likeliest token. A row that is not finite gives any token.
        """
        vocab, largest, divisor = len(logits), logits[best], np.float32(temperature)
        counters = counter_rng.counters(vocab)
        token = best
        score = float(counter_rng.gumbel(key, np.array([best]))[0])
        start, size = 0, min(_FIRST_BLOCK, vocab)
        while start < vocab:
            states, shifted = self._states[:size], self._shifted[:size]
            scaled, bound, high = self._scaled[:size], self._bound[:size], self._high[:size]
            np.add(counters[start : start + size], np.uint64(key), out=states)
            counter_rng.scramble(states, shifted)
            np.subtract(logits[start : start + size], largest, out=scaled)
            np.divide(scaled, divisor, out=scaled)
            np.subtract(scaled, np.float32(score - _SLACK), out=bound)
            np.exp(bound, out=bound)
            np.invert(states.view(np.uint32)[_HIGH], out=high)
            passed = np.flatnonzero(high.astype(np.float32) <= bound)
            if len(passed):
                noisy = scaled[passed].astype(np.float64)
                noisy += counter_rng.gumbel_of(counter_rng.uniform_of(states[passed]))
                place = int(np.argmax(noisy))
                rival = start + int(passed[place])
                if noisy[place] > score or (noisy[place] == score and rival < token):
                    score, token = float(noisy[place]), rival
            start += size
            size = min(_BLOCK, vocab - start)
        return token
