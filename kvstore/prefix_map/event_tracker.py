"""Following the KV events of many holders through loss: when to ask for a snapshot, and what to apply in which order.

    track ──RequestSnapshot──▶ awaiting a snapshot ──last part──▶ following
                                   ▲                                  │
                                   └─────── RequestSnapshot ──────────┘ gap, `lost`, divergence

While a snapshot is on its way, batches are kept; when it has come, those above its sequence follow it. What was known
before stays in use until the snapshot comes: a stale hint is better than none.

What is missing shows in three ways. A gap in the sequence, when the next batch comes. A heartbeat that tells of a later
batch, when none comes. And a digest: holders tell the digest of all that they held after a batch, and where the map's
was another after the same batch, the two have parted silently.

Pure: batches, snapshot parts and heartbeats go in, actions come out, time is an argument. One holder is one
incarnation: a restarted process is another holder, and messages of its predecessor that are still in flight are
dropped.
"""

# pyright: strict

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from baton.messages import PageSegment, Snapshot
from kvstore.events.wire_format import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from kvstore.keys import START
from kvstore.prefix_map.prefix_map import PrefixMap

_ASK_AGAIN = 1.0  # seconds without a snapshot after which it is asked for again: the request may have been lost
_LATE = 2.0  # seconds without a batch that a heartbeat has told of after which it counts as lost
_HEAL_AGAIN = 60.0  # seconds at most between two snapshots for a holder whose digest never agrees
_BACKLOG_KEYS = 1_000_000  # of batches while awaiting; the oldest go first, and the gap they leave makes for a snapshot
_DIGESTS = 64  # sequences of which the map's digest is remembered


class RequestSnapshot(Struct, frozen=True):
    """Ask this holder for a snapshot."""

    holder: str


class LoadSnapshot(Struct, frozen=True):
    """Part of a snapshot: with the `first`, what is known of this holder so far goes. The last has the sequence of
    the batch that the whole is as of. `PrefixMap.extend`."""

    holder: str
    runs: tuple[PageSegment, ...]
    first: bool
    sequence: int | None


class ApplyEvents(Struct, frozen=True):
    """Apply these events of this holder, in order: `kvstore.prefix_map.event_tracker.apply_events`."""

    holder: str
    events: tuple[KvEvent, ...]
    sequence: int


TrackerAction: TypeAlias = RequestSnapshot | LoadSnapshot | ApplyEvents


@dataclass(slots=True)
class _ReportedDigest:
    """What a heartbeat said of a batch that has not been applied yet."""

    sequence: int
    digest: int
    since: float  # when it said so, or when the last batch came, seconds


@dataclass(slots=True)
class _Source:
    last_request: float
    following: bool = False
    next: int = 0  # sequence expected while following
    backlog: deque[KvEventBatch] = field(default_factory=deque[KvEventBatch])
    backlog_keys: int = 0
    part: int = 0  # of the snapshot that is coming in: expected next
    loading: int = 0  # its sequence
    digests: dict[int, int] = field(default_factory=dict[int, int])  # the map's, by sequence, latest last
    claim: _ReportedDigest | None = None
    heal_at: float = float("-inf")  # not before is another snapshot asked for because of a digest
    heal_wait: float = 0.0


class EventTracker:
    """Every holder whose events are followed. Batches and snapshots of anybody else are ignored."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self.gaps = 0  # times that a followed holder's events were found incomplete
        self.divergences = 0  # times that they were complete, and the map was another nevertheless

    def track(self, holder: str, now: float) -> list[TrackerAction]:
        """Start with a holder that has said Hello; again for one already followed changes nothing."""
        if holder in self._sources:
            return []
        self._sources[holder] = _Source(last_request=now)
        return [RequestSnapshot(holder)]

    def forget(self, holder: str) -> None:
        self._sources.pop(holder, None)

    # --- what comes in ----------------------------------------------------------------------------------------------

    def batch(self, batch: KvEventBatch, now: float) -> list[TrackerAction]:
        """Take the next batch that came in."""
        source = self._sources.get(batch.holder)
        if source is None:
            return []
        if not source.following:
            self._keep(source, batch)
            return []
        if batch.sequence < source.next:
            return []  # a snapshot has told us already
        if batch.sequence > source.next:
            self._keep(source, batch)
            return self._gap(batch.holder, source, now)
        source.next += 1
        if source.claim is not None:
            source.claim.since = now
        return [ApplyEvents(batch.holder, batch.events, batch.sequence)]

    def snapshot(self, holder: str, part: Snapshot, now: float) -> list[TrackerAction]:
        """Take a part of a snapshot. Parts come in order; one that does not fit its predecessors ends the attempt."""
        source = self._sources.get(holder)
        if source is None or source.following:
            return []  # a second answer, after we asked twice
        if part.part == 0:
            source.part, source.loading = 0, part.sequence
        if (part.part, part.sequence) != (source.part, source.loading):
            begun, source.part = source.part > 0, 0
            return self._ask(holder, source, now) if begun else []
        source.part += 1
        source.last_request = now  # progress: no need to ask again
        actions: list[TrackerAction] = [
            LoadSnapshot(holder, part.runs, part.part == 0, part.sequence if part.last else None)
        ]
        if part.last:
            source.part = 0
            source.following, source.next = True, part.sequence + 1
            source.digests.clear()
            backlog, source.backlog, source.backlog_keys = source.backlog, deque(), 0
            for batch in backlog:
                actions += self.batch(batch, now)
        return actions

    def digest_reported(self, holder: str, sequence: int, digest: int, ours: int, now: float) -> list[TrackerAction]:
        """A heartbeat: `digest` is of all that the holder had once batch `sequence` had happened; `ours` is what the
        map says of it now."""
        source = self._sources.get(holder)
        if source is None or not source.following:
            return []
        if source.next - 1 in source.digests:
            source.digests[source.next - 1] = ours  # nothing has come since, and yet it may have changed
        if sequence in source.digests:
            return self._compare(holder, source, sequence, digest, now)
        if source.claim is None and sequence >= source.next:
            source.claim = _ReportedDigest(sequence, digest, now)
        return []

    # --- how it went ------------------------------------------------------------------------------------------------

    def applied(self, holder: str, sequence: int, digest: int, now: float) -> list[TrackerAction]:
        """The map has taken everything up to that batch, and this is its digest of the holder now."""
        source = self._sources.get(holder)
        if source is None or not source.following:
            return []
        source.digests[sequence] = digest
        if len(source.digests) > _DIGESTS:
            del source.digests[next(iter(source.digests))]
        claim = source.claim
        if claim is None or claim.sequence > sequence:
            return []
        source.claim = None
        return self._compare(holder, source, sequence, claim.digest, now) if claim.sequence == sequence else []

    def lost(self, holder: str, now: float) -> list[TrackerAction]:
        """What was applied did not fit: an event named an unknown parent. Start over with a snapshot."""
        source = self._sources.get(holder)
        if source is None or not source.following:
            return []
        return self._gap(holder, source, now)

    def unusable(self, holder: str, now: float) -> None:
        """A snapshot made no sense. Another is asked for, but not at once."""
        if (source := self._sources.get(holder)) is not None:
            source.following, source.part, source.last_request = False, 0, now

    def tick(self, now: float) -> list[TrackerAction]:
        """Ask where an answer or a batch is overdue; call about once a second."""
        actions: list[TrackerAction] = []
        for holder, source in self._sources.items():
            if not source.following:
                if now - source.last_request >= _ASK_AGAIN:
                    actions += self._ask(holder, source, now)
            elif source.claim is not None and now - source.claim.since >= _LATE:
                actions += self._gap(holder, source, now)
        return actions

    def following(self, holder: str) -> bool:
        """Whether what is known of this holder is complete, as far as anyone can tell."""
        source = self._sources.get(holder)
        return source is not None and source.following

    # --- small parts ------------------------------------------------------------------------------------------------

    def _compare(self, holder: str, source: _Source, sequence: int, digest: int, now: float) -> list[TrackerAction]:
        if source.digests[sequence] == digest:
            source.heal_wait = 0.0
            return []
        if now < source.heal_at:
            return []
        # The first is healed at once. A holder that never agrees is wrong about itself: no snapshot will mend that.
        source.heal_at = now + source.heal_wait
        source.heal_wait = min(_HEAL_AGAIN, max(1.0, 2 * source.heal_wait))
        self.divergences += 1
        return self._ask(holder, source, now)

    def _gap(self, holder: str, source: _Source, now: float) -> list[TrackerAction]:
        self.gaps += 1
        return self._ask(holder, source, now)

    def _ask(self, holder: str, source: _Source, now: float) -> list[TrackerAction]:
        source.following = False
        source.claim = None
        source.last_request = now
        return [RequestSnapshot(holder)]

    def _keep(self, source: _Source, batch: KvEventBatch) -> None:
        source.backlog.append(batch)
        source.backlog_keys += _weight(batch)
        while source.backlog_keys > _BACKLOG_KEYS:
            source.backlog_keys -= _weight(source.backlog.popleft())


def _weight(batch: KvEventBatch) -> int:
    keys = sum(0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) for event in batch.events)
    return 16 + len(batch.events) + keys  # an empty batch takes room too


def apply_events(prefixes: PrefixMap, holder: str, events: Sequence[KvEvent]) -> bool:
    """Bring `prefixes` up to date. False when an event named a parent that is not there: a snapshot is due."""
    whole = True
    for event in events:
        match event:
            case BlockStored(block_hashes=keys, parent_block_hash=parent, medium=medium):
                whole &= prefixes.stored(holder, parent or START, keys, medium)
            case BlockRemoved(block_hashes=keys, medium=medium):
                prefixes.removed(holder, keys, medium)
            case AllBlocksCleared():
                prefixes.cleared(holder)
    return whole
