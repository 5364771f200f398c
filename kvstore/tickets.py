"""Tickets, the processes that own them, and the pages that they wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.pages import Page, Reservation


@dataclass(eq=False, slots=True)
class Ticket:
    """One reservation or acquisition of one chain: what it still reserves, holds and waits for, by index in `keys`."""

    number: int
    owner: Process
    keys: list[bytes]
    expires: float  # when its holds and waits end unless its owner renews them
    reserving: bool  # made by Reserve, so that it may seal
    reservations: dict[int, Reservation] = field(default_factory=dict[int, Reservation])
    sealed: set[int] = field(default_factory=set[int])  # indices that its owner has sealed
    holds: dict[int, Page] = field(default_factory=dict[int, Page])
    waits: set[int] = field(default_factory=set[int])


@dataclass(eq=False, slots=True)
class Process:
    """One incarnation of a worker, while it is attached or slots are reserved by it."""

    pid: int
    incarnation: str
    connection: int | None = None
    tickets: dict[int, Ticket] = field(default_factory=dict[int, Ticket])

    @property
    def reserved(self) -> int:
        """Slots that it may be writing to."""
        return sum(len(ticket.reservations) for ticket in self.tickets.values())


class WaitingRoom:
    """Who waits for which key."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Ticket, int]] = {}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def enter(self, ticket: Ticket, index: int) -> None:
        ticket.waits.add(index)
        self._waiting.setdefault(ticket.keys[index], {})[ticket] = index

    def leave(self, ticket: Ticket, first: int = 0) -> None:
        """`ticket` waits no longer for its pages from index `first` on."""
        for index in [index for index in ticket.waits if index >= first]:
            ticket.waits.discard(index)
            waiting = self._waiting[ticket.keys[index]]
            del waiting[ticket]
            if not waiting:
                del self._waiting[ticket.keys[index]]

    def call(self, key: bytes) -> list[tuple[Ticket, int]]:
        """Everybody who waits for `key`, which has come: they wait for it no longer."""
        called = list(self._waiting.pop(key, {}).items())
        for ticket, index in called:
            ticket.waits.discard(index)
        return called

    def send_away(self, keys: Iterable[bytes]) -> list[tuple[Ticket, int]]:
        """`keys` are not coming: whoever waits for one waits no longer for it, nor for what follows it in their chain.
        Returns the first index concerned of each ticket."""
        first: dict[Ticket, int] = {}
        for key in keys:
            for ticket, index in self._waiting.get(key, {}).items():
                first[ticket] = min(index, first.get(ticket, index))
        for ticket, index in first.items():
            self.leave(ticket, index)
        return list(first.items())

    def validate(self, tickets: Iterable[Ticket]) -> None:
        """Check every invariant; for tests."""
        expected = {(ticket.keys[index], id(ticket), index) for ticket in tickets for index in ticket.waits}
        here = {(key, id(t), index) for key, waiting in self._waiting.items() for t, index in waiting.items()}
        assert here == expected
        assert all(self._waiting.values())
