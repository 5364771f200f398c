"""How long a step of the engine takes, learned from the steps that were run.

    seconds = a  +  b · prompt tokens  +  c · decoding rows  +  d · pairs

A *row* is a sequence that gets one token. A *pair* is a prompt token and one earlier position that it attends to, which
is what makes the end of a long prompt slower than its beginning. No coefficient is ever negative.

Least squares, small steps counting as much as large ones and older ones exponentially less. What the recent steps say
nothing about stays as it was: each estimate is the one nearest to the last (a proximal term), so a thousand steps
without a prompt do not forget what prompts cost.

A step that took several times what was expected, because the process stood still, is set aside. A few of them in a row
are believed: the machine has changed. Nothing makes a step too fast, so one that was far faster is believed at once.

Pure: the times are given.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_Vector = npt.NDArray[np.float64]

_UNITS = np.array([1.0, 256.0, 16.0, 256.0 * 1024.0])  # what counts as one: makes the coefficients comparable
_TOKENS, _ROWS, _PAIRS = 1, 2, 3
_KEEP = 0.95  # weight of a step beside the one after it: some twenty steps are remembered
_NEAR = 0.02  # how much the last estimate counts, in steps
_FAR = 3.0  # times the expected time, or a part of it: this is no noise
_BELIEVED = 3  # slow steps in a row are no accident
_OUTDATED = 0.1  # weight of what was known once it has turned out wrong


class StepPace:
    """The fit. Knows nothing until the first `observe`."""

    def __init__(self) -> None:
        self._cost: _Vector = np.zeros(4)  # seconds per unit
        self._seen = np.zeros(4, dtype=np.bool_)  # what any step so far had some of
        self._moments: npt.NDArray[np.float64] = np.zeros((4, 4))
        self._products: _Vector = np.zeros(4)
        self.largest = 0  # prompt tokens of the largest step so far; what is said of far larger ones is a guess
        self._slow = 0  # steps in a row that took far longer than expected

    def observe(self, tokens: int, rows: int, seconds: float, pairs: int = 0) -> None:
        """A step of `tokens` prompt tokens, attending to `pairs` earlier positions in all, and `rows` decoding
        sequences took `seconds`. Steps of nothing and times that are not positive teach nothing."""
        if tokens + rows <= 0 or not 0 < seconds < math.inf:
            return
        step = np.array([1.0, tokens, rows, pairs]) / _UNITS
        size = math.sqrt(float(step @ step))
        step, seconds = step / size, seconds / size
        new = tokens > self.largest or not self._seen[step > 0].all()  # nothing can be expected of it
        if not new and not self._believes(seconds, float(self._cost @ step)):
            return
        self._seen |= step > 0
        self.largest = max(self.largest, tokens)
        self._moments = self._moments * _KEEP + np.outer(step, step)
        self._products = self._products * _KEEP + seconds * step
        self._cost = _least_squares(self._moments + _NEAR * np.eye(4), self._products + _NEAR * self._cost)

    def seconds(self, tokens: int, rows: int = 0, pairs: int = 0) -> float:
        """What such a step would take; 0 before the first has been observed."""
        return float(self._cost @ (np.array([1.0, tokens, rows, pairs]) / _UNITS))

    def tokens_within(self, seconds: float, rows: int = 0, context: int = 0) -> int | None:
        """How many prompt tokens, each attending to `context` earlier positions, a step with `rows` decoding sequences
        may have to take no longer than `seconds`; 0 if it takes longer anyhow. None while nothing is known that bounds
        them: no step with prompt tokens has been observed."""
        if not self._seen[_TOKENS]:
            return None
        each = (self._cost[_TOKENS] + self._cost[_PAIRS] * context * _UNITS[_TOKENS] / _UNITS[_PAIRS]) / _UNITS[_TOKENS]
        if each <= 0:
            return None
        return max(0, int((seconds - self.seconds(0, rows)) / each))

    def _believes(self, seconds: float, expected: float) -> bool:
        """Whether this time is to be learnt from. Where it shows that the machine has changed, what was known before
        counts little from now on."""
        self._slow = self._slow + 1 if seconds > _FAR * expected else 0
        if 0 < self._slow < _BELIEVED:
            return False
        if self._slow or seconds < expected / _FAR:
            self._slow = 0
            self._moments *= _OUTDATED
            self._products *= _OUTDATED
        return True


def _least_squares(moments: npt.NDArray[np.float64], products: _Vector) -> _Vector:
    """The minimum of xᵀ·moments·x / 2 − productsᵀ·x over x ≥ 0, near enough: what comes out negative is held at 0 and
    the rest solved again."""
    free = np.ones(len(products), dtype=np.bool_)
    while True:
        cost = np.zeros(len(products))
        cost[free] = np.linalg.solve(moments[np.ix_(free, free)], products[free])
        if cost.min() >= 0:
            return cost
        free &= cost > 0
