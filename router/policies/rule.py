"""The interface of a published routing rule, and the cluster's state as it sees it.

A rule chooses one of several workers for one stage of a request. `placer` turns the choice into a placement. Every rule
thus has the same data path and the same admission, and only placement is compared. Pure.
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
"""`both`: prefill and decode on one worker of a colocated cluster."""


_NO_PREFILL = PrefillCost(0.0, 0.0, 0.0)
_NO_STEP = DecodeCost(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RulePrompt:
    """The prompt to place. `keys` are those of its full pages."""

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
    """A candidate worker. A request counts as its load from the moment of the choice.

    Its device has the first `device` pages of the prompt. Its node's memory has the next `host` pages, and its node's
    disk the next `disk` pages.
    """

    name: str
    requests: int = 0  # open requests that were given to it
    prompts: int = 0  # those of them whose prompts are not computed yet
    prompt_tokens: int = 0  # of these prompts, without tokens that were cached at the choice
    queue: float = 0.0  # predicted seconds to compute them
    pages: int = 0  # of everything given to it
    context: int = 0  # tokens of everything given to it
    pool_pages: int = 1
    device: int = 0
    host: int = 0
    disk: int = 0
    prefill: PrefillCost = _NO_PREFILL
    step: DecodeCost = _NO_STEP
    link: float = float("inf")  # bytes per second from other nodes to its node; 0: no transfers

    @property
    def cached(self) -> int:
        """Pages of the prompt that are on its node."""
        return self.device + self.host + self.disk


class Rule(ABC):
    """One routing rule. It may keep a history of its choices."""

    @abstractmethod
    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker | None:
        """Choose one of at least one worker. None: the rule rejects the request."""

    def prefix(self, chosen: RuleWorker, workers: Sequence[RuleWorker]) -> int:
        """Return the pages of the prompt that count as cached in the chosen worker's later load."""
        return chosen.cached


def lowest(workers: Sequence[RuleWorker], cost: Callable[[RuleWorker], float], random: Random) -> RuleWorker:
    """Return a worker of least cost. Ties are broken at random."""
    costs = [cost(worker) for worker in workers]
    least = min(costs)
    return random.choice([worker for worker, one in zip(workers, costs, strict=True) if one == least])
