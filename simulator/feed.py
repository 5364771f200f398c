"""KV events of one worker or store, as `kvstore.events.publisher` sends them, without its sockets."""

# pyright: strict

from collections.abc import Iterable, Iterator, Sequence

from baton.messages import PageSegment, Snapshot
from kvstore.events.changes import PagesCleared, TierChanges, digest, in_parts, snapshot_parts
from kvstore.events.wire_format import KvEvent, KvEventBatch, event_of


class Feed:
    """Numbers event batches, with 0 for the empty cache, and keeps the digest of the pages that they add up to."""

    def __init__(self, holder: str, page_size: int) -> None:
        self._holder, self._page_size = holder, page_size
        self.sequence = 0  # of the last batch: for `Heartbeat.events`
        self.digest = 0  # for `Heartbeat.digest`

    def batches(self, changes: Sequence[TierChanges]) -> Iterator[KvEventBatch]:
        for part in in_parts(changes):
            events: list[KvEvent] = []
            for medium, of_tier in part:
                for change in of_tier:
                    events.append(event_of(change, medium, self._page_size))
                    self.digest = 0 if isinstance(change, PagesCleared) else self.digest ^ digest(change.keys, medium)
            self.sequence += 1
            yield KvEventBatch(self._holder, self.sequence, tuple(events))

    def snapshot(self, runs: Iterable[PageSegment]) -> list[Snapshot]:
        """Return the snapshot of `runs`, which must equal the sum of all batches so far."""
        return snapshot_parts(self.sequence, runs)
