"""What a load consists of: which prompts, of what length, sent when. Pure, and the same for the same seed.

Arrivals, lengths and tokens are drawn from separate streams, so that changing one leaves the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from baton.errors import ConfigError

_ARRIVALS, _PROMPTS, _OUTPUTS, _GROUPS, _TOKENS, _PREFIXES = range(6)  # names of the streams


@dataclass(frozen=True)
class Planned:
    """One request of a load."""

    at: float  # seconds after the start of the run; 0 throughout for a closed loop
    prompt: tuple[int, ...]
    output: int  # tokens


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, in tokens, each at least 1."""

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float  # the length; the shortest; the median
    second: float = 0.0  # nothing; the longest; sigma of the logarithm
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`128`, `uniform:64:256` (both included), `lognormal:200:0.8` or `lognormal:200:0.8:2000` (median, sigma,
        longest). Raises ConfigError."""
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
        except ValueError:
            pass
        raise ConfigError(f"{text!r} is no length; write N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:LONGEST]")

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * count
        if self.kind == "uniform":
            return rng.integers(int(self.first), int(self.second), count, endpoint=True).tolist()
        drawn = np.rint(rng.lognormal(math.log(self.first), self.second, count))
        return np.clip(drawn, 1, self.most).astype(np.int64).tolist()


@dataclass(frozen=True)
class Workload:
    """Requests drawn at random. With groups, each prompt is a prefix that its group shares, then tokens of its own:
    `prompt` is the length of the latter."""

    prompt: Lengths
    output: Lengths
    vocab: int
    groups: int = 0
    prefix: int = 0  # tokens
    arrivals: Sequence[float] = field(default=(), repr=False)  # none: a closed loop

    def plan(self, count: int, seed: int) -> list[Planned]:
        prompts = self.prompt.draw(count, _stream(seed, _PROMPTS))
        outputs = self.output.draw(count, _stream(seed, _OUTPUTS))
        own = _stream(seed, _TOKENS)
        shared = [_draw(_stream(seed, _PREFIXES, group), self.prefix, self.vocab) for group in range(self.groups)]
        chosen = _stream(seed, _GROUPS).integers(0, max(1, self.groups), count).tolist()
        return [
            Planned(
                at=self.arrivals[i] if self.arrivals else 0.0,
                prompt=tuple((shared[chosen[i]] if shared else []) + _draw(own, prompts[i], self.vocab)),
                output=outputs[i],
            )
            for i in range(count)
        ]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` instants of a Poisson process of `rate` a second. The first comes after a gap too."""
    return np.cumsum(_stream(seed, _ARRIVALS).exponential(1 / rate, count)).tolist()


def expand(hash_ids: Iterator[int] | Sequence[int], block: int, length: int, vocab: int, seed: int) -> tuple[int, ...]:
    """`length` tokens that follow from hash ids, `block` tokens from each: equal ids make equal tokens. Where the ids
    don't suffice, the last one goes on."""
    tokens: list[int] = []
    ids = list(hash_ids) or [0]
    for index, hash_id in enumerate(ids):
        missing = length - len(tokens)
        if missing <= 0:
            break
        size = missing if index == len(ids) - 1 else min(block, missing)
        tokens += _draw(_stream(seed, _TOKENS, hash_id), size, vocab)
    return tuple(tokens)


def _stream(seed: int, *name: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name])


def _draw(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, count).tolist()
