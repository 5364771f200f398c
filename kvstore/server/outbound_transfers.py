"""What other stores want of this one: their fetches, the credits they gave, and the pages on their way to them. Pure.

    FetchPages ──▶ for each page before the credit, in order:
        here                                               ──▶ held, SendPages ──PagesSent──▶ no longer held
        not here, wanted with `wait` or on the disk        ──▶ waited for
        neither, or only on its way from a third store     ──▶ FetchUnavailable

A promise to another store rests on a producer here: a worker that writes the page, or a read from this disk. If it
rested on yet another store, two stores could wait for each other. With `wait` the page may still have to be made here;
the router has ordered it, and the promise ends when the worker that makes it gives up.

A page stays held until the transport is done with its bytes, however long that takes. Its hold is ours, not the peer's,
so it never expires while the slot is being read.
"""

# pyright: strict

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton import peer_protocol as peers
from baton.errors import MalformedMessage
from kvstore.arena.host_page_pool import HostPage, HostPagePool
from kvstore.keys import split_keys
from kvstore.server.inbound_transfers import ChainLink, InboundResult
from kvstore.server.leases import PageWaiter, PageWaiters
from kvstore.transport.interface import AnswerPeer, SendPages, VerifySlot

_BATCH_BYTES = 4 * 2**20  # in one message
_MAX_FETCHES = 4_096  # of one peer; far more than an honest one has


@dataclass(eq=False, slots=True)
class PeerFetch(PageWaiter):
    """One fetch of another store."""

    peer: str  # incarnation
    credit: int = 0
    next: int = 0  # pages before this index were sent or are waited for
    sent: int = 0  # pages, repeated ones included
    gone: int | None = None  # pages from this index on are not coming


@dataclass(eq=False, slots=True)
class _DoubtedPage:
    fetch: PeerFetch
    index: int
    page: HostPage


@dataclass(frozen=True, slots=True)
class OutboundStats:
    """Counts since the start, and what is on its way now."""

    sent_pages: int
    peers: int
    fetches: int
    sending: int  # pages held for it


class OutboundTransfers:
    """Serves our sealed pages to other stores."""

    def __init__(
        self,
        pages: HostPagePool,
        waiting: PageWaiters,
        page_bytes: int,
        silence: float,
        bring: Callable[[Sequence[ChainLink], float], InboundResult],
        parent_on_disk: Callable[[bytes], bytes | None],
        corrupt: Callable[[HostPage], InboundResult],
        fetching: Callable[[bytes], bool],
        handing_off: Callable[[bytes], bool],
    ) -> None:
        """`bring` starts reading pages from the disk; `parent_on_disk` is what a page there follows (none: it is not
        there); `corrupt` drops a page that turned out bad; `fetching` tells which pages come from other stores, and
        `handing_off` which of these may still have to be made there."""
        self._pages = pages
        self._waiting = waiting
        self._page_bytes = page_bytes
        self._silence = silence
        self._bring = bring
        self._parent_on_disk = parent_on_disk
        self._corrupt = corrupt
        self._fetching = fetching
        self._handing_off = handing_off
        self._peers: dict[str, dict[int, PeerFetch]] = {}  # by incarnation and number
        self._heard: dict[str, float] = {}
        self._sending: dict[int, list[HostPage]] = {}  # by number of the SendPages
        self._doubted: dict[int, _DoubtedPage] = {}  # by number of the VerifySlot
        self._numbers = 0
        self._sent = 0

    @property
    def idle(self) -> bool:
        """No thread reads a slot on our behalf."""
        return not (self._sending or self._doubted)

    def peer_requested(self, peer: str, request: peers.PageRequest, now: float) -> InboundResult:
        """Another store has said something."""
        self._heard[peer] = now
        fetches = self._peers.setdefault(peer, {})
        match request:
            case peers.FetchPages():
                return self._fetch_pages(peer, fetches, request, now)
            case peers.FetchCredit(fetch=number, credit=credit):
                if (fetch := fetches.get(number)) is not None:
                    fetch.credit = max(fetch.credit, min(credit, len(fetch.keys)))
                    return self._go_on(fetch, now)
            case peers.ChecksumMismatch(fetch=number, index=index):
                if (fetch := fetches.get(number)) is not None and 0 <= index < fetch.next:
                    return self._recheck(fetch, index)
            case peers.CancelFetch(fetch=number):
                self._forget(fetches, number)
            case peers.FetchHeartbeat(number=beat, fetches=listed):
                for number in fetches.keys() - set(listed):
                    self._forget(fetches, number)
                # A peer that lists a fetch that has ended here has missed the end.
                gone = [
                    peers.FetchUnavailable(number, fetch.gone)
                    for number, fetch in fetches.items()
                    if fetch.gone is not None
                ]
                known = tuple((number, fetch.sent) for number, fetch in fetches.items())
                return InboundResult([AnswerPeer(peer, reply) for reply in (*gone, peers.FetchStatus(beat, known))])
        return InboundResult()

    def arrived(self, fetch: PeerFetch, index: int, page: HostPage) -> InboundResult:
        """A page that this fetch waited for is here."""
        return self._send(fetch, [(index, page)])

    def not_coming(self, fetch: PeerFetch, index: int) -> InboundResult:
        """The pages of this fetch from `index` on are not coming."""
        fetch.credit = fetch.next = len(fetch.keys)
        fetch.gone = index if fetch.gone is None else min(index, fetch.gone)
        return InboundResult([AnswerPeer(fetch.peer, peers.FetchUnavailable(fetch.number, fetch.gone))])

    def served(self, number: int) -> None:
        """The transport is done with the pages of that SendPages."""
        for page in self._sending.pop(number):
            self._pages.unhold(page)

    def checked(self, number: int, intact: bool) -> InboundResult:
        """Whether a page that a peer doubted is good: then it was damaged on its way, and is sent again."""
        doubted = self._doubted.pop(number)
        fetch, page = doubted.fetch, doubted.page
        outcome = InboundResult()
        known = self._peers.get(fetch.peer, {}).get(fetch.number) is fetch
        if intact and known:
            outcome = self._send(fetch, [(doubted.index, page)])
        elif not intact:
            outcome = self._corrupt(page)
            if known:
                self._waiting.remove_waiter(fetch, doubted.index)
                outcome.merge(self.not_coming(fetch, doubted.index))
        self._pages.unhold(page)
        return outcome

    def tick(self, now: float, paused: float) -> None:
        """Peers that have been silent for too long lose what they wanted; what is being sent to them goes on."""
        for peer in list(self._heard):
            self._heard[peer] += paused
            if now - self._heard[peer] > self._silence:
                fetches = self._peers.pop(peer)
                for number in list(fetches):
                    self._forget(fetches, number)
                del self._heard[peer]

    # --- internals --------------------------------------------------------------------------------------------------

    def _fetch_pages(
        self, peer: str, fetches: dict[int, PeerFetch], want: peers.FetchPages, now: float
    ) -> InboundResult:
        try:
            keys = split_keys(want.keys)
        except MalformedMessage:
            keys = []
        fits = want.page_bytes == self._page_bytes and len(set(keys)) == len(keys) and len(fetches) < _MAX_FETCHES
        if not fits or not keys:
            return InboundResult([AnswerPeer(peer, peers.FetchUnavailable(want.fetch, 0))])
        self._forget(fetches, want.fetch)
        fetch = PeerFetch(want.fetch, keys, want.wait, peer, min(want.credit, len(keys)))
        fetches[want.fetch] = fetch
        return self._go_on(fetch, now)

    def _go_on(self, fetch: PeerFetch, now: float) -> InboundResult:
        """Send what is here of the pages that there is credit for; wait for the others, or say that they won't come."""
        outcome = InboundResult()
        here: list[tuple[int, HostPage]] = []
        below: list[ChainLink] = []
        while fetch.next < fetch.credit:
            index, key = fetch.next, fetch.keys[fetch.next]
            if (page := self._pages.find(key)) is not None:
                here.append((index, page))
            elif (parent := self._parent_on_disk(key)) is not None and (fetch.wait or not self._fetching(key)):
                below.append((key, parent))
                self._waiting.add_waiter(fetch, index)
            elif fetch.wait:
                self._waiting.add_waiter(fetch, index)
            else:
                outcome.merge(self.not_coming(fetch, index))
                break
            if page is None and self._handing_off(key):
                outcome.contested.append(key)
            fetch.next += 1
        sent = self._send(fetch, here)
        outcome.orders[:0] = sent.orders
        if below:
            outcome.merge(self._bring(below, now))
        return outcome

    def _send(self, fetch: PeerFetch, pages: Sequence[tuple[int, HostPage]]) -> InboundResult:
        outcome = InboundResult()
        most = max(1, _BATCH_BYTES // max(1, self._page_bytes))
        for start in range(0, len(pages), most):
            batch = pages[start : start + most]
            self._numbers += 1
            for _, page in batch:
                self._pages.hold(page)
            self._sending[self._numbers] = [page for _, page in batch]
            named = tuple(peers.SentPage(index, page.checksum) for index, page in batch)
            slots = tuple(page.slot for _, page in batch)
            outcome.orders.append(SendPages(self._numbers, fetch.peer, fetch.number, named, slots))
            fetch.sent += len(batch)
            self._sent += len(batch)
        return outcome

    def _recheck(self, fetch: PeerFetch, index: int) -> InboundResult:
        page = self._pages.find(fetch.keys[index])
        if page is None:
            self._waiting.remove_waiter(fetch, index)
            return self.not_coming(fetch, index)
        self._numbers += 1
        self._pages.hold(page)
        self._doubted[self._numbers] = _DoubtedPage(fetch, index, page)
        return InboundResult([VerifySlot(self._numbers, page.slot, page.checksum)])

    def _forget(self, fetches: dict[int, PeerFetch], number: int) -> None:
        if (fetch := fetches.pop(number, None)) is not None:
            self._waiting.remove_waiter(fetch)

    # --- what can be read off -------------------------------------------------------------------------------------

    @property
    def fetches(self) -> Iterator[PeerFetch]:
        """Everything that other stores still want."""
        return (fetch for fetches in self._peers.values() for fetch in fetches.values())

    @property
    def held(self) -> Iterator[HostPage]:
        """A page for each hold of ours."""
        for pages in self._sending.values():
            yield from pages
        for doubted in self._doubted.values():
            yield doubted.page

    def stats(self) -> OutboundStats:
        return OutboundStats(
            sent_pages=self._sent,
            peers=len(self._peers),
            fetches=sum(map(len, self._peers.values())),
            sending=sum(map(len, self._sending.values())),
        )
