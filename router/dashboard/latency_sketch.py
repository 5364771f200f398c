"""Quantiles of durations over the last seconds, in constant space."""

# pyright: strict

from __future__ import annotations

from collections import Counter, deque
from math import exp, log

_SHORTEST = 1e-5  # seconds; a shorter duration counts as this long
_STEP = log(1.05)  # two neighbouring buckets are 5 % apart, so a quantile is right to within 2.5 %
_LAST = int(log(1e5 / _SHORTEST) / _STEP)  # bucket of the longest: more than a day


class LatencySketch:
    """Counts of durations in buckets, for each of the last `seconds` seconds. `add_duration` takes less than 1 µs."""

    def __init__(self, seconds: int = 5) -> None:
        self._now = Counter[int]()
        self._past = deque[Counter[int]](maxlen=seconds)

    def add_duration(self, duration: float) -> None:
        self._now[min(_LAST, int(log(duration / _SHORTEST) / _STEP)) if duration > _SHORTEST else 0] += 1

    def turn(self) -> None:
        """A second has passed."""
        self._past.append(self._now)
        self._now = Counter[int]()

    def quantiles(self, *shares: float) -> list[float | None]:
        """Return these quantiles of all durations in the seconds that have passed, in seconds; none without any."""
        counts = sum(self._past, Counter[int]())
        total = counts.total()
        if not total:
            return [None] * len(shares)
        buckets = sorted(counts.items())
        quantiles: list[float | None] = []
        for share in shares:
            rank, seen = share * (total - 1), 0
            for bucket, count in buckets:
                seen += count
                if seen > rank:
                    quantiles.append(_SHORTEST * exp(_STEP * (bucket + 0.5)))
                    break
        return quantiles
