"""Pages between stores by NIXL: the receiving store reads them out of the other's arena, by RDMA where there is any.

    serving store ──NixlOffer: where the pages lie──▶ wanting store ──NIXL READ──▶ its slots
                  ◀──────────NixlOfferDone───────────

Words go over the same sockets as those of `kvstore.transport.zmq_transport`, and mean the same. Words behind an
NixlOffer are told only when its pages have landed, as they are where page bytes travel in front of them.

Pages are read straight into their slots, where threads compare them with their checksums. A slot that is being read
into belongs to its read, also when its fetch is retracted: FetchRetracted waits for the read's end. A read that fails
or takes too long can't be called back for certain. So the agent that reads is closed, which ends all that it does, and
another one reads what is left. The agent that others read from is another one, and stays. Nor can the serving store
stop a reader. It gives its slots back when the reader has said NixlOfferDone, or has been silent for long. A reader
that still reads finds bytes that do not match their checksum.

NIXL and UCX neither encrypt nor authenticate readers: use them on networks that carry nothing else. With a loopback
endpoint UCX is kept to loopback, too.
"""

import ctypes
import importlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import inf
from typing import Any

from baton import hosts
from baton.errors import StartupError
from baton.logs import RateLimit, RateLimitedLog
from baton.peer_protocol import FetchedPages, NixlOffer, NixlOfferDone, NixlReply, NixlRequest, PageReply, SentPage
from baton.wire.pages import PageSockets
from kvstore.checksum import page_checksum
from kvstore.transport.interface import PagesLanded, PagesSent, PeerReplied, SendPages
from kvstore.transport.zmq_transport import Carrier, Mailbox, ZmqTransport

log = RateLimitedLog(logging.getLogger(__name__), RateLimit(burst=10))

_AT_A_TIME = 2**25  # bytes that are being read
_PAGES_A_READ = 64
_CHECKERS = 2  # threads that compare checksums, each at memory speed
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

    def __init__(self, nixl: Any, name: str, arena: memoryview, serves: bool) -> None:
        """`serves`: others read from it, so it has a thread. Without, things go on when it is looked at."""
        self.name = name
        config = nixl.nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
        self._agent = nixl.nixl_agent(name, config)
        self._held = ctypes.c_char.from_buffer(arena[:])  # while the agent lives
        self.arena = ctypes.addressof(self._held)
        self._agent.register_memory([(self.arena, len(arena), 0, "")], mem_type="DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._known: dict[str, bytes] = {}  # other agents and their metadata

    def prepare(self, offer: NixlOffer, addresses: Sequence[int], slots: Sequence[int], page_bytes: int) -> Any:
        """Return the handle of a read of another agent's pages into these slots, which has not begun."""
        if self._known.get(offer.agent) != offer.metadata:
            self.forget(offer.agent)
            self._known[offer.agent] = offer.metadata
            self._agent.add_remote_agent(offer.metadata)
        here = [(self.arena + slot * page_bytes, page_bytes, 0) for slot in slots]
        there = [(address, page_bytes, 0) for address in addresses]
        return self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, mem_type="DRAM"),
            self._agent.get_xfer_descs(there, mem_type="DRAM"),
            offer.agent,
        )

    def begin(self, handle: Any) -> None:
        self._agent.transfer(handle)

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
    lost: bool = False  # what has not come yet

    @property
    def ended(self) -> bool:
        return not self.unread and not self.reads


@dataclass(eq=False, slots=True)
class _Read:
    """Pages that are being read into their slots, or compared there with their checksums."""

    arrival: _Arrival
    pages: list[tuple[SentPage, int]]  # with their addresses
    slots: list[int]
    handle: Any
    until: float
    intact: Future[list[bool]] | None = None  # once they have come

    @property
    def fetch(self) -> int:
        return self.arrival.offer.fetch


class _NixlCarrier(Carrier):
    """The thread's side."""

    def __init__(self, sockets: PageSockets, mailbox: Mailbox, nixl: Any, me: str, silence_s: float) -> None:
        super().__init__(sockets, mailbox)
        self._nixl = nixl
        self._me = me
        self._silence_s = silence_s
        self._agent: _Agent | None = None  # that others read from
        self._reader: _Agent | None = None
        self._agents = 0  # made so far
        self._room = 0  # pages that may be read now
        self._checkers = ThreadPoolExecutor(_CHECKERS, "checksums")
        self._offered: dict[int, str] = {}  # number of the SendPages → the store that may be reading
        self._heard: dict[str, float] = {}  # of these, when they last said something
        self._lines: dict[str, deque[_Arrival | PageReply]] = {}  # by store, in the order in which they came
        self._reads: list[_Read] = []
        self._retracted: set[int] = set()  # fetches of which a page is still being read

    def use(self, arena: memoryview, page_bytes: int, kv_heads: int) -> None:
        self._end_reads()
        super().use(arena, page_bytes, kv_heads)
        self._lines.clear()
        self._room = max(2, _AT_A_TIME // page_bytes)
        self._agent, self._reader = self._new_agent(serves=True), self._new_agent()

    def close(self) -> None:
        self._end_reads()
        self._agent = None
        self._checkers.shutdown()
        super().close()

    def _new_agent(self, serves: bool = False) -> _Agent:
        self._agents += 1
        return _Agent(self._nixl, f"{self._me}/{self._agents}", self._arena, serves)

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
                arrival.unread.extend(zip(reply.pages, reply.addresses, strict=True))
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
                while arrival.unread and self._room:
                    self._read(arrival)
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

    def retract(self, fetch: int) -> None:
        self._retracted.add(fetch)
        self._end_retracted(fetch)

    def _end_retracted(self, fetch: int) -> None:
        """Say so if no page of a fetch that is retracted is being read."""
        if fetch in self._retracted and all(read.fetch != fetch for read in self._reads):
            self._retracted.remove(fetch)
            super().retract(fetch)

    def _read(self, arrival: _Arrival) -> None:
        """Begin to read some of an offer's pages, each only while it is expected."""
        assert self._reader is not None
        offer, expected = arrival.offer, self._expected.get(arrival.offer.fetch, {})
        pages: list[tuple[SentPage, int]] = []
        slots: list[int] = []
        while arrival.unread and len(pages) < min(self._room, _PAGES_A_READ):
            page, address = arrival.unread.popleft()
            if (slot := expected.pop(page.index, None)) is None:
                self._count.unexpected += 1
                continue
            pages.append((page, address))
            slots.append(slot)
        if not pages:
            return
        read = _Read(arrival, pages, slots, None, time.monotonic() + self._silence_s)
        try:
            read.handle = self._reader.prepare(offer, [address for _, address in pages], slots, self._page_bytes)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            self._expect_again(read, range(len(pages)))
            self._lose(arrival, error)
            return
        arrival.reads += 1
        self._room -= len(pages)
        self._reads.append(read)
        try:
            self._reader.begin(read.handle)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            log.warning("a read of pages does not begin: %s", error)
            read.until = -inf

    def _look_at(self, read: _Read, now: float) -> None:
        if read.intact is not None:
            if read.intact.done():
                self._land(read, read.intact.result())
            return
        if read.handle is None:  # it has just ended with another one
            return
        assert self._reader is not None
        try:
            state = self._reader.state(read.handle)
        except Exception:  # noqa: BLE001 - whatever NIXL raises
            state = "ERR"
        if state == "DONE":
            try:
                self._reader.release(read.handle)
            except Exception as error:  # noqa: BLE001 - whatever NIXL raises
                log.warning("NIXL keeps a read of pages that have come: %s", error)
            read.handle = None
            read.intact = self._checkers.submit(self._are_intact, read)
        elif state != "PROC" or now >= read.until:
            self._lose(read.arrival, f"a read ended as {state}")
            self._read_anew()

    def _are_intact(self, read: _Read) -> list[bool]:
        """On a thread of its own."""
        return [
            page_checksum(self._slot(slot), self._kv_heads) == page.checksum
            for (page, _), slot in zip(read.pages, read.slots, strict=True)
        ]

    def _land(self, read: _Read, intact: Sequence[bool]) -> None:
        pages = [page for page, _ in read.pages]
        landed = tuple((page.index, page.checksum) for page, right in zip(pages, intact, strict=True) if right)
        damaged = [at for at, right in enumerate(intact) if not right]
        self._count.damaged += len(damaged)
        if read.fetch in self._retracted:
            self._count.unexpected += len(landed)
        else:
            self._count.pages_in += len(landed)
            self._expect_again(read, damaged)
            rubbish = tuple(sorted(pages[at].index for at in damaged))
            self._mailbox.tell(PagesLanded(read.fetch, landed, rubbish))
        self._end_read(read)

    def _expect_again(self, read: _Read, places: Iterable[int]) -> None:
        """These pages of a read have not come."""
        if read.fetch not in self._retracted:
            slots = {read.pages[at][0].index: read.slots[at] for at in places}
            self._expected.setdefault(read.fetch, {}).update(slots)

    def _end_read(self, read: _Read) -> None:
        read.handle = None
        read.arrival.reads -= 1
        self._room += len(read.pages)
        self._reads.remove(read)
        if not self._expected.get(read.fetch):
            self._expected.pop(read.fetch, None)
        self._end_retracted(read.fetch)

    def _lose(self, arrival: _Arrival, why: object) -> None:
        """The pages of this offer that have not come will be missed by the store's state, which asks again."""
        assert self._reader is not None
        log.warning("can't read all pages of fetch %d: %s", arrival.offer.fetch, why)
        arrival.lost = True
        arrival.unread.clear()
        try:
            self._reader.forget(arrival.offer.agent)
        except Exception as error:  # noqa: BLE001 - whatever NIXL raises
            log.warning("NIXL keeps another store: %s", error)

    def _read_anew(self) -> None:
        """End all reads for certain by closing the agent. Another one reads what is not lost."""
        reads = [read for read in self._reads if read.intact is None]
        for read in reads:
            self._expect_again(read, range(len(read.pages)))
            if not read.arrival.lost:
                read.arrival.unread.extendleft(reversed(read.pages))
            read.handle = None
        self._reader = None
        for read in reads:
            self._end_read(read)
        self._reader = self._new_agent()

    def _end_reads(self) -> None:
        """Read nothing any more, nor look at what has come."""
        wait([read.intact for read in self._reads if read.intact is not None])
        for read in self._reads:
            read.handle = None
        self._reader = None
        for read in list(self._reads):
            self._end_read(read)


def _library() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise StartupError(f"the page transport nixl needs the package nixl, which can't be loaded: {error}") from None
