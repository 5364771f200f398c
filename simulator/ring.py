"""Chunks that workers of a node compute of one prompt, layer behind layer, in virtual time (`engine.step.ring`).

A chunk comes to a layer once the chunk before has left it, and each layer takes an equal part of the chunk's seconds:

    begins = when its step does, and a layer after the chunk before has
    ends   = begins + seconds, and a layer after the chunk before has
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import inf

from engine.step.ring import RingChunk
from kvstore.arena.shared_slots import LeaveRing


@dataclass(slots=True)
class Mark:
    """How far a worker of a ring is: its last chunk."""

    number: int
    begins: float  # seconds; inf: the chunk before has not come so far
    ends: float  # inf: that, or its worker has died
    layer: float = 0.0  # seconds
    left: bool = False
    wake: Callable[[], object] | None = None  # its step is under way


_NONE = Mark(-1, inf, inf)  # of a worker that has not begun
_PAST = Mark(-1, -inf, -inf)  # it has gone on, or there is no chunk before


class RingMarks:
    """The marks of all rings of a node, by their names, and by the places in them."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, Mark]] = {}

    def run(
        self, ring: RingChunk, seconds: float, layers: int, now: Callable[[], float], wake: Callable[[], object]
    ) -> Generator[float, None, bool]:
        """Run a chunk that takes so many seconds by itself. Yield the times until which it sleeps, unless it is woken
        before. Return false if it waits too long for the chunk before, or if that one's worker has left."""
        marks, place = self._marks.setdefault(ring.name, {}), ring.plan.part.place
        began, layer = now(), seconds / layers
        own = marks[place] = Mark(ring.number, inf, inf, layer, wake=wake)
        patient_until, done = began + ring.patience, False
        try:
            while True:
                before = marks.get(ring.awaits, _NONE) if ring.number else _PAST
                if before.left:
                    return False
                if before.number != ring.number - 1:
                    before = _NONE if before.number < ring.number - 1 else _PAST
                begins = max(began, before.begins + before.layer)
                ends = max(begins + seconds, before.ends + layer)
                if (begins, ends) != (own.begins, own.ends):
                    own.begins, own.ends = begins, ends
                    _wake(marks, own)
                if done := now() >= ends:
                    return True
                if now() >= patient_until and before.ends > now():
                    return False
                yield min(ends, patient_until) if now() < patient_until else ends
        finally:
            own.wake = None
            if not done:
                own.begins = own.ends = inf
                _wake(marks, own)
            elif ring.number == ring.plan.count - 1:
                self._marks.pop(ring.name, None)

    def leave(self, left: LeaveRing) -> None:
        """A worker leaves its ring. The others wait no longer for it."""
        marks = self._marks.setdefault(left.name, {})
        marks[left.place] = Mark(-1, inf, inf, left=True)
        _wake(marks, marks[left.place])


def _wake(marks: dict[int, Mark], changed: Mark) -> None:
    for mark in marks.values():
        if mark.wake is not None and mark is not changed:
            mark.wake()
