"""Who shall do an attempt: a decode worker, and perhaps a prefill worker of the same node.

Thin on purpose, until workers report what their work costs: everything is counted in pages. A decode worker costs the
pages that neither it nor its node's store has, plus the pages it is busy with; a prefill worker likewise.

Pure. Pages are immutable and found by key, so a plan made from stale hints costs a recompute and never a wrong token.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A live decode worker. Pages are those of the prefix at hand, without a gap from the first."""

    incarnation: str
    name: str
    node: str
    busy_pages: int  # of everything that was dispatched to it and has not ended
    device_pages: int  # of the prefix, on its device
    store_pages: int | None  # of the prefix, in its node's store; none: that node has no live store


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A live prefill worker. `slots` are the prompts it may still be given."""

    incarnation: str
    name: str
    node: str
    busy_pages: int
    device_pages: int
    slots: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt. The decode worker takes the first `fetch` pages from its node's store as far as its device lacks
    them, and computes the rest; `cached` of them are there already, the others `prefill` is to make."""

    decode: str
    prefill: str | None = None
    fetch: int = 0
    cached: int = 0

    @property
    def awaited(self) -> bool:
        """Some of the pages to fetch are only being made."""
        return self.prefill is not None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can take it now that would not be worse than waiting."""

    why: str


def place(
    pages: int, decoders: Sequence[DecodeCandidate], prefillers: Sequence[PrefillCandidate], *, local: bool = False
) -> Plan | Wait:
    """Place an attempt whose tokens have `pages` shippable pages. `local`: only a decode worker may be needed, and no
    store; this is how a last attempt is made.

    A worker pair is split only where a full page is missing and where a live prefill worker and a live store share the
    decode worker's node. Where such a node's prefill workers are full, the prompt waits here: it can still be placed
    elsewhere, and a decode worker that computes long prompts slows down everybody's tokens."""
    if not decoders:
        return Wait("no decode worker is free")
    if local:
        return Plan(min(decoders, key=lambda d: (pages - d.device_pages + d.busy_pages, d.name)).incarnation)
    options = [option for decoder in decoders if (option := _option(pages, decoder, prefillers))]
    if not options:
        return Wait("every prefill worker has all the prompts it takes")
    return min(options, key=lambda option: option[:2])[2]


def pick_prefill(candidates: Sequence[PrefillCandidate], node: str) -> PrefillCandidate | None:
    """The prefill worker of `node` with a free slot that has least to do."""
    free = [candidate for candidate in candidates if candidate.node == node and candidate.slots > 0]
    return min(free, key=lambda c: (c.busy_pages - c.device_pages, c.name), default=None)


def _option(
    pages: int, decoder: DecodeCandidate, prefillers: Sequence[PrefillCandidate]
) -> tuple[int, str, Plan] | None:
    """What this decode worker would cost, its name to break ties, and how it would be done; none: wait for it."""
    stored = decoder.store_pages or 0
    cached = min(pages, max(decoder.device_pages, stored))
    missing = pages - cached
    cost = missing + decoder.busy_pages
    splits = missing > 0 and decoder.store_pages is not None and any(p.node == decoder.node for p in prefillers)
    if not splits:
        fetch = cached if stored > decoder.device_pages else 0
        return cost, decoder.name, Plan(decoder.incarnation, fetch=fetch, cached=cached)
    prefiller = pick_prefill(prefillers, decoder.node)
    if prefiller is None:
        return None
    return cost, decoder.name, Plan(decoder.incarnation, prefiller.incarnation, pages, cached)
