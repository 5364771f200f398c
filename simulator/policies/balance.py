"""Rules that balance load and know of no cache: what every load balancer offers. Load is the number of requests that a
worker was given and that have not ended.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from simulator.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest


class RandomChoice(Rule):
    """Any."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return self._random.choice(workers)


class RoundRobin(Rule):
    """Each in turn, by name; every stage has turns of its own."""

    def __init__(self, seed: int) -> None:
        self._turns: Counter[Stage] = Counter()

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        turn = self._turns[stage]
        self._turns[stage] += 1
        return sorted(workers, key=lambda worker: worker.name)[turn % len(workers)]


class LeastLoaded(Rule):
    """The one with fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return lowest(workers, lambda worker: worker.requests, self._random)


class PowerOfTwo(Rule):
    """Of two drawn at random, the one with fewer requests (Mitzenmacher: The Power of Two Choices in Randomized Load
    Balancing, IEEE TPDS 12(10), 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return min(self._random.sample(workers, min(2, len(workers))), key=lambda worker: worker.requests)
