"""Virtual time: an agenda of events, and processes that sleep on it.

Events of one instant run in the order in which they were planned, so a seed always gives the same events.
"""

# pyright: strict

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

Body: TypeAlias = Generator[float, None, None]
"""The body of a process. It yields the time at which it continues, or `inf` to sleep until another process wakes it."""

_LITTLE = 1e-9  # seconds: past any rounding


class Agenda:
    """The clock, and all planned events."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.happened = 0  # events
        self._planned = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, do: Callable[..., object], *args: Any) -> None:
        """Call `do` at the time `when`, or now if that has passed."""
        self._planned += 1
        heappush(self._heap, (max(when, self.now), self._planned, do, args))

    def after(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    def resume(self, when: float, do: Callable[..., object], *args: Any) -> None:
        """Let a process go on: as `at`, for an adversary to be late."""
        self.at(when, do, *args)

    def run(self, until: Callable[[], bool], limit: float = inf) -> None:
        """Run events until `until` is true, none is planned, or the time `limit` is reached."""
        heap = self._heap
        while heap and not until():
            when, _, do, args = heap[0]
            if when > limit:
                self.now = limit
                return
            heappop(heap)
            self.now = when
            self.happened += 1
            do(*args)


@dataclass(frozen=True)
class Stops:
    """When a process stands still: the first `stopped` seconds of each `period`."""

    stopped: float = 0.0
    period: float = 1.0

    def over(self, now: float) -> float:
        """Return when a process goes on that would do so now."""
        phase = now % self.period
        return now + max(0.0, self.stopped - phase)

    def delayed(self, now: float, until: float) -> float:
        """Return when work ends that begins now, and would end at `until` without stops."""
        left = until - now
        while left < inf and self.stopped:
            now = self.over(now)
            if left <= (rest := self.period - now % self.period):
                return now + left
            now, left = now + rest + _LITTLE, left - rest
        return until


class VirtualProcess:
    """A body that runs on an agenda."""

    def __init__(self, agenda: Agenda, body: Body) -> None:
        self._agenda, self._body = agenda, body
        self._sleeps = 0  # number of the current sleep: the planned end of an earlier one is ignored
        self._until = agenda.now
        agenda.resume(agenda.now, self._go_on, 0)

    def wake(self, when: float) -> None:
        """End the current sleep at `when`, if it would last longer."""
        if when < self._until:
            self._sleeps += 1
            self._sleep(when)

    def end(self) -> None:
        """End the process: its body never continues."""
        self._sleeps += 1
        self._until = -inf
        self._body.close()

    def _go_on(self, sleep: int) -> None:
        if sleep == self._sleeps:
            self._sleeps += 1
            self._sleep(next(self._body))

    def _sleep(self, until: float) -> None:
        self._until = until
        if until < inf:
            self._agenda.resume(until, self._go_on, self._sleeps)
