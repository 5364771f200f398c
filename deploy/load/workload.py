"""Make a load: prompts, their lengths and send times. Pure, and the same for the same seed.

Arrivals, lengths and tokens are drawn from separate streams, so that changing one leaves the others as they were.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.lengths import Lengths
from simulator.mooncake import BLOCK, TraceLine

_ARRIVALS, _PROMPTS, _OUTPUTS, _GROUPS, _TOKENS, _PREFIXES = range(6)  # names of the streams


@dataclass(frozen=True)
class Planned:
    """One request of a load."""

    at: float  # seconds after the start of the run; 0 throughout for a closed loop
    prompt: tuple[int, ...]
    output: int  # tokens


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


def from_trace(
    lines: Iterable[TraceLine], vocab: int, seed: int, time_scale: float, length_scale: float
) -> Iterator[Planned]:
    """The trace's requests with their times and lengths multiplied. A hash id stands for `length_scale` times as many
    tokens too, so that the shared part of two prompts keeps its share."""
    block = max(1, round(BLOCK * length_scale))
    start: float | None = None
    for line in lines:
        start = line.timestamp if start is None else start
        length = max(1, round(line.input_length * length_scale))
        yield Planned(
            at=(line.timestamp - start) / 1_000 * time_scale,
            prompt=expand(line.hash_ids, block, length, vocab, seed),
            output=max(1, round(line.output_length * length_scale)),
        )


def _stream(seed: int, *name: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name])


def _draw(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, count).tolist()
