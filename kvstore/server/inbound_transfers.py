"""What a store is bringing into its arena: from its disk, and from other stores. Pure.

    want ──▶ reserve slots ──▶ read from disk, a share at a time ──────────────▶ landed, or failed
                    └────────▶ FetchPages ──▶ PagesLanded … (FetchCredit …) ──▶ landed, or failed: the next source
                                  └─ FetchUnavailable, silent, lost pages ──▶ retired ──FetchRetracted──▶ slots free

Every key is brought at most once at a time, for all its waiters. A source may have only the first pages of a fetch.
Then the others come from the next source. A fetch from another store has slots for some of its pages at once, and
grants credit for more as room comes free. Slots of a fetch that has ended stay reserved until the transport has said
that it writes there no more.

Words and pages are lost only with a connection. Heartbeats find each loss: the other side says (`FetchStatus`) that it
has sent more than has come, or does not know the fetch, and what is missing is wanted anew; so is a page whose
ChecksumMismatch seems to be lost. Credits are said again with each heartbeat, and so, by the other side, is
FetchUnavailable.
"""

# pyright: strict

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from baton import peer_protocol as peers
from baton.messages import PageSource
from kvstore.arena.host_page_pool import NOWHERE, HostPage, HostPagePool, SlotReservation
from kvstore.disk.index import DiskIndex
from kvstore.disk.orders import DiskOrder, ReadEnded
from kvstore.load_or_recompute import SpeedMeter
from kvstore.transport.interface import AskPeer, ExpectPages, PagesLanded, PeerOrder, RetractFetch

STORE = "store"
"""The writer of what the store brings in itself."""

_WINDOW_BYTES = 32 * 2**20  # on their way from one store at once: enough to fill a fast link
_WINDOW_PAGES = 16  # the least window
_WATCHED = 0.02  # seconds over which the speed of a hand-off is taken; in less, what lay in buffers would count much
_DOUBTS = 3  # times that one page may come damaged before its source is given up


ChainLink: TypeAlias = tuple[bytes, bytes]
"""A key, and the key before it in its chain (empty where that starts)."""


def links(keys: Sequence[bytes], parent: bytes) -> list[ChainLink]:
    """`keys`, each following the one before, and the first following `parent`."""
    return list(zip(keys, (parent, *keys[:-1]), strict=True))


@dataclass(slots=True)
class InboundResult:
    """The result of a call: orders for the threads, pages that have `landed` (each held once, for the caller to
    unhold), and keys that are not coming. `failed` keys were to be brought from a cache. The sources of a hand-off
    do not have `gone` keys, each with the stores that were asked (`tried`). `unmade` keys have no writer here any
    more. `contested`: other stores wait here for pages that this store itself awaits from a hand-off."""

    orders: list[PeerOrder | DiskOrder] = field(default_factory=list[PeerOrder | DiskOrder])
    landed: list[HostPage] = field(default_factory=list[HostPage])
    failed: list[bytes] = field(default_factory=list[bytes])
    gone: list[bytes] = field(default_factory=list[bytes])
    tried: dict[bytes, frozenset[str]] = field(default_factory=dict[bytes, frozenset[str]])
    unmade: list[bytes] = field(default_factory=list[bytes])
    contested: list[bytes] = field(default_factory=list[bytes])

    def merge(self, other: InboundResult) -> None:
        self.orders += other.orders
        self.landed += other.landed
        self.failed += other.failed
        self.gone += other.gone
        self.tried |= other.tried
        self.unmade += other.unmade
        self.contested += other.contested


@dataclass(eq=False, slots=True)
class RemoteFetch:
    """Pages on their way from another store; indices count in `keys`."""

    number: int
    sources: tuple[PageSource, ...]  # the first is asked now, the others if that fails
    keys: list[bytes]
    parents: list[bytes]  # of each key: some of the chain may be here, or come otherwise
    wait: bool  # also for pages that are only being made
    began: float
    tried: frozenset[str] = frozenset()  # stores that had none of these
    credit: int = 0  # pages before this index have a slot, or need none
    slots: dict[int, SlotReservation] = field(default_factory=dict[int, SlotReservation])  # granted and not landed
    # the same of pages that it will not bring
    abandoned: list[SlotReservation] = field(default_factory=list[SlotReservation])
    received: int = 0  # pages that came, damaged ones too
    duplicates: int = 0  # pages that will come or have come, and for which there was no slot: they were here already
    lost_pages: tuple[int, int] = (0, 0)  # pages sent and received, by the last FetchStatus
    doubts: dict[int, int] = field(default_factory=dict[int, int])
    doubted: int = 0  # the last beat before the last doubt
    beat: int | None = None  # the first FetchHeartbeat that listed it
    first_after: float | None = None  # seconds until the first page
    watched: tuple[float, int] | None = None  # since when, and how many pages had come by then
    stalled: bool = False  # at the last heartbeat it had no slot, and pages to come

    @property
    def source(self) -> PageSource:
        return self.sources[0]


@dataclass(slots=True)
class InboundStats:
    """Counts since the start, by tier, and what is on its way now."""

    disk_pages: int = 0
    remote_pages: int = 0
    disk_seconds: float = 0.0  # from asking to landing, summed over loads
    remote_seconds: float = 0.0
    failed: int = 0  # pages that were to come and did not
    damaged: int = 0  # pages that came from another store with bytes that did not match
    lost: int = 0  # times that pages were lost on the way and wanted anew
    loading: int = 0  # pages, now
    fetches: int = 0  # now


class InboundTransfers:
    """The one owner of slots that the store itself has reserved."""

    def __init__(
        self, pages: HostPagePool, disk: DiskIndex, page_bytes: int, share: float, heartbeat: float, silence: float,
        numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """At most `share` of the slots are on their way in at once; a source silent for `silence` seconds is given
        up. `page_bytes` may be 0 while there are no slots. `numbers` are for fetches, never one twice: pages of a fetch
        that ended may still be on a wire."""
        self._pages = pages
        self._disk = disk
        self._page_bytes = page_bytes
        self._allowed = max(1, int(pages.slots * share))
        self._window = max(_WINDOW_PAGES, _WINDOW_BYTES // max(1, page_bytes))
        self._heartbeat = heartbeat
        self._silence = silence
        # By key: a reservation is of a read from disk, None of one that waits for those before it.
        self._coming: dict[bytes, RemoteFetch | SlotReservation | None] = {}
        self._reading: dict[bytes, float] = {}  # when reads from disk began
        self._queued: deque[ChainLink] = deque()  # reads that wait for those before them
        self._fetches: dict[int, RemoteFetch] = {}
        self._retired: dict[int, list[SlotReservation]] = {}  # by fetch, until Retracted
        self._heard: dict[str, float] = {}  # when sources of fetches last said anything
        self._reserved = 0  # slots
        self._numbers = numbers
        self._beats = 0
        self._next_beat = float("-inf")
        self.remote_speed = SpeedMeter("remote")
        self._count = InboundStats()

    @property
    def idle(self) -> bool:
        """Nothing is on its way, and no thread will write to a slot of ours."""
        return not (self._coming or self._fetches or self._retired)

    def coming(self, key: bytes) -> bool:
        return key in self._coming

    def fetching(self, key: bytes) -> bool:
        """Whether the page comes from another store."""
        return isinstance(self._coming.get(key), RemoteFetch)

    def fetch_of(self, key: bytes) -> int | None:
        """The number of the fetch that brings the page from another store."""
        return fetch.number if isinstance(fetch := self._coming.get(key), RemoteFetch) else None

    def handing_off(self, key: bytes) -> bool:
        """Whether the page comes from another store, where it may still have to be made."""
        return isinstance(fetch := self._coming.get(key), RemoteFetch) and fetch.wait

    # --- begin --------------------------------------------------------------------------------------------------

    def read_disk(self, links: Sequence[ChainLink], now: float) -> InboundResult:
        """Bring pages that are on the disk, in the order of their chain. Those that our share has no slots for come
        after those that are on their way; when nothing is and there is no slot, they do not come."""
        missing = [link for link in links if self._missing(link[0])]
        self._coming |= {key: None for key, _ in missing}
        self._queued += missing
        return self._read_on(now)

    def _read_on(self, now: float) -> InboundResult:
        outcome = InboundResult()
        if 2 * len(self._reading) > self._allowed:
            return outcome  # many at a time are read faster than one by one
        batch: list[tuple[bytes, int]] = []
        while self._queued:
            key, parent = self._queued[0]
            if self._pages.find(key) is not None:  # a worker has sealed it here meanwhile
                del self._coming[key]
            elif not self._disk.has(key):
                outcome.failed.append(key)
                del self._coming[key]
            elif (reservation := self._reserve(key, parent)) is not None:
                self._coming[key] = reservation
                self._reading[key] = now
                batch.append((key, reservation.slot))
            elif self._reserved:
                break
            else:
                outcome.failed += [key for key, _ in self._queued]
                for key, _ in self._queued:
                    del self._coming[key]
                self._queued.clear()
                break
            self._queued.popleft()
        self._count.failed += len(outcome.failed)
        if batch:
            result = self._disk.read_pages(batch)
            outcome.orders += result.orders
            for ended in result.ended:
                assert isinstance(ended, ReadEnded)
                outcome.merge(self.read_ended(ended, now))
        return outcome

    def fetch(
        self, sources: Sequence[PageSource], links: Sequence[ChainLink], wait: bool, now: float,
        tried: frozenset[str] = frozenset(),
    ) -> InboundResult:  # fmt: skip
        """Bring pages from the first of `sources`, and if that fails from the next; `tried` are stores that have been
        asked before. Those that are on their way already come as they come."""
        missing = [link for link in links if self._missing(link[0])]
        if not missing:
            return InboundResult()
        keys, parents = [key for key, _ in missing], [parent for _, parent in missing]
        if not sources:
            self._count.failed += len(keys)
            return InboundResult(gone=keys, tried=dict.fromkeys(keys, tried)) if wait else InboundResult(failed=keys)
        fetch = RemoteFetch(next(self._numbers), tuple(sources), keys, parents, wait, began=now, tried=tried)
        self._fetches[fetch.number] = fetch
        self._coming |= dict.fromkeys(keys, fetch)
        self._heard.setdefault(fetch.source.store, now)
        outcome = self._grant(fetch)
        if not fetch.credit and not wait and not self._reserved:
            self._count.failed += len(keys)
            return self._end(fetch, outcome)  # no room, and cached pages are not worth waiting for it
        want = peers.FetchPages(fetch.number, self._page_bytes, b"".join(keys), wait, fetch.credit)
        outcome.orders.append(AskPeer(fetch.source, want))
        return outcome

    def prune(
        self, awaited: Callable[[bytes], bool], by_worker: Callable[[bytes], bool], named: Callable[[bytes, str], bool],
        now: float,
    ) -> InboundResult:  # fmt: skip
        """Give up reads that have not begun of pages without a waiter, and fetches of which no worker wants a page.
        A wait of another store is no reason to ask a third one, or two stores that wait for each other would do so
        for ever. A hand-off may wait at a store that none of its remaining waiters has `named`, for pages without a
        writer there. It goes on with the next source."""
        outcome = InboundResult()
        for key, _ in self._queued:
            if not awaited(key):
                del self._coming[key]
        self._queued = deque(link for link in self._queued if link[0] in self._coming)
        for fetch in list(self._fetches.values()):
            left = [key for key in fetch.keys if self._coming.get(key) is fetch]
            if not any(by_worker(key) for key in left):
                outcome = self._end(fetch, outcome)
            elif fetch.wait and not any(named(key, fetch.source.store) for key in left):
                self._try_next(fetch, outcome, now)
        return outcome

    # --- what comes -----------------------------------------------------------------------------------------------

    def landed(self, event: PagesLanded, now: float) -> InboundResult:
        outcome = InboundResult()
        fetch = self._fetches.get(event.fetch)
        if fetch is None:
            return outcome
        self._heard[fetch.source.store] = now
        if fetch.first_after is None:
            fetch.first_after = now - fetch.began
        for index, checksum in event.pages:
            fetch.received += 1
            if (reservation := fetch.slots.pop(index, None)) is None:
                continue
            self._count.remote_pages += 1
            del self._coming[reservation.key]
            outcome.landed.append(self._land(reservation, checksum))
        for index in event.damaged:
            fetch.received += 1
            self._count.damaged += 1
            fetch.doubted = self._beats
            fetch.doubts[index] = fetch.doubts.get(index, 0) + 1
            if fetch.doubts[index] > _DOUBTS:
                return self._try_next(fetch, outcome, now)
            outcome.orders.append(AskPeer(fetch.source, peers.ChecksumMismatch(fetch.number, index)))
        if fetch.wait:
            self._watch(fetch, now)
        return self._go_on(fetch, outcome, now)

    def _watch(self, fetch: RemoteFetch, now: float) -> None:
        """What a hand-off shows of the link. Where nothing but hand-offs crosses it, nothing else is known."""
        since, received = fetch.watched or (now, fetch.received)
        if now - since >= _WATCHED:
            self.remote_speed.at_least(now - since, (fetch.received - received) * self._page_bytes)
            since, received = now, fetch.received
        fetch.watched = since, received

    def peer_replied(self, store: str, reply: peers.PageReply, now: float) -> InboundResult:
        """Another store has said something about our fetches."""
        outcome = InboundResult()
        if store in self._heard:
            self._heard[store] = now
        match reply:
            case peers.FetchUnavailable(fetch=number, index=index):
                fetch = self._fetches.get(number)
                if fetch is not None and fetch.source.store == store:
                    self._lacks_from(fetch, index, outcome, now)
            case peers.FetchStatus(number=beat, fetches=served):
                sent = dict(served)
                for fetch in [f for f in self._fetches.values() if f.source.store == store]:
                    known = fetch.beat is None or fetch.beat > beat or fetch.number in sent
                    if not known or self._lacks(fetch, sent.get(fetch.number, 0)):
                        self._count.lost += 1
                        self._anew(fetch, fetch.sources, outcome, now)
            case _:
                pass
        return outcome

    def retracted(self, number: int, now: float) -> InboundResult:
        """The transport writes to the slots of that fetch no more."""
        for reservation in self._retired.pop(number, []):
            self._reserved -= 1
            self._pages.release(reservation)
        return self._go_on_all(now)

    def read_ended(self, event: ReadEnded, now: float) -> InboundResult:
        reservation = self._coming.pop(event.key)
        assert isinstance(reservation, SlotReservation)
        began = self._reading.pop(event.key)
        if event.ok:
            self._count.disk_pages += 1
            self._count.disk_seconds += now - began
            outcome = InboundResult(landed=[self._land(reservation, event.checksum)])
            outcome.merge(self._go_on_all(now))
            return outcome
        self._count.failed += 1
        self._reserved -= 1
        unmade = self._pages.abort(reservation)
        outcome = InboundResult(failed=[event.key], unmade=[key for key in unmade if key != event.key])
        outcome.merge(self._go_on_all(now))
        return outcome

    def tick(self, now: float, paused: float) -> InboundResult:
        """Time has passed: heartbeats to the stores that we fetch from, silence, slots that have come free."""
        for store in self._heard:
            self._heard[store] += paused
        if now < self._next_beat:
            return InboundResult()
        self._next_beat = now + self._heartbeat
        outcome = InboundResult()
        for fetch in list(self._fetches.values()):
            if now - self._heard[fetch.source.store] > self._silence:
                self._try_next(fetch, outcome, now)
            elif self._beats > fetch.doubted + 1 and not fetch.slots.keys().isdisjoint(fetch.doubts):
                self._count.lost += 1
                self._anew(fetch, fetch.sources, outcome, now)
        outcome.merge(self._go_on_all(now))
        self._unstall(outcome)
        by_store: dict[str, list[RemoteFetch]] = {}
        for fetch in self._fetches.values():
            by_store.setdefault(fetch.source.store, []).append(fetch)
        self._beats += bool(by_store)
        for fetches in by_store.values():
            source = fetches[0].source
            for fetch in fetches:
                fetch.beat = self._beats if fetch.beat is None else fetch.beat
                if fetch.slots:
                    outcome.orders.append(AskPeer(source, peers.FetchCredit(fetch.number, fetch.credit)))
            outcome.orders.append(AskPeer(source, peers.FetchHeartbeat(self._beats, tuple(f.number for f in fetches))))
        self._heard = {store: heard for store, heard in self._heard.items() if store in by_store}
        return outcome

    # --- internals --------------------------------------------------------------------------------------------------

    def _missing(self, key: bytes) -> bool:
        return key not in self._coming and self._pages.find(key) is None

    def _reserve(self, key: bytes, parent: bytes) -> SlotReservation | None:
        if self._reserved >= self._allowed:
            return None
        reservation = self._pages.reserve_one(STORE, parent, key)
        self._reserved += reservation is not None
        return reservation

    def _land(self, reservation: SlotReservation, checksum: int) -> HostPage:
        self._reserved -= 1
        return self._pages.seal_brought(reservation, checksum)

    def _grant(self, fetch: RemoteFetch, loose: bool = False) -> InboundResult:
        """Give slots to the pages that come next, as far as there are. `loose`: the next page is claimed without its
        parent, and so are those after it; then the pages before it may make room."""
        granted: list[tuple[int, int]] = []
        while fetch.credit < len(fetch.keys) and len(fetch.slots) < self._window:
            key = fetch.keys[fetch.credit]
            if self._pages.find(key) is not None:  # a worker has sealed it here meanwhile
                fetch.duplicates += 1
                del self._coming[key]
            elif (reservation := self._reserve(key, NOWHERE if loose else fetch.parents[fetch.credit])) is not None:
                loose = False  # the next page has no parent here anyway
                fetch.slots[fetch.credit] = reservation
                granted.append((fetch.credit, reservation.slot))
            else:
                break
            fetch.credit += 1
        return InboundResult([ExpectPages(fetch.number, tuple(granted))] if granted else [])

    def _go_on_all(self, now: float) -> InboundResult:
        """Slots may have come free: for reads, and for fetches."""
        outcome = self._read_on(now)
        for fetch in list(self._fetches.values()):
            self._extend(fetch, outcome)
            self._end_if_over(fetch, outcome, now)
        return outcome

    def _unstall(self, outcome: InboundResult) -> None:
        """Give slots to hand-offs that have had none since the last heartbeat, at the cost of their own earlier pages.

        A chain that stays whole needs a slot for each page. On two nodes that hand off to each other these slots may be
        held by finished prompts, each of which waits until the other node has got its pages."""
        for fetch in self._fetches.values():
            stalled = fetch.wait and not fetch.slots and fetch.credit < len(fetch.keys)
            if stalled and fetch.stalled:
                self._extend(fetch, outcome, loose=True)
            fetch.stalled = stalled

    def _extend(self, fetch: RemoteFetch, outcome: InboundResult, loose: bool = False) -> None:
        before = fetch.credit
        outcome.merge(self._grant(fetch, loose))
        if fetch.credit > before:
            outcome.orders.append(AskPeer(fetch.source, peers.FetchCredit(fetch.number, fetch.credit)))

    def _go_on(self, fetch: RemoteFetch, outcome: InboundResult, now: float) -> InboundResult:
        if len(fetch.slots) <= self._window // 2:
            self._extend(fetch, outcome)
        return self._end_if_over(fetch, outcome, now)

    def _end_if_over(self, fetch: RemoteFetch, outcome: InboundResult, now: float) -> InboundResult:
        """It is over when all has come; and cached pages are not worth waiting for a slot when none is coming free."""
        if fetch.credit < len(fetch.keys):
            return outcome if fetch.wait or self._reserved else self._end(fetch, outcome)
        if fetch.slots:
            return outcome
        if not fetch.wait and fetch.first_after is not None:
            seconds = now - fetch.began
            self.remote_speed.loaded(fetch.first_after, seconds, fetch.received, self._page_bytes)
            self._count.remote_seconds += seconds
        return self._end(fetch, outcome)

    def _lacks(self, fetch: RemoteFetch, sent: int) -> bool:
        """Whether pages were lost: more were sent than came. Some may have come as duplicates, which are not
        counted, so a loss is believed when it is reported twice."""
        before, fetch.lost_pages = fetch.lost_pages, (sent, fetch.received)
        return sent > fetch.received and (sent > fetch.received + fetch.duplicates or before == fetch.lost_pages)

    def _try_next(self, fetch: RemoteFetch, outcome: InboundResult, now: float) -> InboundResult:
        """This source has no more of it."""
        return self._anew(fetch, fetch.sources[1:], outcome, now)

    def _lacks_from(self, fetch: RemoteFetch, index: int, outcome: InboundResult, now: float) -> InboundResult:
        """This source has none of it from page `index` on; those before it are still to come."""
        if index >= len(fetch.keys):
            return outcome  # said again
        if not any(self._coming.get(key) is fetch for key in fetch.keys[:index]):
            return self._try_next(fetch, outcome, now)
        lost = list(zip(fetch.keys[index:], fetch.parents[index:], strict=True))
        del fetch.keys[index:], fetch.parents[index:]
        fetch.credit = min(fetch.credit, index)
        for each in sorted((each for each in fetch.slots if each >= index), reverse=True):
            reservation = fetch.slots.pop(each)
            fetch.abandoned.append(reservation)
            outcome.unmade += [key for key in self._pages.detach(reservation) if key != reservation.key]
        lost = [link for link in lost if self._coming.get(link[0]) is fetch]
        for key, _ in lost:
            del self._coming[key]
        tried = fetch.tried | {fetch.source.store}
        outcome.merge(self.fetch(fetch.sources[1:], lost, fetch.wait, now, tried))
        return self._end_if_over(fetch, outcome, now)

    def _anew(
        self, fetch: RemoteFetch, sources: Sequence[PageSource], outcome: InboundResult, now: float
    ) -> InboundResult:
        """What has not come is wanted again, under a new number, from the first of `sources`."""
        ended = self._end(fetch, InboundResult())
        left = [link for link in zip(fetch.keys, fetch.parents, strict=True) if self._missing(link[0])]
        tried = fetch.tried | {source.store for source in fetch.sources if source not in sources}
        again = self.fetch(sources, left, fetch.wait, now, tried)
        outcome.orders += [*ended.orders, *again.orders]
        outcome.failed += [key for key in ended.failed if key not in self._coming]
        outcome.gone += [key for key in ended.gone if key not in self._coming]
        outcome.tried |= again.tried
        outcome.unmade += ended.unmade
        return outcome

    def _end(self, fetch: RemoteFetch, outcome: InboundResult) -> InboundResult:
        """No more of this fetch: its slots are free once the transport has let go of them."""
        del self._fetches[fetch.number]
        lost = outcome.gone if fetch.wait else outcome.failed
        for key in fetch.keys:
            if self._coming.get(key) is fetch:
                del self._coming[key]
                lost.append(key)
        slots = list(fetch.slots.values())
        for reservation in reversed(slots):
            outcome.unmade += [key for key in self._pages.detach(reservation) if key != reservation.key]
        self._retired[fetch.number] = [*slots, *fetch.abandoned]
        outcome.orders += [RetractFetch(fetch.number), AskPeer(fetch.source, peers.CancelFetch(fetch.number))]
        return outcome

    # --- what can be read off -------------------------------------------------------------------------------------

    @property
    def reservations(self) -> Iterator[SlotReservation]:
        """Every slot that the store itself has reserved."""
        for each in self._coming.values():
            if isinstance(each, SlotReservation):
                yield each
        for fetch in self._fetches.values():
            yield from fetch.slots.values()
            yield from fetch.abandoned
        for slots in self._retired.values():
            yield from slots

    def stats(self) -> InboundStats:
        return replace(self._count, loading=len(self._coming), fetches=len(self._fetches))

    def validate(self) -> None:
        reservations = list(self.reservations)
        assert len(reservations) == self._reserved <= self._allowed
        assert all(reservation.writer == STORE or reservation.node is None for reservation in reservations)
        assert {key for key, _ in self._queued} == {key for key, each in self._coming.items() if each is None}
        assert set(self._reading) == {key for key, each in self._coming.items() if isinstance(each, SlotReservation)}
        for fetch in self._fetches.values():
            assert len(fetch.keys) == len(fetch.parents)
            assert all(self._coming[fetch.keys[index]] is fetch for index in fetch.slots)
            assert all(index < fetch.credit for index in fetch.slots)
        live = set(map(id, self._fetches.values()))
        assert all(id(each) in live for each in self._coming.values() if isinstance(each, RemoteFetch)), (
            "nobody brings it"
        )
