"""The router's knowledge of everybody's pages: the prefix map, and the tracker that keeps it whole. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import BatonError
from baton.messages import Snapshot
from kvstore.events import Batch, apply
from kvstore.prefix_map import Match, PrefixMap, PrefixMapStats
from kvstore.tracker import Action, Apply, Ask, EventTracker, Load


class Prefixes:
    """Which live holder has how much of a prefix. Calls return the holders to ask for a snapshot."""

    def __init__(self) -> None:
        self._map = PrefixMap()
        self._tracker = EventTracker()

    def follow(self, holder: str, now: float) -> list[str]:
        return self._carry_out(self._tracker.track(holder, now), now)

    def forget(self, holder: str) -> None:
        """The holder is gone, and in the same moment no match names it."""
        self._tracker.forget(holder)
        self._map.remove_holder(holder)

    def batch(self, batch: Batch, now: float) -> list[str]:
        return self._carry_out(self._tracker.batch(batch, now), now)

    def snapshot(self, holder: str, part: Snapshot, now: float) -> list[str]:
        return self._carry_out(self._tracker.snapshot(holder, part, now), now)

    def tick(self, now: float) -> list[str]:
        return self._carry_out(self._tracker.tick(now), now)

    def match(self, keys: Sequence[bytes]) -> dict[str, Match]:
        return self._map.match(keys)

    def pages(self, holder: str) -> int:
        return self._map.pages(holder)

    def holders(self) -> list[str]:
        return self._map.holders()

    def stats(self) -> PrefixMapStats:
        return self._map.stats()

    def _carry_out(self, actions: Sequence[Action], now: float) -> list[str]:
        asks: list[str] = []
        waiting = list(actions)
        while waiting:
            match waiting.pop(0):
                case Ask(holder=holder):
                    asks.append(holder)
                case Load(holder=holder, runs=runs):
                    try:
                        self._map.load_snapshot(holder, runs)
                    except BatonError:  # part of a key: what this holder says can't be used
                        self._map.cleared(holder)
                        waiting[:0] = self._tracker.lost(holder, now)
                case Apply(holder=holder, events=events):
                    if not apply(self._map, holder, events):
                        waiting[:0] = self._tracker.lost(holder, now)
        return asks

    def validate(self) -> None:
        """Check every invariant; for tests."""
        self._map.validate()
