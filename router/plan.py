"""What placement decides: a plan, what is predicted of it, and the other ways there were."""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from baton.messages import Source, TierRun


class Predicted(Struct, frozen=True):
    """Seconds until the first token, term by term."""

    queue: float = 0.0  # what the worker that computes has been given already
    load: float = 0.0  # cached pages from the node's disk or from other nodes
    compute: float = 0.0  # tokens that nobody has
    transfer: float = 0.0  # what the way from one node to another adds
    wait: float = 0.0  # for a decode worker that has no room earlier, or could not keep an objective
    step: float = 0.0  # the decode step that brings the first token

    @property
    def total(self) -> float:
        return self.queue + self.load + self.compute + self.transfer + self.wait + self.step

    def __str__(self) -> str:
        return (
            f"{self.total:.3f} s: queue {self.queue:.3f}, load {self.load:.3f}, compute {self.compute:.3f}, "
            f"transfer {self.transfer:.3f}, wait {self.wait:.3f}, step {self.step:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt. The decode worker takes the first `fetch` pages from its node's store as far as its device lacks
    them, and computes the rest. Nobody need compute `cached` pages; `prefill`, if named, is to make the others. `loads`
    are those cached pages that are to come from below an arena, tier by tier."""

    decode: str
    prefill: str | None = None
    fetch: int = 0
    cached: int = 0
    store: str = ""  # where the decode worker fetches: its node's; empty: it needs none
    sources: tuple[Source, ...] = ()  # where that store gets what it lacks
    prefill_sources: tuple[Source, ...] = ()  # where the prefill worker's node's store does
    loads: tuple[TierRun, ...] = ()
    predicted: Predicted = field(default=Predicted(), compare=False)
    tpot: float = field(default=0.0, compare=False)  # predicted seconds per token after the first

    @property
    def awaited(self) -> bool:
        """Some of the pages to fetch are only being made."""
        return self.prefill is not None


class Candidate(Struct, frozen=True):
    """One way to serve an attempt."""

    decode: str  # name
    prefill: str  # name; "": the decode worker computes the prompt itself
    cached: int  # tokens that nobody need compute
    predicted: Predicted
    why_not: str = ""  # it could not be chosen; "": it could
