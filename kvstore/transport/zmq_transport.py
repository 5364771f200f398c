"""Pages between stores over ZMQ and TCP: the thread that owns the sockets and touches the bytes.

    store's loop ──submit(PeerOrder)──▶ thread ──▶ sockets (baton.wire.pages)
                 ◀──poll(): PeerEvent──        ◀──

It decides nothing: which pages are wanted, how many at a time and what to do about lost ones is the state's, which
learns of losses by the stores' heartbeats. It writes only where it was told to expect a page, once; it reads a slot
until ZMQ needs its bytes no more, and then says PagesSent, whatever became of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from baton.errors import StartupError
from baton.messages import Peer
from baton.peer_protocol import FetchedPages, PageReply, PageRequest, SentPage
from baton.wire.pages import PageSockets, Sending
from kvstore.checksum import copy_page, page_checksum
from kvstore.transport import interface

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 2**22  # of pages in one message: there is work for each message, as well as for each page
_REQUESTS_PER_TURN = 64
_REPLIES_PER_TURN = 4  # of one store
_BACKLOG = 10_000  # events that the store's loop has not taken; with more we stop reading
_TURN = 1.0  # seconds between two turns with nothing to do
_FIRST_LOOK, _LAST_LOOK = 0.004, 0.032  # seconds between two looks whether pages have gone out
_IDLE = 60.0  # seconds until an unused link is closed
_SWEEP = 5.0  # seconds between two looks for such links


@dataclass(slots=True)
class PeerStats:
    """A snapshot of the transport: `links` are open now, the others have been counted since the start."""

    links: int = 0
    pages_in: int = 0  # pages that have landed intact
    pages_out: int = 0  # pages given to ZMQ
    damaged: int = 0  # pages that did not match their checksum
    unexpected: int = 0  # pages without a waiter, or of a wrong size
    malformed: int = 0  # messages
    dropped: int = 0  # messages that could not be sent, or were meant for another process


@dataclass(frozen=True, slots=True)
class _Use:
    arena: memoryview
    page_bytes: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class _Close:
    """Stop."""


_Order: TypeAlias = interface.PeerOrder | _Use | _Close


class Mailbox:
    """Orders one way and events the other, each with a descriptor that can be read while something is there."""

    def __init__(self) -> None:
        self.ordered = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.happened = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[_Order] = deque()
        self._events: deque[interface.PeerEvent] = deque()

    @property
    def backlog(self) -> int:
        return len(self._events)

    def order(self, order: _Order) -> None:
        self._orders.append(order)
        os.eventfd_write(self.ordered, 1)

    def orders(self) -> Iterator[_Order]:
        _drain(self.ordered)
        while self._orders:
            yield self._orders.popleft()

    def tell(self, event: interface.PeerEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self.happened, 1)

    def events(self) -> list[interface.PeerEvent]:
        _drain(self.happened)
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        os.close(self.ordered)
        os.close(self.happened)


def _drain(eventfd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(eventfd)


class ZmqTransport:
    """The loop's side of a page transport. Every method returns at once. A subclass may carry the bytes otherwise."""

    def __init__(self, me: Peer, endpoint: str = "tcp://127.0.0.1:0", silence_s: float = 5.0) -> None:
        """Listen on `endpoint`; a peer that neither reads nor speaks for `silence_s` is cut off. Raises PortInUse or
        StartupError."""
        self._mailbox = Mailbox()
        self._carrier = self._make(me.incarnation, endpoint, silence_s)
        self.endpoint: Final = self._carrier.endpoint
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def _make(self, me: str, endpoint: str, silence_s: float) -> Carrier:
        return Carrier(PageSockets(me, endpoint, silence_s), self._mailbox)

    def use(self, arena: memoryview, page_bytes: int, kv_heads: int) -> None:
        self._mailbox.order(_Use(arena, page_bytes, kv_heads))

    def submit(self, order: interface.PeerOrder) -> None:
        self._mailbox.order(order)

    def fileno(self) -> int:
        return self._mailbox.happened

    def poll(self) -> list[interface.PeerEvent]:
        """What has happened since the last call. Raises what the thread has died of."""
        if self._failure is not None:
            raise self._failure
        return self._mailbox.events()

    def stats(self) -> PeerStats:
        return self._carrier.stats()

    def close(self) -> None:
        """Stop at once, whatever is on its way. Afterwards no slot is read or written any more."""
        if self._closed:
            return
        self._closed = True
        self._mailbox.order(_Close())
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            log.error("the page transport does not end")  # so it keeps its descriptors
        else:
            self._mailbox.close()

    def _run(self) -> None:
        try:
            self._carrier.run()
        except BaseException as error:  # noqa: BLE001 - the loop shall hear of it, whatever it is
            self._failure = error
            os.eventfd_write(self._mailbox.happened, 1)


class Carrier:
    """The thread's side: it alone touches sockets and page bytes. A subclass that carries the bytes in another way
    replaces how pages are served (`serve`), what other messages mean (`request_received`, `reply_received`) and what is
    done every turn (`advance`)."""

    def __init__(self, sockets: PageSockets, mailbox: Mailbox) -> None:
        self.endpoint: Final = sockets.server.endpoint
        self._sockets = sockets
        self._server = sockets.server
        self._mailbox = mailbox
        self._arena = memoryview(b"")
        self._page_bytes = 0
        self._kv_heads = 1
        self._expected: dict[int, dict[int, int]] = {}  # fetch → index → slot
        self._sending: dict[int, Sending] = {}  # by the number of the SendPages
        self._used: dict[str, float] = {}  # store → when its link was last used
        self._refused: set[str] = set()  # endpoints that can't be one, of which the log knows
        self._look = _FIRST_LOOK
        self._next_sweep = 0.0
        self._count = PeerStats()

    def run(self) -> None:
        self._sockets.add_fd(self._mailbox.ordered)
        try:
            while True:
                if not self.full():
                    ready = self._sockets.wait(self.patience())
                else:
                    time.sleep(_LAST_LOOK)  # what can be read and is not would wake us at once
                    ready = {self._mailbox.ordered}
                if self._mailbox.ordered in ready:
                    for order in self._mailbox.orders():
                        if isinstance(order, _Close):
                            return
                        self._carry_out(order)
                self._receive(ready)
                self.advance()
                self._drop_idle()
        finally:
            self.close()

    def close(self) -> None:
        """The last that the thread does."""
        self._sockets.close()

    def stats(self) -> PeerStats:
        drops = self._sockets.drops
        return replace(self._count, links=len(self._sockets.links), malformed=drops.malformed, dropped=drops.dropped)

    def _carry_out(self, order: interface.PeerOrder | _Use) -> None:
        match order:
            case interface.ExpectPages(fetch=fetch, slots=slots):
                self._expected.setdefault(fetch, {}).update(slots)
            case interface.AskPeer():
                self._ask(order)
            case interface.RetractFetch(fetch=fetch):
                self._expected.pop(fetch, None)
                self.retract(fetch)
            case interface.AnswerPeer(peer=peer, reply=reply):
                self._server.send(peer, reply)
            case interface.SendPages():
                self.serve(order)
            case interface.VerifySlot(number=number, slot=slot, checksum=checksum):
                self._mailbox.tell(
                    interface.SlotVerified(number, page_checksum(self._slot(slot), self._kv_heads) == checksum)
                )
            case _Use(arena=arena, page_bytes=page_bytes, kv_heads=kv_heads):
                self._expected.clear()
                self.use(arena, page_bytes, kv_heads)

    def use(self, arena: memoryview, page_bytes: int, kv_heads: int) -> None:
        self._arena, self._page_bytes, self._kv_heads = arena, page_bytes, kv_heads

    def _slot(self, slot: int) -> memoryview:
        assert 0 <= slot < len(self._arena) // self._page_bytes, f"slot {slot} is not in the arena"
        return self._arena[slot * self._page_bytes : (slot + 1) * self._page_bytes]

    # --- pages out --------------------------------------------------------------------------------------------------

    def serve(self, order: interface.SendPages) -> None:
        sending = Sending()
        per_message = max(1, _MESSAGE_BYTES // self._page_bytes)
        for first in range(0, len(order.slots), per_message):
            here = slice(first, first + per_message)
            pages = FetchedPages(order.fetch, order.pages[here])
            if not self._server.send_pages(order.peer, pages, map(self._slot, order.slots[here]), sending):
                break  # they will be missed over there
            self._count.pages_out += len(pages.pages)
        self._sending[order.number] = sending
        self._look = _FIRST_LOOK

    def full(self) -> bool:
        """Whether so much waits for others that nothing more shall come in."""
        return self._mailbox.backlog >= _BACKLOG

    def patience(self) -> float:
        """How many seconds may pass until the next `advance`."""
        return self._look if self._sending else _TURN

    def advance(self) -> None:
        """Once every turn."""
        if not self._sending:
            return
        done = [number for number, sending in self._sending.items() if sending.done]
        for number in done:
            del self._sending[number]
            self._mailbox.tell(interface.PagesSent(number))
        self._look = _FIRST_LOOK if done else min(2 * self._look, _LAST_LOOK)

    def retract(self, fetch: int) -> None:
        """No page of this fetch is expected any more: say so when none is being written either."""
        self._mailbox.tell(interface.FetchRetracted(fetch))

    # --- words and pages in -----------------------------------------------------------------------------------------

    def _ask(self, order: interface.AskPeer) -> None:
        try:
            link = self._sockets.link(order.source.store, order.source.endpoint)
        except StartupError as error:
            self._sockets.drops.dropped += 1
            if order.source.endpoint not in self._refused:
                self._refused.add(order.source.endpoint)
                log.warning("can't ask %s for pages: %s", order.source.store, error)
            return
        self._used[link.store] = time.monotonic()
        link.send(order.request)

    def _receive(self, ready: Container[object]) -> None:
        if self._server.socket in ready:
            for peer, request in self._server.receive(_REQUESTS_PER_TURN):
                self.request_received(peer, request)
        for link in [link for link in self._sockets.links.values() if link.socket in ready]:
            for reply, frames in link.receive(_REPLIES_PER_TURN):
                self._used[link.store] = time.monotonic()
                self.reply_received(link.store, reply, frames)

    def request_received(self, peer: str, request: PageRequest) -> None:
        self._mailbox.tell(interface.PeerRequested(peer, request))

    def reply_received(self, store: str, reply: PageReply, frames: Sequence[memoryview]) -> None:
        if isinstance(reply, FetchedPages):
            self.land(reply.fetch, reply.pages, frames)
        else:
            self._mailbox.tell(interface.PeerReplied(store, reply))

    def land(self, fetch: int, pages: Sequence[SentPage], frames: Sequence[memoryview]) -> None:
        """Write each page that is expected into its slot, and then look at what is there: a page that has landed is
        never written again, because from then on others may read it."""
        expected = self._expected.get(fetch, {})
        landed: list[tuple[int, int]] = []
        damaged: set[int] = set()
        for page, frame in zip(pages, frames, strict=True):
            slot = expected.get(page.index)
            if slot is None or len(frame) != self._page_bytes:
                self._count.unexpected += 1
                continue
            if copy_page(self._slot(slot), frame, self._kv_heads) == page.checksum:
                landed.append((page.index, page.checksum))
                damaged.discard(page.index)
                del expected[page.index]
            else:
                self._count.damaged += 1
                damaged.add(page.index)
        if not expected:
            self._expected.pop(fetch, None)
        self._count.pages_in += len(landed)
        if landed or damaged:
            self._mailbox.tell(interface.PagesLanded(fetch, tuple(landed), tuple(sorted(damaged))))

    def _drop_idle(self) -> None:
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP
        self._used = {store: used for store, used in self._used.items() if store in self._sockets.links}
        for store in [store for store, used in self._used.items() if now - used >= _IDLE]:
            self._sockets.drop(self._sockets.links[store])
