"""Tables of a fixed size, in which a newer entry takes the place of an older one: pages and texts of recent prompts,
for `router.placement.prompt_history`. Pure.

An entry's place follows from its 64-bit hash alone, so a prompt of thousands of pages is looked up by a few operations
on arrays. After as many new entries as a table has places, 37 % of the old ones are left.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.messages import KEY_BYTES, Medium

Hashes: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.int64]

_MEDIA: tuple[Medium, ...] = ("GPU", "CPU", "DISK")


@dataclass(frozen=True, slots=True)
class SeenPages:
    """The first `count` pages of a chain were seen. The other fields are of the first that is still in the table."""

    count: int
    prompt: int  # number of the last one that had the page; 0: none that is known
    removed: float  # when a process last dropped it, seconds; 0: none has
    tier: Medium | None  # from which


class PageTable:
    """Pages by key, with the last prompt that had them and their last removal."""

    def __init__(self, slots: int) -> None:
        self._mask = np.uint64(slots - 1)
        self._tags = np.zeros(slots, np.uint64)
        self._prompts = np.zeros(slots, np.int64)
        self._removed = np.zeros(slots, np.float64)
        self._tiers = np.zeros(slots, np.int8)

    def put(self, tags: Hashes, prompt: int) -> None:
        self._prompts[self._enter(tags)] = prompt

    def remove(self, tags: Hashes, tier: Medium, now: float) -> None:
        """A process dropped these pages from a tier. It may have them on another."""
        at = self._enter(tags)
        self._removed[at], self._tiers[at] = now, _MEDIA.index(tier)

    def find(self, tags: Hashes) -> SeenPages | None:
        """Return how far a chain was seen. A key commits to all pages before it, so an entry that has lost its place to
        another is no end."""
        at = tags & self._mask
        hits = np.flatnonzero(self._tags[at] == tags)
        if not len(hits):
            return None
        first = int(at[hits[0]])
        removed = float(self._removed[first])
        tier = _MEDIA[int(self._tiers[first])] if removed else None
        return SeenPages(int(hits[-1]) + 1, int(self._prompts[first]), removed, tier)

    def _enter(self, tags: Hashes) -> Hashes:
        """Return the places of these pages; a page that is new in its place has no prompt and no removal."""
        at = tags & self._mask
        new = at[self._tags[at] != tags]
        self._tags[at] = tags
        self._prompts[new], self._removed[new] = 0, 0
        return at


class TextTable:
    """Hashes of texts, with the last prompt that had each and the token at which it began there."""

    def __init__(self, slots: int) -> None:
        self._mask = np.uint64(slots - 1)
        self._tags = np.zeros(slots, np.uint64)
        self._prompts = np.zeros(slots, np.int64)
        self._places = np.zeros(slots, np.int32)

    def put(self, tags: Hashes, places: Numbers, prompt: int) -> None:
        at = tags & self._mask
        self._tags[at], self._prompts[at], self._places[at] = tags, prompt, places

    def find(self, tags: Hashes, places: Numbers, near: int) -> Numbers:
        """Return for each text the last prompt that had it at most `near` tokens from its place; 0: none."""
        at = tags & self._mask
        seen = (self._tags[at] == tags) & (np.abs(self._places[at] - places) <= near)
        return np.where(seen, self._prompts[at], 0)


def tags_of(keys: Sequence[bytes]) -> Hashes:
    """The hashes of page keys, which are hashes already: their first half."""
    return np.frombuffer(b"".join(keys), "<u8")[:: KEY_BYTES // 8]
