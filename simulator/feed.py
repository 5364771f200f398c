"""KV events of one worker or store, as `kvstore.events.publisher` sends them, without its sockets."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from baton.messages import Medium, PageSegment, Snapshot
from kvstore.events.changes import (
    CacheChange,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    TierChanges,
    digest,
    in_parts,
    snapshot_parts,
)
from kvstore.events.wire_format import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch


class Feed:
    """Numbers event batches, with 0 for the empty cache, and keeps the digest of the pages that they add up to."""

    def __init__(self, holder: str, page_size: int) -> None:
        self._holder, self._page_size = holder, page_size
        self.sequence = 0  # of the last batch: for `Heartbeat.events`
        self.digest = 0  # for `Heartbeat.digest`

    def batches(self, changes: Sequence[TierChanges]) -> Iterator[KvEventBatch]:
        """Yield the event batches for `changes`."""
        for part in in_parts(changes):
            events: list[KvEvent] = []
            for medium, of_tier in part:
                for change in of_tier:
                    events.append(self._event(change, medium))
                    self.digest = 0 if isinstance(change, PagesCleared) else self.digest ^ digest(change.keys, medium)
            self.sequence += 1
            yield KvEventBatch(self._holder, self.sequence, tuple(events))

    def snapshot(self, runs: Iterable[PageSegment]) -> list[Snapshot]:
        """Return the snapshot of `runs`, which must equal the sum of all batches so far."""
        return snapshot_parts(self.sequence, runs)

    def _event(self, change: CacheChange, medium: Medium) -> KvEvent:
        match change:
            case PagesStored(parent=parent, keys=keys):
                return BlockStored(keys, parent or None, (), self._page_size, None, medium, None)
            case PagesRemoved(keys=keys):
                return BlockRemoved(keys, medium)
            case PagesCleared():
                return AllBlocksCleared()
