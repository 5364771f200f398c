"""An agenda on which nothing happens by itself: the adversary of `simulator.clock.Agenda`.

Time stands still until a caller moves it. Events wait in lanes, such as one direction of a connection, the messages of
one process to another, or the orders of a thread. A lane keeps its order, and there is none between two lanes. The
caller picks the lane that goes on, and what goes wrong with its next event.
"""

# pyright: strict

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

Lane: TypeAlias = tuple[Any, ...]
"""What a lane is, then the processes and numbers that tell it from others of its kind. Its beginning stands for all
lanes that begin so: `()` for all of them."""

_TIRELESS = 10_000  # turns of all lanes until they count as never coming to rest


class HeldAgenda:
    """The clock, and all events that have not happened."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._lanes: dict[Lane, deque[tuple[Callable[..., object], tuple[Any, ...]]]] = {}

    def hold(self, lane: Lane, do: Callable[..., object], *args: Any) -> None:
        """Let `do` wait in a lane. It gets `args`, and whatever `go` is told of its mishap."""
        self._lanes.setdefault(lane, deque()).append((do, args))

    def loaded(self, *begin: Any) -> list[Lane]:
        """Return the lanes with events, in the order in which each got its first."""
        return [lane for lane in self._lanes if lane[: len(begin)] == begin]

    def waiting(self, *begin: Any) -> list[Any]:
        return [args[0] for lane in self.loaded(*begin) for _, args in self._lanes[lane]]

    def pop(self, lane: Lane) -> Callable[..., object]:
        """Take the next event from a lane. The caller lets it happen, once or twice or never."""
        events = self._lanes[lane]
        do, args = events.popleft()
        if not events:
            del self._lanes[lane]
        return partial(do, *args)

    def repeat(self, lane: Lane) -> None:
        """Let the next event of a lane happen twice."""
        self._lanes[lane].appendleft(self._lanes[lane][0])

    def go(self, *begin: Any, pick: int = 0, **mishap: Any) -> bool:
        """Let the next event of one of these lanes happen. Return whether there was one."""
        if lanes := self.loaded(*begin):
            self.pop(lanes[pick % len(lanes)])(**mishap)
        return bool(lanes)

    def turn(self, *begin: Any) -> bool:
        """Let one event of each of these lanes happen. Return whether there was one."""
        lanes = self.loaded(*begin)
        for lane in lanes:
            if lane in self._lanes:
                self.pop(lane)()
        return bool(lanes)

    def flow(self, *begin: Any) -> None:
        """Let everything in these lanes happen, and all that follows there. Nothing goes wrong."""
        for _ in range(_TIRELESS):
            if not self.turn(*begin):
                return
        raise AssertionError(f"these never come to rest: {self.loaded(*begin)}")

    def drop(self, *begin: Any) -> list[Any]:
        """Forget the events of these lanes. Return their first arguments."""
        dropped = self.waiting(*begin)
        for lane in self.loaded(*begin):
            del self._lanes[lane]
        return dropped
