"""Connections between stores, on which nothing moves by itself: the adversary of `SimulatedNetwork.pages`.

Each direction of a connection is a lane of a held agenda. What a store asks another one and what it serves to it travel
on different connections.
"""

# pyright: strict

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from baton.peer_protocol import PageRequest
from simulator.transport import Parcel, SimulatedTransport
from tests.support.held_agenda import HeldAgenda, Lane

Mishap: TypeAlias = Literal["", "damaged", "twice", "later"]
"""What becomes of a parcel beside its arrival: its first page is damaged, or it comes twice, at once or much later."""


class Wires:
    def __init__(
        self, agenda: HeldAgenda, living: Callable[[str], SimulatedTransport | None], damage: Callable[[Any], Any]
    ) -> None:
        """`living` returns a store's transport, by incarnation. `damage` returns the contents of a page, damaged."""
        self._agenda, self._living, self._damage = agenda, living, damage
        self._ghosts: list[tuple[Parcel, str]] = []  # that come once more

    def post(self, to: str, parcel: Parcel) -> None:
        """Send a parcel. Its pages are read from the sender's arena when it is delivered."""
        sender = parcel.sender.incarnation
        asks = isinstance(parcel.message, PageRequest)
        connection = (sender, to) if asks else (to, sender)
        self._agenda.hold(("wire", *connection, asks), self._deliver, parcel, to)

    def lanes_from(self, *senders: str) -> list[Lane]:
        """Return the lanes with parcels of these stores, by incarnation."""
        return [lane for lane in self._agenda.loaded("wire") if lane[1 if lane[3] else 2] in senders]

    def deliver(self, pick: int, mishap: Mishap = "") -> bool:
        """Deliver a parcel. A damaged one has pages, if there is one. Return whether there was a parcel."""
        lanes = self._agenda.loaded("wire")
        if mishap == "damaged":
            lanes = [lane for lane in lanes if self._agenda.waiting(*lane)[0].orders] or lanes
        return bool(lanes) and self._agenda.go(*lanes[pick % len(lanes)], mishap=mishap)

    def haunt(self) -> None:
        """Deliver a message once more, long after it was said."""
        if self._ghosts:
            self._arrive(*self._ghosts.pop(0))

    def cut(self, pick: int) -> None:
        """Cut a connection, most likely one that carries pages. What is on it is lost, both ways."""
        loaded = list(dict.fromkeys(lane[:3] for lane in self._agenda.loaded("wire")))
        if pick % 2 == 0:
            waiting = self._agenda.waiting
            loaded = [each for each in loaded if any(parcel.orders for parcel in waiting(*each, False))] or loaded
        if loaded:
            self.lose(loaded[pick % len(loaded)])

    def lose(self, lane: Lane) -> None:
        for parcel in self._agenda.drop(*lane):
            parcel.release()

    def _deliver(self, parcel: Parcel, to: str, mishap: Mishap = "") -> None:
        if self._living(parcel.sender.incarnation) is parcel.sender:
            parcel.leave()
        elif parcel.orders:
            return  # its arena has gone with it
        if mishap == "damaged" and parcel.contents:
            parcel.contents[0] = self._damage(parcel.contents[0])
        if self._arrive(parcel, to):
            if mishap == "twice":
                self._arrive(parcel, to)
            if mishap == "later" and not parcel.orders:
                self._ghosts.append((parcel, to))

    def _arrive(self, parcel: Parcel, to: str) -> bool:
        if (receiver := self._living(to)) is None:
            return False
        receiver.arrive(parcel)
        return True
