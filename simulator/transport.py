"""A store's page transport without threads and sockets: `kvstore.transport`, carried out when a caller says so.

    state ──PeerOrder──▶ SimulatedTransport ──Parcel──▶ network or wires ──▶ SimulatedTransport ──PeerEvent──▶ state

The simulator's parcels travel on its network and have no contents. The tests' parcels travel on
wires of their own, and have what a test's memory holds.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.peer_protocol import FetchedPages, FetchStatus, FetchUnavailable, PageReply, PageRequest
from kvstore.transport import interface


class SlotMemory(Protocol):
    """An arena. Contents are whatever its owner takes for the bytes of a page."""

    def read_slot(self, slot: int, checksum: int) -> Any:
        """Return the contents of a slot that was promised to a thread. They should have this checksum."""
        ...

    def write(self, slot: int, contents: Any) -> None: ...

    def matches(self, contents: Any, checksum: int) -> bool: ...


class NoMemory:
    """The simulator's arena, which has no bytes."""

    def read_slot(self, slot: int, checksum: int) -> Any:
        return None

    def write(self, slot: int, contents: Any) -> None:
        pass

    def matches(self, contents: Any, checksum: int) -> bool:
        return True


@dataclass(eq=False, slots=True)
class Parcel:
    """A message on its way between two stores, and the pages that go with it."""

    message: PageRequest | PageReply
    sender: SimulatedTransport
    orders: Sequence[interface.SendPages] = ()
    contents: list[Any] = field(default_factory=list[Any])  # once it has left the sender's arena

    def leave(self) -> None:
        """Read the pages from the sender's arena, which it needs no longer then."""
        slots = [slot for order in self.orders for slot in order.slots]
        pages = [page for order in self.orders for page in order.pages]
        read = self.sender.memory.read_slot
        self.contents = [read(slot, page.checksum) for slot, page in zip(slots, pages, strict=True)]
        self.release()

    def release(self) -> None:
        """Tell the sender that its slots are no longer needed, whether or not the pages have left."""
        for order in self.orders:
            self.sender.sent(order)


class SimulatedTransport:
    """The transport of one store process."""

    def __init__(
        self, incarnation: str, memory: SlotMemory, tell: Callable[[interface.PeerEvent], object],
        post: Callable[[str, Parcel], object], most: float = float("inf"),
    ) -> None:  # fmt: skip
        """`tell` takes events for the state. `post` sends a parcel to a store, by incarnation. At most `most` pages,
        or those of one order, go into a parcel."""
        self.incarnation, self.memory = incarnation, memory
        self._tell, self._post, self._most = tell, post, most
        self.expected: dict[int, dict[int, int]] = {}  # fetch → index → slot that may be written to
        self.sending: dict[int, tuple[int, ...]] = {}  # number of a SendPages → slots that may be read
        self._ordered: dict[tuple[str, int], list[interface.SendPages]] = {}  # by receiver and fetch; not sent yet

    def carry_out(self, order: interface.PeerOrder) -> None:
        """Take an order. SendPages waits for `flush`."""
        match order:
            case interface.ExpectPages(fetch=fetch, slots=slots):
                self.expected.setdefault(fetch, {}).update(slots)
            case interface.RetractFetch(fetch=fetch):
                self.expected.pop(fetch, None)
                self._tell(interface.FetchRetracted(fetch))
            case interface.AskPeer(source=source, request=request):
                self._post(source.store, Parcel(request, self))
            case interface.AnswerPeer(peer=peer, reply=reply):
                self._post(peer, Parcel(reply, self))
            case interface.SendPages(number=number, peer=peer, fetch=fetch, slots=slots):
                self.sending[number] = slots
                self._ordered.setdefault((peer, fetch), []).append(order)
            case interface.VerifySlot(number=number, slot=slot, checksum=checksum):
                contents = self.memory.read_slot(slot, checksum)
                self._tell(interface.SlotVerified(number, self.memory.matches(contents, checksum)))

    def flush(self) -> None:
        """Send the pages that were ordered since the last call, those of one fetch together."""
        ordered, self._ordered = self._ordered, {}
        for (peer, fetch), orders in ordered.items():
            for part in _parts(orders, self._most):
                pages = tuple(page for order in part for page in order.pages)
                self._post(peer, Parcel(FetchedPages(fetch, pages), self, part))

    def sent(self, order: interface.SendPages) -> None:
        """Let go of the slots of that order."""
        del self.sending[order.number]
        self._tell(interface.PagesSent(order.number))

    def arrive(self, parcel: Parcel) -> None:
        """Take a parcel from another store. Pages that no fetch expects any more are dropped."""
        sender = parcel.sender.incarnation
        match parcel.message:
            case FetchedPages(fetch=fetch, pages=pages):
                expected = self.expected.get(fetch, {})
                landed: list[tuple[int, int]] = []
                damaged: list[int] = []
                for page, contents in zip(pages, parcel.contents, strict=True):
                    if (slot := expected.get(page.index)) is None:
                        continue
                    self.memory.write(slot, contents)
                    if self.memory.matches(contents, page.checksum):
                        del expected[page.index]
                        landed.append((page.index, page.checksum))
                    else:
                        damaged.append(page.index)
                if landed or damaged:
                    self._tell(interface.PagesLanded(fetch, tuple(landed), tuple(damaged)))
            case FetchUnavailable() | FetchStatus():
                self._tell(interface.PeerReplied(sender, parcel.message))
            case request:
                self._tell(interface.PeerRequested(sender, request))


def _parts(orders: Iterable[interface.SendPages], most: float) -> Iterator[list[interface.SendPages]]:
    """Yield the orders in groups of at most `most` pages, in order. A larger order is a group of its own."""
    part: list[interface.SendPages] = []
    pages = 0
    for order in orders:
        if part and pages + len(order.pages) > most:
            yield part
            part, pages = [], 0
        part.append(order)
        pages += len(order.pages)
    if part:
        yield part
