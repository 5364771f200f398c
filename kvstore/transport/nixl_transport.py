"""Pages between stores by NIXL: the receiving store reads them out of the other's arena, by RDMA where there is any.

    serving store ──NixlOffer: where the pages lie──▶ wanting store ──NIXL READ──▶ its landing memory ──▶ slots
                  ◀──────────NixlOfferDone───────────

Words go over the same sockets as those of `kvstore.transport.zmq_transport`, and mean the same. Words behind an
NixlOffer are told only when its pages have landed, as they are where page bytes travel in front of them.

Pages are read into memory set apart for that, checked, and copied to their slots. So a read that is not wanted any more
can't write to a slot, whatever the network still does. That is worth the copy, because a read under way can't be called
back for certain. Nor can the serving store stop a reader. It gives its slots back when the reader has said
NixlOfferDone, or has been silent for long. A reader that still reads finds bytes that do not match their checksum.

NIXL and UCX neither encrypt nor authenticate readers: use them on networks that carry nothing else. With a loopback
endpoint UCX is kept to loopback, too.
"""

import ctypes
import importlib
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton import hosts
from baton.errors import StartupError
from baton.logs import RateLimit, RateLimitedLog
from baton.peer_protocol import FetchedPages, NixlOffer, NixlOfferDone, NixlReply, NixlRequest, PageReply, SentPage
from baton.wire.pages import PageSockets
from kvstore.transport.interface import PagesSent, PeerReplied, SendPages
from kvstore.transport.zmq_transport import Carrier, Mailbox, ZmqTransport

log = RateLimitedLog(logging.getLogger(__name__), RateLimit(burst=10))

_LANDING = 2**25  # bytes that are being read at a time
_PAGES_A_READ = 64
_LINE = 1_000  # offers and words of all stores that wait; with more we stop reading
_LOOK = 0.000_5  # seconds between two looks whether pages have come
_TURN = 1.0


class NixlTransport(ZmqTransport):
    """A `ZmqTransport` whose pages go by RDMA. Needs the package `nixl`; raises StartupError without it."""

    def _make(self, me: str, endpoint: str, silence_s: float) -> Carrier:
        if hosts.is_loopback(hosts.host_of(endpoint)):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would listen on every interface
        nixl = _library()
        sockets = PageSockets(me, endpoint, silence_s, NixlRequest, NixlReply)
        return _NixlCarrier(sockets, self._mailbox, nixl, me, silence_s)


class _Agent:
    """The few words of NIXL that are needed. All raise whatever NIXL raises: its errors have no common base."""

    def __init__(self, nixl: Any, name: str, arena: memoryview, landing: memoryview) -> None:
        self.name = name
        self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self._held = [ctypes.c_char.from_buffer(memory[:]) for memory in (arena, landing)]  # while the agent lives
        self.arena, self._landing = map(ctypes.addressof, self._held)  # addresses
        where = [(self.arena, len(arena), 0, ""), (self._landing, len(landing), 0, "")]
        self._agent.register_memory(where, mem_type="DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._known: dict[str, bytes] = {}  # other agents and their metadata

    def read(self, offer: NixlOffer, addresses: Sequence[int], landing: Sequence[int], page_bytes: int) -> Any:
        """Begin to read pages of another agent into these places of the landing memory; returns a handle."""
        if self._known.get(offer.agent) != offer.metadata:
            self.forget(offer.agent)
            self._known[offer.agent] = offer.metadata
            self._agent.add_remote_agent(offer.metadata)
        here = [(self._landing + place * page_bytes, page_bytes, 0) for place in landing]
        there = [(address, page_bytes, 0) for address in addresses]
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, mem_type="DRAM"),
            self._agent.get_xfer_descs(there, mem_type="DRAM"),
            offer.agent,
        )
        self._agent.transfer(handle)
        return handle

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        return self._agent.check_xfer_state(handle)

    def release(self, handle: Any) -> None:
        self._agent.release_xfer_handle(handle)

    def forget(self, name: str) -> None:
        """Forget an agent; do nothing for an unknown one. NIXL keeps a part of metadata that was cut short for good.
        The sender of such metadata can't be read from until it has another name, which is after its restart."""
        if self._known.pop(name, None) is not None:
            self._agent.remove_remote_agent(name)


@dataclass(eq=False, slots=True)
class _Arrival:
    """An offer of which some pages are not here yet."""

    offer: NixlOffer
    unread: deque[tuple[SentPage, int]] = field(default_factory=deque)  # with their addresses
    reads: int = 0  # under way

    @property
    def ended(self) -> bool:
        return not self.unread and not self.reads


@dataclass(eq=False, slots=True)
class _Read:
    arrival: _Arrival
    pages: list[SentPage]
    places: list[int]  # in the landing memory
    handle: Any
    until: float


class _NixlCarrier(Carrier):
    """The thread's side."""

    def __init__(self, sockets: PageSockets, mailbox: Mailbox, nixl: Any, me: str, silence_s: float) -> None:
        super().__init__(sockets, mailbox)
        self._nixl = nixl
        self._me = me
        self._silence_s = silence_s
        self._agent: _Agent | None = None
        self._agents = 0  # made so far
        self._landing = memoryview(b"")
        self._places: list[int] = []  # free pages of the landing memory
        self._offered: dict[int, str] = {}  # number of the SendPages → the store that may be reading
        self._heard: dict[str, float] = {}  # of these, when they last said something
        self._lines: dict[str, deque[_Arrival | PageReply]] = {}  # by store, in the order in which they came
        self._reads: list[_Read] = []

    def use(self, arena: memoryview, page_bytes: int, kv_heads: int) -> None:
        super().use(arena, page_bytes, kv_heads)
        self._end_reads()
        self._lines.clear()
        places = max(2, _LANDING // page_bytes)
        self._landing = memoryview(mmap.mmap(-1, places * page_bytes))
        self._places = list(range(places))
        self._agents += 1
        self._agent = _Agent(self._nixl, f"{self._me}/{self._agents}", arena, self._landing)

    def close(self) -> None:
        self._end_reads()
        self._agent = None
        super().close()

    def full(self) -> bool:
        return super().full() or sum(map(len, self._lines.values())) >= _LINE

    def patience(self) -> float:
        return _LOOK if self._reads else _TURN

    # --- pages out --------------------------------------------------------------------------------------------------

    def serve(self, order: SendPages) -> None:
        assert self._agent is not None
        addresses = tuple(self._agent.arena + slot * self._page_bytes for slot in order.slots)
        offer = NixlOffer(
            order.number, self._agent.name, self._agent.metadata,
            order.fetch, self._page_bytes, order.pages, addresses,
        )  # fmt: skip
        if not self._server.send(order.peer, offer):
            self._mailbox.tell(PagesSent(order.number))
            return
        self._offered[order.number] = order.peer
        self._heard[order.peer] = time.monotonic()
        self._count.pages_out += len(order.slots)

    def request_received(self, peer: str, request: NixlRequest) -> None:
        if peer in self._heard:
            self._heard[peer] = time.monotonic()
        if not isinstance(request, NixlOfferDone):
            super().request_received(peer, request)
        elif self._offered.get(request.offer) == peer:
            del self._offered[request.offer]
            self._mailbox.tell(PagesSent(request.offer))

    def _give_up_silent(self, now: float) -> None:
        for peer in [peer for peer, heard in self._heard.items() if now - heard > 2 * self._silence_s]:
            del self._heard[peer]
            for number in [number for number, reader in self._offered.items() if reader == peer]:
                del self._offered[number]
                self._mailbox.tell(PagesSent(number))

    # --- pages in ---------------------------------------------------------------------------------------------------

    def reply_received(self, store: str, reply: NixlReply, frames: Sequence[memoryview]) -> None:
        if isinstance(reply, FetchedPages):
            self._sockets.drops.malformed += 1  # from a store that does not speak NIXL
        elif isinstance(reply, NixlOffer):
            arrival = _Arrival(reply)
            if len(reply.addresses) == len(reply.pages) and reply.page_bytes == self._page_bytes:
                expected = self._expected.get(reply.fetch, {})
                due = [each for each in zip(reply.pages, reply.addresses, strict=True) if each[0].index in expected]
                self._count.unexpected += len(reply.pages) - len(due)
                arrival.unread.extend(due)
            else:
                self._count.unexpected += len(reply.pages)
            self._lines.setdefault(store, deque()).append(arrival)
        elif store in self._lines:
            self._lines[store].append(reply)
        else:
            super().reply_received(store, reply, frames)

    def advance(self) -> None:
        now = time.monotonic()
        for read in list(self._reads):
            self._look_at(read, now)
        for store, line in list(self._lines.items()):
            for arrival in [each for each in line if isinstance(each, _Arrival)]:
                while arrival.unread and self._places:
                    self._read(arrival, now)
            while line and not (isinstance(line[0], _Arrival) and not line[0].ended):
                self._end(store, line.popleft())
            if not line:
                del self._lines[store]
        self._give_up_silent(now)

    def _end(self, store: str, first: _Arrival | PageReply) -> None:
        if not isinstance(first, _Arrival):
            self._mailbox.tell(PeerReplied(store, first))
        elif (link := self._sockets.links.get(store)) is not None:
            link.send(NixlOfferDone(first.offer.offer))

    def _read(self, arrival: _Arrival, now: float) -> None:
        assert self._agent is not None
        count = min(len(arrival.unread), len(self._places), _PAGES_A_READ)
        batch = [arrival.unread.popleft() for _ in range(count)]
        places = [self._places.pop() for _ in range(count)]
        pages, addresses = [page for page, _ in batch], [address for _, address in batch]
        try:
            handle = self._agent.read(arrival.offer, addresses, places, self._page_bytes)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            self._places += places
            self._lose(arrival, count, error)
            return
        arrival.reads += 1
        self._reads.append(_Read(arrival, pages, places, handle, now + self._silence_s))

    def _look_at(self, read: _Read, now: float) -> None:
        assert self._agent is not None
        try:
            state = self._agent.state(read.handle)
        except Exception:  # noqa: BLE001 - whatever NIXL raises
            state = "ERR"
        if state == "PROC" and now < read.until:
            return
        if state == "DONE":
            frames = [self._landing[place * self._page_bytes : (place + 1) * self._page_bytes] for place in read.places]
            self.land(read.arrival.offer.fetch, read.pages, frames)
        self._drop(read)
        if state != "DONE":
            self._lose(read.arrival, len(read.pages), f"a read ended as {state}")

    def _drop(self, read: _Read) -> None:
        """Its places are used again even where NIXL still writes to them: pages are checked in their slots."""
        assert self._agent is not None
        self._reads.remove(read)
        read.arrival.reads -= 1
        self._places += read.places
        try:
            self._agent.release(read.handle)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            log.warning("NIXL keeps a read of pages that nobody waits for any more: %s", error)

    def _lose(self, arrival: _Arrival, unread: int, why: object) -> None:
        """These and the other pages of this offer will be missed by the store's state, which asks again."""
        assert self._agent is not None
        log.warning("can't read %d pages of fetch %d: %s", unread + len(arrival.unread), arrival.offer.fetch, why)
        arrival.unread.clear()
        try:
            self._agent.forget(arrival.offer.agent)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            log.warning("NIXL keeps another store: %s", error)

    def _end_reads(self) -> None:
        for read in list(self._reads):
            self._drop(read)


def _library() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise StartupError(f"the page transport nixl needs the package nixl, which can't be loaded: {error}") from None
