"""What placement is asked and what it decides: a plan, a wait or a rejection, the prediction, and the alternatives."""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from msgspec import Struct

from baton.messages import PageSource
from baton.store_protocol import TierPages
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.placement.cached_prefix import CacheablePrefix


class PredictedTtft(Struct, frozen=True):
    """Seconds until the first token, term by term."""

    queue: float = 0.0  # what the worker that computes has been given already
    load: float = 0.0  # cached pages from the node's disk or from other nodes
    compute: float = 0.0  # tokens that are cached nowhere
    transfer: float = 0.0  # what the way from one node to another adds
    wait: float = 0.0  # for a decode worker that has no room earlier, or could not keep an objective
    step: float = 0.0  # the decode step that brings the first token
    delay: float = 0.0  # by which these workers answer later than others of their role

    @property
    def total(self) -> float:
        return self.queue + self.load + self.compute + self.transfer + self.wait + self.step + self.delay

    def __str__(self) -> str:
        return (
            f"{self.total:.3f} s: queue {self.queue:.3f}, load {self.load:.3f}, compute {self.compute:.3f}, "
            f"transfer {self.transfer:.3f}, wait {self.wait:.3f}, step {self.step:.3f}, delay {self.delay:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """One attempt. The decode worker takes the first `fetch_pages` pages from its node's store as far as its device
    lacks them, and computes the rest. `cached_pages` need no computing, and `prefill`, if named, computes the
    others. `loads` are the cached pages that come from below an arena, tier by tier."""

    decode: str
    prefill: str | None = None
    fetch_pages: int = 0
    cached_pages: int = 0
    store: str = ""  # where the decode worker fetches: its node's; empty: it needs none
    sources: tuple[PageSource, ...] = ()  # where that store gets what it lacks
    prefill_sources: tuple[PageSource, ...] = ()  # where the prefill worker's node's store does
    loads: tuple[TierPages, ...] = ()
    predicted: PredictedTtft = field(default=PredictedTtft(), compare=False)
    tpot: float = field(default=0.0, compare=False)  # predicted seconds per token after the first
    helpers: tuple[str, ...] = ()  # prefill workers that compute chunks in turn with it, by their places
    chunk_pages: int = 0  # of such a chunk
    ring_seconds: tuple[float, ...] = field(default=(), compare=False)  # predicted, of computing with 1, 2, … workers

    @property
    def prefilled_remotely(self) -> bool:
        """Some of the pages to fetch are only being made."""
        return self.prefill is not None


class Wait(Struct, frozen=True):
    """No placement now is better than waiting. `predicted`: seconds until its first token even so; none: unknown."""

    why: str
    predicted: float | None = None


class Reject(Struct, frozen=True):
    """No placement meets its objectives. `retry_after`: seconds after which one might; none: unknown."""

    why: str
    retry_after: float | None = None


PlacementChoice: TypeAlias = Placement | Wait | Reject


class PlacementRequest(Struct, frozen=True):
    """A request that wants a place, as its next attempt needs it."""

    request: str
    prefix: CacheablePrefix
    keys: Sequence[bytes]  # of the prefix's pages
    held: Mapping[str, PrefixMatch]  # how much of the prefix each holder has, by incarnation
    tokens: int  # known: the prompt, and what earlier attempts generated
    max_tokens: int  # of output, those generated included
    prompt: int  # tokens
    ttft: float | None = None  # objective: seconds from now until the first token
    tpot: float | None = None  # objective: seconds per token after the first
    waited: float = 0.0  # seconds since it was received
    priority: int = 0  # lower is more urgent
    tenant: str = ""
    excluded: Collection[str] = ()  # incarnations that have failed it
    decode_only: bool = False  # only a decode worker may be needed, and no store: this is how a last attempt is made
    affinity: str = ""  # requests of one key go to one decode worker while it lives
    most_pages: float = inf  # of a device, at a time; its length sets a bound, too
    shares_with: str = ""  # the decode worker that has its whole prompt on its device: go there if that has room

    @property
    def pages_needed(self) -> int:
        """Device pages of a decode worker, for prompt and output."""
        return int(min(-(-(self.prompt + self.max_tokens) // self.prefix.page_size), self.most_pages))

    @property
    def partial_page_tokens(self) -> int:
        """Tokens of the partial page that a prefill worker makes after the prefix. The decode worker then begins
        with the last token."""
        return self.tokens - 1 - self.prefix.pages * self.prefix.page_size

    @property
    def hand_off_pages(self) -> int:
        """Pages of a hand-off."""
        return self.prefix.pages + (self.partial_page_tokens > 0)

    @property
    def output_left(self) -> int:
        """Tokens of output that it may still generate."""
        return self.max_tokens - (self.tokens - self.prompt)

    def device_pages(self, worker: str) -> int:
        """Pages of the prefix that this one has on its device."""
        return match.pages if (match := self.held.get(worker)) else 0


class SecondsReservation(Struct, frozen=True):
    """Seconds of a worker that a waiting request is going to take; requests behind it are priced with them."""

    worker: str  # incarnation
    seconds: float


class Candidate(Struct, frozen=True):
    """One way to serve an attempt."""

    decode: str  # name
    prefill: str  # name; "": the decode worker computes the prompt itself
    cached: int  # tokens that need no computing
    predicted: PredictedTtft
    why_not: str = ""  # it could not be chosen; "": it could
