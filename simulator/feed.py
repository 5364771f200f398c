"""KV events of one holder of pages, as `kvstore.events.publisher` sends them, without its sockets."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from baton.messages import Medium, PageRun, Snapshot
from kvstore.events.changes import Change, Cleared, Removed, Stored, TierChanges, digest, in_parts, snapshot_parts
from kvstore.events.wire_format import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event


class Feed:
    """Numbers batches from 0, which says that nothing is held, and keeps the digest of all that they tell."""

    def __init__(self, holder: str, page_size: int) -> None:
        self._holder, self._page_size = holder, page_size
        self.sequence = 0  # of the last batch: for `Heartbeat.events`
        self.digest = 0  # for `Heartbeat.digest`

    def batches(self, changes: Sequence[TierChanges]) -> Iterator[Batch]:
        """What has changed since the last call."""
        for part in in_parts(changes):
            events: list[Event] = []
            for medium, of_tier in part:
                for change in of_tier:
                    events.append(self._event(change, medium))
                    self.digest = 0 if isinstance(change, Cleared) else self.digest ^ digest(change.keys, medium)
            self.sequence += 1
            yield Batch(self._holder, self.sequence, tuple(events))

    def snapshot(self, runs: Iterable[PageRun]) -> list[Snapshot]:
        """Of `runs`, which must be exactly what the batches so far add up to."""
        return snapshot_parts(self.sequence, runs)

    def _event(self, change: Change, medium: Medium) -> Event:
        match change:
            case Stored(parent=parent, keys=keys):
                return BlockStored(keys, parent or None, (), self._page_size, None, medium, None)
            case Removed(keys=keys):
                return BlockRemoved(keys, medium)
            case Cleared():
                return AllBlocksCleared()
