"""Following the KV events of many holders through loss: when to ask for a snapshot, and what to apply in which order.

    track ──Ask──▶ awaiting a snapshot ──last part──▶ following ──gap, or `lost`──Ask──▶ awaiting …

While a snapshot is on its way, batches are kept; when it has come, those above its sequence follow it. What was known
before stays in use meanwhile: a stale hint is better than none.

Pure: batches and snapshot parts in, actions out, time as an argument. One holder is one incarnation: a process that
has been restarted is another holder, and what its predecessor still has in flight is nobody's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.messages import PageRun, Snapshot
from kvstore.events import Batch, Event

_ASK_AGAIN = 1.0  # seconds without a snapshot after which it is asked for again: the request may have been lost
_KEPT_BATCHES = 10_000  # while awaiting; the oldest go first, and the gap they leave makes for another snapshot


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this holder a `SnapshotRequest`."""

    holder: str


@dataclass(frozen=True, slots=True)
class Load:
    """Replace what is known of this holder: `PrefixMap.load_snapshot`."""

    holder: str
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these events of this holder, in order: `kvstore.events.apply`."""

    holder: str
    events: tuple[Event, ...]


Action: TypeAlias = Ask | Load | Apply


@dataclass(slots=True)
class _Source:
    following: bool = False
    next: int = 0  # sequence expected while following
    asked: float = 0.0
    kept: deque[Batch] = field(default_factory=lambda: deque(maxlen=_KEPT_BATCHES))
    parts: list[Snapshot] = field(default_factory=list[Snapshot])


class EventTracker:
    """Every holder whose events are followed. Batches and snapshots of anybody else are ignored."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self.gaps = 0  # times that a followed holder's events were found incomplete

    def track(self, holder: str, now: float) -> list[Action]:
        """Start with a holder that has said Hello; again for one already followed changes nothing."""
        if holder in self._sources:
            return []
        self._sources[holder] = _Source(asked=now)
        return [Ask(holder)]

    def forget(self, holder: str) -> None:
        """The holder is gone."""
        self._sources.pop(holder, None)

    def batch(self, batch: Batch, now: float) -> list[Action]:
        """Take the next batch that came in."""
        source = self._sources.get(batch.holder)
        if source is None:
            return []
        if not source.following:
            source.kept.append(batch)
            return []
        if batch.sequence < source.next:
            return []  # a snapshot has told us already
        if batch.sequence > source.next:
            source.kept.append(batch)
            return self._ask(batch.holder, source, now)
        source.next += 1
        return [Apply(batch.holder, batch.events)]

    def snapshot(self, holder: str, part: Snapshot, now: float) -> list[Action]:
        """Take a part of a snapshot. Parts come in order; one that does not fit its predecessors ends the attempt."""
        source = self._sources.get(holder)
        if source is None or source.following:
            return []  # a second answer, after we asked twice
        if part.part == 0:
            source.parts.clear()
        if part.part != len(source.parts) or (source.parts and source.parts[0].sequence != part.sequence):
            source.parts.clear()
            return self._ask(holder, source, now)
        source.parts.append(part)
        if not part.last:
            source.asked = now  # progress: no need to ask again
            return []
        runs = tuple(run for each in source.parts for run in each.runs)
        source.parts.clear()
        source.following, source.next = True, part.sequence + 1
        actions: list[Action] = [Load(holder, runs)]
        kept, source.kept = source.kept, deque(maxlen=_KEPT_BATCHES)
        for batch in kept:
            actions += self.batch(batch, now)
        return actions

    def lost(self, holder: str, now: float) -> list[Action]:
        """What was applied did not fit: an event named an unknown parent. Start over with a snapshot."""
        source = self._sources.get(holder)
        if source is None or not source.following:
            return []
        return self._ask(holder, source, now)

    def tick(self, now: float) -> list[Action]:
        """Ask again where an answer is overdue; call about once a second."""
        overdue = [
            (holder, source)
            for holder, source in self._sources.items()
            if not source.following and now - source.asked >= _ASK_AGAIN
        ]
        return [action for holder, source in overdue for action in self._ask(holder, source, now)]

    def following(self, holder: str) -> bool:
        """Whether what is known of this holder is complete, as far as anyone can tell."""
        source = self._sources.get(holder)
        return source is not None and source.following

    def _ask(self, holder: str, source: _Source, now: float) -> list[Action]:
        self.gaps += source.following
        source.following = False
        source.asked = now
        return [Ask(holder)]
