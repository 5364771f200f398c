"""What every engine is asked for, and the one rule by which all of them are counted.

All prompts of a case are submitted at once. Time runs from that moment to the last token of all: the prompts' prefill
is in it. Decode cases count output tokens, prefill cases, which generate one token each, count prompt tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_FIRST_TOKEN = 2  # below that are the special ones


@dataclass(frozen=True)
class Case:
    """`sequences` prompts of `prompt` tokens at once, `output` tokens generated for each."""

    name: str
    sequences: int
    prompt: int
    output: int

    @property
    def unit(self) -> str:
        return "output tokens/s" if self.output > 1 else "prompt tokens/s"

    @property
    def counted(self) -> int:
        """The tokens of which `unit` speaks."""
        return self.sequences * (self.output if self.output > 1 else self.prompt)

    def rate(self, seconds: float) -> float:
        return self.counted / seconds

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Random token ids: the same for the same seed, and other ones for every case."""
        drawn = random.Random(f"{self.name} {seed}")
        return [[drawn.randrange(_FIRST_TOKEN, vocabulary) for _ in range(self.prompt)] for _ in range(self.sequences)]


CASES = (
    Case("decode-1", sequences=1, prompt=32, output=128),
    Case("decode-8", sequences=8, prompt=128, output=128),
    Case("decode-32", sequences=32, prompt=128, output=128),
    Case("prefill-1", sequences=1, prompt=2_048, output=1),
    Case("prefill-8", sequences=8, prompt=1_024, output=1),
)
BY_NAME = {case.name: case for case in CASES}


def chosen(names: str) -> tuple[Case, ...]:
    """The cases of these names, separated by commas. Raises KeyError for a name that is none."""
    return tuple(BY_NAME[name] for name in names.split(","))


def against_best(own: Sequence[float], others: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """Which of the others is best by its median, and the median over the rounds of one's own rate over its rate in the
    same round: what disturbs a round disturbs both."""
    best = max(others, key=lambda name: statistics.median(others[name]))
    return best, statistics.median(mine / theirs for mine, theirs in zip(own, others[best], strict=True))


def agreement(ours: Iterable[Sequence[int]], theirs: Iterable[Sequence[int]]) -> float:
    """The share of sequences that begin with the same token. In bfloat16 not all will, but most: or it is not the same
    model that is measured."""
    pairs = [(mine[0], other[0]) for mine, other in zip(ours, theirs, strict=True)]
    return statistics.fmean(mine == other for mine, other in pairs)


def table(rates: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]) -> str:
    """Markdown: a row for each engine in `rates`, by case; then the limits. All of them are tokens/s."""
    names = list(limits)
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for engine, by_case in [*rates.items(), ("roofline", limits)]:
        lines.append(f"| {engine} | " + " | ".join(f"{by_case[name]:,.0f}" for name in names) + " |")
    return "\n".join(lines)
