"""A quantile that follows what it is told, without keeping any of it. Pure."""

# pyright: strict

from __future__ import annotations


class Quantile:
    """Seconds that a `share` of what is learned does not exceed, followed step by step (Robbins and Monro, 1951)."""

    _STEP = 0.1

    def __init__(self, share: float, least: float) -> None:
        """A step is a tenth of the quantile, or of `least` seconds if that is more."""
        self._share, self._least = share, least
        self.seconds = 0.0

    def learn(self, late: float) -> None:
        step = self._STEP * max(self.seconds, self._least)
        self.seconds = max(0.0, self.seconds + step * (self._share - (late <= self.seconds)))
