"""Rules of ordinary load balancers, which ignore caches. Load is the number of open requests given to a worker."""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest


class RandomChoice(Rule):
    """Chooses a random worker."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return self._random.choice(workers)


class RoundRobin(Rule):
    """Chooses workers in turn, by name, with a separate order for each stage."""

    def __init__(self, seed: int) -> None:
        self._turns: Counter[Stage] = Counter()

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        turn = self._turns[stage]
        self._turns[stage] += 1
        return sorted(workers, key=lambda worker: worker.name)[turn % len(workers)]


class LeastLoaded(Rule):
    """Chooses the worker with the fewest requests."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return lowest(workers, lambda worker: worker.requests, self._random)


class PowerOfTwo(Rule):
    """Draws two workers at random and chooses the one with fewer requests.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        return min(self._random.sample(workers, min(2, len(workers))), key=lambda worker: worker.requests)
