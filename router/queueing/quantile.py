"""What figures seldom exceed, followed as they come, without keeping any of them. Pure."""

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


class Spread:
    """The mean of what is learned and how far from it the figures are, those long ago forgotten exponentially
    (Jacobson, "Congestion Avoidance and Control", 1988: so TCP learns how long an answer may take)."""

    _WEIGHT = 1 / 32  # of the newest
    _DEVIATIONS = 3.0  # mean ones: were the errors normal, 1 in 120 would be larger

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    @property
    def most(self) -> float:
        """What is seldom exceeded, and at least 0."""
        return max(0.0, self._mean + self._DEVIATIONS * self._deviation)

    def learn(self, figure: float) -> None:
        error = figure - self._mean
        self._mean += self._WEIGHT * error
        self._deviation += self._WEIGHT * (abs(error) - self._deviation)
