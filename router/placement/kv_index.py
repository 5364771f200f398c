"""The router's knowledge of all cached pages: the prefix map, and the tracker that keeps it whole. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages import Snapshot
from kvstore.events.wire_format import KvEventBatch
from kvstore.prefix_map import event_tracker as tracker
from kvstore.prefix_map.prefix_map import PrefixMap


@dataclass(frozen=True, slots=True)
class KvIndexStats:
    """`pages` that anybody has. The others only grow: how often a holder's events were found incomplete, and how often
    complete and wrong nevertheless; a snapshot mended either."""

    pages: int
    gaps: int
    divergences: int


class KvIndex:
    """Which live holder has how much of a prefix. Calls return the holders to ask for a snapshot."""

    def __init__(self) -> None:
        self.map = PrefixMap()  # others read it and never change it
        self._tracker = tracker.EventTracker()

    def follow(self, holder: str, now: float) -> list[str]:
        return self._carry_out(self._tracker.track(holder, now), now)

    def forget(self, holder: str) -> None:
        """The holder is gone, and in the same moment no match names it."""
        self._tracker.forget(holder)
        self.map.remove_holder(holder)

    def apply_batch(self, batch: KvEventBatch, now: float) -> list[str]:
        return self._carry_out(self._tracker.batch(batch, now), now)

    def apply_snapshot(self, holder: str, part: Snapshot, now: float) -> list[str]:
        return self._carry_out(self._tracker.snapshot(holder, part, now), now)

    def heartbeat(self, holder: str, sequence: int, digest: int, now: float) -> list[str]:
        """The holder tells of its last batch, and the digest of what it had then."""
        return self._carry_out(
            self._tracker.digest_reported(holder, sequence, digest, self.map.digest(holder), now), now
        )

    def tick(self, now: float) -> list[str]:
        return self._carry_out(self._tracker.tick(now), now)

    def stats(self) -> KvIndexStats:
        return KvIndexStats(self.map.stats().pages, self._tracker.gaps, self._tracker.divergences)

    def _carry_out(self, actions: Sequence[tracker.TrackerAction], now: float) -> list[str]:
        asks: list[str] = []
        waiting = list(actions)[::-1]  # the next one last
        while waiting:
            follow: Sequence[tracker.TrackerAction] = ()
            match waiting.pop():
                case tracker.RequestSnapshot(holder=holder):
                    asks.append(holder)
                case tracker.LoadSnapshot(holder=holder, runs=runs, first=first, sequence=sequence):
                    load = self.map.load_snapshot if first else self.map.extend
                    if not load(holder, runs):
                        self._tracker.unusable(holder, now)
                    elif sequence is not None:
                        follow = self._tracker.applied(holder, sequence, self.map.digest(holder), now)
                case tracker.ApplyEvents(holder=holder, events=events, sequence=sequence):
                    if tracker.apply_events(self.map, holder, events):
                        follow = self._tracker.applied(holder, sequence, self.map.digest(holder), now)
                    else:
                        follow = self._tracker.lost(holder, now)
            waiting += follow[::-1]
        return asks
