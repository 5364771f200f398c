"""What a published routing rule sees of a cluster, and how it is asked.

A rule chooses one of several workers for one stage of a request. How its choice becomes a plan is `placer`'s part, so
that every rule has the same data path below it and the same admission before it: placement alone is compared. Pure.
"""

# pyright: strict

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

from router.placement.step_costs import DecodeCost, PrefillCost

Stage: TypeAlias = Literal["prefill", "decode", "both"]
"""`both`: the worker of a colocated cluster, which does all of it."""


_NO_PREFILL = PrefillCost(0.0, 0.0, 0.0)
_NO_STEP = DecodeCost(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RulePrompt:
    """What is to be placed. Its pages are the full ones; `keys` name them."""

    tokens: int
    keys: Sequence[bytes] = ()
    page_size: int = 1  # tokens
    page_bytes: int = 0
    ttft: float | None = None  # objective: seconds from now until the first token
    tpot: float | None = None  # objective: seconds per token after the first

    @property
    def pages(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class RuleWorker:
    """One that may be chosen. What it was given counts from the moment of the choice.

    Of the prompt at hand, its device has the first `device` pages; its node's memory, `host` ones behind those, and its
    node's disk `disk` behind these.
    """

    name: str
    requests: int = 0  # given to it and not ended
    prompts: int = 0  # those of them that are not computed
    prompt_tokens: int = 0  # of these prompts, less what was cached when they were given to it
    queue: float = 0.0  # seconds that computing them takes
    pages: int = 0  # of everything given to it
    context: int = 0  # tokens of everything given to it
    pool_pages: int = 1
    device: int = 0
    host: int = 0
    disk: int = 0
    prefill: PrefillCost = _NO_PREFILL
    step: DecodeCost = _NO_STEP
    link: float = float("inf")  # bytes per second that its node gets from others; 0: nothing

    @property
    def cached(self) -> int:
        """Pages of the prompt that are on its node."""
        return self.device + self.host + self.disk


class Rule(ABC):
    """One policy. It may remember what it chose."""

    @abstractmethod
    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker | None:
        """One of at least one worker; none: the rule rejects the request."""

    def prefix(self, chosen: RuleWorker, workers: Sequence[RuleWorker]) -> int:
        """Pages of the prompt that it takes for cached when it reckons with the chosen one's work later on."""
        return chosen.cached


def lowest(workers: Sequence[RuleWorker], cost: Callable[[RuleWorker], float], random: Random) -> RuleWorker:
    """The worker of least cost; any of those that are equal."""
    costs = [cost(worker) for worker in workers]
    least = min(costs)
    return random.choice([worker for worker, one in zip(workers, costs, strict=True) if one == least])
