"""Distributions of prompt and output lengths. Pure, and the same for the same generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baton.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, in tokens, each at least 1."""

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float  # the length; the shortest; the median
    second: float = 0.0  # nothing; the longest; sigma of the logarithm
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `128`, `uniform:64:256` (inclusive), or `lognormal:200:0.8:2000` (median, sigma, optional longest).

        Raises ConfigError.
        """
        kind, *numbers = text.split(":")
        try:
            match kind, [float(number) for number in numbers]:
                case "uniform", [low, high] if 1 <= low <= high:
                    return cls("uniform", low, high)
                case "lognormal", [median, sigma] if median >= 1 and sigma >= 0:
                    return cls("lognormal", median, sigma)
                case "lognormal", [median, sigma, most] if most >= median >= 1 and sigma >= 0:
                    return cls("lognormal", median, sigma, int(most))
                case _, [] if int(kind) >= 1:
                    return cls("fixed", int(kind))
        except (ValueError, OverflowError):
            pass
        raise ConfigError(f"{text!r} is no length; write N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:LONGEST]")

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * count
        if self.kind == "uniform":
            return rng.integers(int(self.first), int(self.second), count, endpoint=True).tolist()
        drawn = np.rint(rng.lognormal(math.log(self.first), self.second, count))
        return np.clip(drawn, 1, self.most).astype(np.int64).tolist()
