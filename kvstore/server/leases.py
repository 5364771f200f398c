"""Leases, the processes that own them, and the waiters for each page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from baton.messages import PageSource
from kvstore.arena.host_page_pool import HostPage, SlotReservation


@dataclass(eq=False, slots=True)
class PageWaiter:
    """A waiter for the pages of a chain: what it still waits for, by index in `keys`."""

    number: int
    keys: list[bytes]
    wait: bool  # also for pages that are only being made: a hand-off
    waits: set[int] = field(default_factory=set[int], kw_only=True)


@dataclass(eq=False, slots=True)
class Lease(PageWaiter):
    """One reservation or acquisition of one chain by a worker: what it still reserves and holds, by index in `keys`."""

    owner: ClientProcess
    expires: float  # when its holds and waits end unless its owner renews them
    since: float  # when it was made
    reserving: bool  # made by Reserve, so that it may seal
    prompt: int = 0  # which prompt of its owner's it is for, where that waits for slots
    parent: bytes = b""  # the key before the first
    partial: bool = False  # the last key is of a partial page
    apart: bool = False  # no key follows another one
    sources: tuple[PageSource, ...] = ()  # other stores that may have its pages
    reached: int = 0  # pages before this index were granted or asked for, and never are again
    reservations: dict[int, SlotReservation] = field(default_factory=dict[int, SlotReservation])
    sealed: set[int] = field(default_factory=set[int])  # indices that its owner has sealed
    holds: dict[int, HostPage] = field(default_factory=dict[int, HostPage])
    shared: SharedSlots | None = None
    place: int = 0  # of its owner's mark in these

    def sources_of(self, index: int) -> tuple[PageSource, ...]:
        """Other stores that are believed to have that page, or to be about to."""
        return tuple(source for source in self.sources if source.pages > index)


@dataclass(eq=False, slots=True)
class SharedSlots:
    """Slots that the processes of several leases may write to. They are free when the last lease has ended."""

    reservations: list[SlotReservation]
    members: int  # leases that are to share them
    granted: bool = False  # all of these have come
    leases: list[Lease] = field(default_factory=list[Lease])


@dataclass(eq=False, slots=True)
class ClientProcess:
    """One incarnation of a worker, while it is attached or slots are reserved by it."""

    pid: int
    incarnation: str
    connection: int | None = None
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])

    @property
    def reserved(self) -> int:
        """Slots that it may be writing to."""
        shared = (len(lease.shared.reservations) for lease in self.leases.values() if lease.shared)
        return sum(len(lease.reservations) for lease in self.leases.values()) + sum(shared)


class PageWaiters:
    """The waiters for each key."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[PageWaiter, int]] = {}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    @property
    def awaited_keys(self) -> Iterator[bytes]:
        return iter(self._waiting)

    def awaited(self, key: bytes) -> bool:
        """Whether anybody waits for `key`."""
        return key in self._waiting

    def worker_awaits(self, key: bytes) -> bool:
        return any(isinstance(waiter, Lease) for waiter in self._waiting.get(key, ()))

    def named(self, key: bytes, store: str) -> bool:
        """Whether a worker waits for `key` that names this store as one to get it from."""
        waiting = self._waiting.get(key, {}).items()
        return any(isinstance(t, Lease) and any(s.store == store for s in t.sources_of(i)) for t, i in waiting)

    def promised(self, key: bytes) -> bool:
        return any(not isinstance(waiter, Lease) for waiter in self._waiting.get(key, ()))

    def of(self, key: bytes) -> Mapping[PageWaiter, int]:
        """Return the waiters for `key`, each with its index there."""
        return self._waiting.get(key, {})

    def add_waiter(self, waiter: PageWaiter, index: int) -> None:
        waiter.waits.add(index)
        self._waiting.setdefault(waiter.keys[index], {})[waiter] = index

    def remove_waiter(self, waiter: PageWaiter, first: int = 0) -> None:
        """`waiter` waits no longer for its pages from index `first` on."""
        for index in [index for index in waiter.waits if index >= first]:
            waiter.waits.discard(index)
            waiting = self._waiting[waiter.keys[index]]
            del waiting[waiter]
            if not waiting:
                del self._waiting[waiter.keys[index]]

    def page_arrived(self, key: bytes) -> list[tuple[PageWaiter, int]]:
        """Return and remove the waiters for `key`, whose page has arrived."""
        called = list(self._waiting.pop(key, {}).items())
        for waiter, index in called:
            waiter.waits.discard(index)
        return called

    def waiters(self, keys: Iterable[bytes]) -> list[PageWaiter]:
        """Return the waiters for any of `keys`, each once."""
        return list(dict.fromkeys(waiter for key in keys for waiter in self._waiting.get(key, ())))

    def cancel(self, keys: Iterable[bytes], who: Callable[[PageWaiter, int], bool]) -> list[tuple[PageWaiter, int]]:
        """Cancel the waits for `keys`, which are not coming for the waiters that `who` selects, and for all that
        follows in their chains. Return the first index concerned of each."""
        first: dict[PageWaiter, int] = {}
        for key in keys:
            for waiter, index in self._waiting.get(key, {}).items():
                if who(waiter, index):
                    first[waiter] = min(index, first.get(waiter, index))
        for waiter, index in first.items():
            self.remove_waiter(waiter, index)
        return list(first.items())

    def validate(self, waiters: Iterable[PageWaiter]) -> None:
        expected = {(waiter.keys[index], id(waiter), index) for waiter in waiters for index in waiter.waits}
        here = {(key, id(t), index) for key, waiting in self._waiting.items() for t, index in waiting.items()}
        assert here == expected
        assert all(self._waiting.values())
