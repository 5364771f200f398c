"""Wires between stores, on which nothing moves by itself: the adversary of `simulator.network`.

A caller picks the wire that delivers next, and what goes wrong. Each wire keeps its order, as a connection does, and
there is none between two of them: neither of two pairs of stores, nor of what a store asks and what it serves.
"""

# pyright: strict

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from baton.peer_protocol import PageRequest
from simulator.transport import Parcel, SimulatedTransport

Mishap: TypeAlias = Literal["", "damaged", "twice", "later"]
"""What becomes of a parcel beside its arrival: its first page is damaged, or it comes twice, at once or much later."""


class Wire(NamedTuple):
    """One direction of a connection, and the store that it leads to, by incarnation."""

    to: str
    parcels: deque[Parcel]


class Connection(NamedTuple):
    """The connection that a store has opened to another one."""

    requests: deque[Parcel]
    replies: deque[Parcel]


class Wires:
    """All parcels on their way."""

    def __init__(self, living: Callable[[str], SimulatedTransport | None], damage: Callable[[Any], Any]) -> None:
        """`living` returns a store's transport, by incarnation. `damage` returns the contents of a page, damaged."""
        self._living, self._damage = living, damage
        self._connections: dict[tuple[str, str], Connection] = {}  # by the asking store and the one that has the pages
        self._ghosts: list[tuple[str, Parcel]] = []  # that come once more

    def post(self, to: str, parcel: Parcel) -> None:
        """Send a parcel. Its pages are read from the sender's arena when it is delivered."""
        sender = parcel.sender.incarnation
        asks = isinstance(parcel.message, PageRequest)
        connection = self._connections.setdefault((sender, to) if asks else (to, sender), Connection(deque(), deque()))
        connection[not asks].append(parcel)

    def loaded(self) -> list[Wire]:
        """Return the wires with something on them, in order of their first use."""
        both = [
            wire
            for (asking, serving), (requests, replies) in self._connections.items()
            for wire in (Wire(serving, requests), Wire(asking, replies))
        ]
        return [wire for wire in both if wire.parcels]

    def deliver(self, wire: Wire, mishap: Mishap = "") -> None:
        """Deliver the next parcel of a wire."""
        parcel = wire.parcels.popleft()
        if self._living(parcel.sender.incarnation) is parcel.sender:
            parcel.leave()
        elif parcel.orders:
            return  # its arena has gone with it
        if mishap == "damaged" and parcel.contents:
            parcel.contents[0] = self._damage(parcel.contents[0])
        if self._arrive(wire.to, parcel):
            if mishap == "twice":
                self._arrive(wire.to, parcel)
            if mishap == "later" and not parcel.orders:
                self._ghosts.append((wire.to, parcel))

    def haunt(self) -> None:
        """Deliver a message once more, long after it was said."""
        if self._ghosts:
            self._arrive(*self._ghosts.pop(0))

    def cut(self, pick: int) -> None:
        """Cut a connection, most likely one that carries pages. What is on it is lost, both ways."""
        loaded = [each for each in self._connections.values() if any(each)]
        if pick % 2 == 0:
            loaded = [each for each in loaded if any(parcel.orders for parcel in each.replies)] or loaded
        if loaded:
            for parcels in loaded[pick % len(loaded)]:
                _lose(parcels)

    def lose(self, sender: str) -> None:
        """Lose all that is on its way from a store."""
        for wire in self.loaded():
            if wire.parcels[0].sender.incarnation == sender:
                _lose(wire.parcels)

    def _arrive(self, to: str, parcel: Parcel) -> bool:
        if (receiver := self._living(to)) is None:
            return False
        receiver.arrive(parcel)
        return True


def _lose(parcels: deque[Parcel]) -> None:
    for parcel in parcels:
        parcel.release()
    parcels.clear()
