"""Time as an argument: a monotonic clock, and a detector of our own pauses."""

from typing import Protocol

from msgspec import Struct


class Tick(Struct, frozen=True):
    """Time has passed; for `paused` seconds of it our own loop stood still."""

    paused: float = 0.0


class Clock(Protocol):
    """Seconds on a monotonic scale; only differences mean anything."""

    def now(self) -> float: ...


class PauseDetector:
    """Tell a loop that it was itself paused (SIGSTOP, swap, a long step), so that it blames no peer for the silence.

    A loop calls `tick(now)` once a turn and gets the turn's seconds if they exceed `tolerance`, else 0.0. If they are
    more than zero, it drains its sockets and extends its timers by that much before it judges a peer. Of late turns in
    a row, all but the first count for `tolerance`: on a busy machine where every turn is late, a peer still falls
    silent.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._last: float | None = None
        self._late = False

    def tick(self, now: float) -> float:
        last, self._last = self._last, now
        if last is None:
            return 0.0
        gap = now - last
        before, self._late = self._late, gap > self._tolerance
        if not self._late:
            return 0.0
        return gap - self._tolerance if before else gap
