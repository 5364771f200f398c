"""How many times as long a step takes with more rows, learned from steps that follow each other.

Two steps in a row of the same sequences differ in little but their proposals. So the quotient of their seconds is what
the rows cost on this machine. The fit of all steps can't tell: while all steps have one row each, nothing says which
part of their seconds is a row's.

The curve is exp of a sum of rises, one between each two knots. It begins as a fit has it. A pair of steps moves the
rises between their two numbers of rows, and no others, so more rows keep their price beside these. Pure.
"""

# pyright: strict

import math
from bisect import bisect_left
from itertools import accumulate, pairwise

from baton.step_cost_model import StepCoefficients

_KNOTS = (*range(1, 8), *(octave * quarter for octave in (2 << n for n in range(11)) for quarter in (4, 5, 6, 7)))
_NEWEST = 0.3  # weight of the newest pair
_FAR = 0.5  # of an exponent: a pair that is further off than that has another cause
_LEAST = 1e-3  # of an exponent: a rise so small can still be found to be larger


class RowCurve:
    """Seconds of steps by their rows, in proportion to each other."""

    def __init__(self, cost: StepCoefficients) -> None:
        """`cost`: what is known at first."""
        seconds = [cost.fixed + cost.row * knot or 1.0 for knot in _KNOTS]
        self._rises = [math.log(longer / shorter) for shorter, longer in pairwise(seconds)]
        self._heights = [0.0, *accumulate(self._rises)]
        self._longer: dict[tuple[int, int], list[tuple[int, float]]] = {}  # what was asked for since the last change
        self._last: tuple[int, int, float] | None = None

    def times(self, rows: int, before: int) -> float:
        """How many times as long a step of `rows` takes as one of `before`."""
        return 1.0 if rows == before else math.exp(self._height(rows) - self._height(before))

    def longer(self, before: int, most: int) -> list[tuple[int, float]]:
        """Return numbers of rows above `before`, up to `most`, and how many times as long steps of these take: all
        small numbers, of large ones some."""
        if (lengths := self._longer.get((before, most))) is None:
            knots = _KNOTS[bisect_left(_KNOTS, before + 1) : bisect_left(_KNOTS, most)]
            sizes = [*knots, most] if most > before else []
            lengths = self._longer[before, most] = [(rows, self.times(rows, before)) for rows in sizes]
        return lengths

    def observe(self, sequences: int, rows: int, seconds: float) -> None:
        """A step of so many sequences and rows, without prompts, followed the one observed before."""
        last, self._last = self._last, (sequences, rows, seconds)
        if last is None or last[0] != sequences or last[1] == rows or seconds <= 0 or last[2] <= 0:
            return
        (fewer, shorter), (more, longer) = sorted([last[1:], (rows, seconds)])
        error = math.log(longer / shorter) - self._height(more) + self._height(fewer)
        parts = [  # of each rise, as far as it lies between the two
            max(0.0, min(more, knot[1]) - max(fewer, knot[0])) / (knot[1] - knot[0]) * (rise + _LEAST)
            for knot, rise in zip(pairwise(_KNOTS), self._rises, strict=True)
        ]
        move = _NEWEST * max(-_FAR, min(error, _FAR)) / sum(parts) if sum(parts) else 0.0
        self._rises = [max(0.0, rise + move * part) for rise, part in zip(self._rises, parts, strict=True)]
        self._heights = [0.0, *accumulate(self._rises)]
        self._longer.clear()

    def interrupt(self) -> None:
        """Another step came between."""
        self._last = None

    def _height(self, rows: int) -> float:
        at = min(bisect_left(_KNOTS, rows), len(_KNOTS) - 1)
        if at == 0 or rows >= _KNOTS[at]:
            return self._heights[at]
        return self._heights[at] - self._rises[at - 1] * (_KNOTS[at] - rows) / (_KNOTS[at] - _KNOTS[at - 1])
