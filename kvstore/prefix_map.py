"""Which process holds how much of a prefix, and on which tier: what the router knows of everybody's pages.

A holder is one incarnation of a worker or a store; its KV events and snapshots fill the map. The map is a hint: a stale
entry costs a recompute, never a wrong token, because whoever serves a page finds it by its key.

Pure, and one table inside: key → holders. Keys are hash-chained, so the table is the radix tree (see `kvstore.radix`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.messages import Medium, PageRun
from kvstore.keys import START, split_keys

MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "DISK")
"""Every tier, fastest first."""

_BITS: Mapping[Medium, int] = {medium: 1 << place for place, medium in enumerate(MEDIA)}


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a chain one holder has: its first `pages` pages without a gap, each counted in `tiers` under the
    fastest tier that has it."""

    pages: int
    tiers: Mapping[Medium, int] = field(default_factory=dict[Medium, int])


@dataclass(frozen=True, slots=True)
class PrefixMapStats:
    """Counts: `entries` are pairs of holder and page; `gaps` counts runs kept out for want of their parent."""

    holders: int
    pages: int
    entries: int
    gaps: int


class PrefixMap:
    """Pages by key, with their holders. Nothing here ever fails on what a holder says: what can't be is kept out."""

    def __init__(self) -> None:
        self._pages: dict[bytes, dict[str, int]] = {}  # key → holder → bits of its tiers
        self._held: dict[str, dict[bytes, int]] = {}  # the same, by holder
        self._gaps = 0

    def stored(self, holder: str, parent: bytes, keys: Sequence[bytes], medium: Medium) -> bool:
        """`holder` has `keys`, which follow `parent` (empty at the start of a chain). False when it is not known to
        have `parent`: an event was missed, the pages stay out, and a snapshot is due."""
        held = self._held.setdefault(holder, {})
        if parent != START and parent not in held:
            self._gaps += 1
            return False
        bit = _BITS[medium]
        for key in keys:
            held[key] = held.get(key, 0) | bit
            self._pages.setdefault(key, {})[holder] = held[key]
        return True

    def removed(self, holder: str, keys: Iterable[bytes], medium: Medium) -> None:
        """`holder` no longer has `keys` on that tier; it may still on another."""
        held = self._held.get(holder, {})
        for key in keys:
            if (bits := held.get(key)) is None:
                continue
            left = bits & ~_BITS[medium]
            if left:
                held[key] = self._pages[key][holder] = left
            else:
                del held[key]
                self._drop(key, holder)

    def cleared(self, holder: str) -> None:
        """`holder` is there, with nothing."""
        self.remove_holder(holder)
        self._held[holder] = {}

    def remove_holder(self, holder: str) -> None:
        """`holder` is gone: no match names it from now on."""
        for key in self._held.pop(holder, {}):
            self._drop(key, holder)

    def load_snapshot(self, holder: str, runs: Iterable[PageRun]) -> None:
        """Replace all that is known of `holder`. Parents stand before their children."""
        self.cleared(holder)
        for run in runs:
            self.stored(holder, run.parent, split_keys(run.keys), run.medium)

    def match(self, keys: Sequence[bytes]) -> dict[str, Match]:
        """For each holder of the first key, how far it has the chain `keys` without a gap."""
        ended: dict[str, Match] = {}
        open_counts: dict[str, list[int]] = {}  # pages per fastest tier, of holders without a gap so far
        for place, key in enumerate(keys):
            holders = self._pages.get(key, {})
            if place == 0:
                open_counts = {holder: [0] * len(MEDIA) for holder in holders}
            else:
                for holder in [holder for holder in open_counts if holder not in holders]:
                    ended[holder] = _match(open_counts.pop(holder))
            if not open_counts:
                break
            for holder, counts in open_counts.items():
                bits = holders[holder]
                counts[(bits & -bits).bit_length() - 1] += 1
        return ended | {holder: _match(counts) for holder, counts in open_counts.items()}

    def holders(self) -> list[str]:
        return list(self._held)

    def pages(self, holder: str) -> int:
        """How many pages `holder` has, on whatever tier."""
        return len(self._held.get(holder, {}))

    def stats(self) -> PrefixMapStats:
        return PrefixMapStats(
            holders=len(self._held),
            pages=len(self._pages),
            entries=sum(len(held) for held in self._held.values()),
            gaps=self._gaps,
        )

    def validate(self) -> None:
        """Check every invariant; for tests."""
        assert all(self._pages.values()), "a page without a holder"
        by_holder = {(holder, key): bits for holder, held in self._held.items() for key, bits in held.items()}
        by_page = {(holder, key): bits for key, holders in self._pages.items() for holder, bits in holders.items()}
        assert by_holder == by_page
        assert all(by_holder.values()), "held on no tier"

    def _drop(self, key: bytes, holder: str) -> None:
        holders = self._pages[key]
        del holders[holder]
        if not holders:
            del self._pages[key]


def _match(counts: Sequence[int]) -> Match:
    tiers: dict[Medium, int] = {medium: count for medium, count in zip(MEDIA, counts, strict=True) if count}
    return Match(sum(counts), tiers)
