"""One store's pages on all tiers, and the waiters for them. Pure.

                  InboundTransfers ── from the disk, from other stores ──▶ ┐
    workers ──seal──────────────────────────────────────────────▶ HostPagePool (the arena)
                                                                  │ PageWaiters: each waiter is granted the page
    disk  ◀── used often enough (AdmissionFilter) ────────────────┤
    other stores ◀── OutboundTransfers ───────────────────────────┤
    the operator ◀── PinnedPrefixes ──────────────────────────────┘

`kvstore.server.state` knows processes and their leases; this knows pages, and says to which leases they were granted
or refused.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.config import StoreConfig
from baton.messages import PageSegment, PageSource, PagesPinned, PinPages, TierSpeed
from baton.store_protocol import TierPages
from baton.waits import WaitEdge, WaitNode
from kvstore.arena.host_page_pool import NOWHERE, HostPage, HostPagePool
from kvstore.disk.admission_filter import AdmissionFilter
from kvstore.disk.index import DiskIndex
from kvstore.disk.orders import DiskEvent, DiskOrder, DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded
from kvstore.events.changes import page_runs
from kvstore.server.inbound_transfers import STORE, ChainLink, InboundResult, InboundTransfers, links
from kvstore.server.leases import Lease, PageWaiter, PageWaiters
from kvstore.server.outbound_transfers import OutboundTransfers, PeerFetch
from kvstore.server.pins import PinnedPrefixes
from kvstore.transport import interface


@dataclass(slots=True)
class TierResult:
    """What a call led to: orders for the threads, pages that leases hold now, and from where on they get no more."""

    orders: list[interface.PeerOrder | DiskOrder] = field(default_factory=list[interface.PeerOrder | DiskOrder])
    granted: dict[Lease, list[tuple[int, HostPage]]] = field(default_factory=dict[Lease, list[tuple[int, HostPage]]])
    refused: list[tuple[Lease, int]] = field(default_factory=list[tuple[Lease, int]])

    def merge(self, other: TierResult) -> None:
        self.orders += other.orders
        self.refused += other.refused
        for lease, pages in other.granted.items():
            self.granted.setdefault(lease, []).extend(pages)


class TierManager:
    """The pages of one namespace in one store."""

    def __init__(
        self, settings: StoreConfig, disk: DiskIndex, admission: AdmissionFilter, slots: int, page_bytes: int,
        heartbeat: float, silence: float, numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """`numbers`: for fetches from other stores, never one twice."""
        self.pages = HostPagePool(slots)
        self.waiting = PageWaiters()
        self.disk = disk
        self.loads = InboundTransfers(self.pages, disk, page_bytes, settings.load_share, heartbeat, silence, numbers)
        self.pins = PinnedPrefixes(self.pages, page_bytes, settings.pin_bytes)
        self.server = OutboundTransfers(
            self.pages, self.waiting, page_bytes, silence, self.loads.read_disk, disk.parent,
            lambda page: InboundResult(unmade=self._bad(page)), self.loads.fetching, self.loads.handing_off,
        )  # fmt: skip
        self.corrupt = 0  # pages found in the arena with bytes that do not match
        self._admission = admission
        self._demoting: dict[bytes, HostPage] = {}  # on their way to the disk
        self._forsaken: set[bytes] = set()  # keys on their way here whose makers have gone since
        self._heartbeat = heartbeat
        self._next_prune = float("-inf")

    @property
    def idle(self) -> bool:
        """No thread reads or writes a slot, and only workers wait or hold."""
        return self.loads.idle and self.server.idle and not self._demoting and not len(self.pins)

    # --- what workers do ------------------------------------------------------------------------------------------

    def sealed(self, pages: Sequence[HostPage]) -> TierResult:
        turn = TierResult()
        for page in pages:
            self._arrive(page, turn)
        turn.orders += self._used([page.key for page in pages if not page.partial])
        return turn

    def used(self, keys: Sequence[bytes]) -> TierResult:
        """Count a use of these cached pages; those used often enough are written to the disk."""
        self.disk.touch(keys)
        return TierResult(self._used(keys))

    def unmade(self, keys: Iterable[bytes]) -> TierResult:
        """These keys have no writer here any more."""
        turn = TierResult()
        self._refuse_all(keys, turn)
        return turn

    def drop(self, page: HostPage) -> TierResult:
        """A worker found that page's bytes to be wrong."""
        return self.unmade(self._bad(page))

    def below(self, lease: Lease, first: int) -> list[TierPages]:
        """What lower tiers have of the lease's pages from `first` on, without a gap."""
        runs: list[TierPages] = []
        if on_disk := self._on_disk(lease, first, len(lease.keys)):
            runs.append(TierPages(self.disk.speed, on_disk))
        most = max((source.pages for source in lease.sources), default=0)
        elsewhere = min(most, len(lease.keys)) - first - on_disk
        if elsewhere > 0:
            runs.append(TierPages(self.loads.remote_speed.speed, elsewhere))
        return runs

    def promote(self, lease: Lease, until: int, now: float) -> TierResult:
        """Bring the lease's pages before index `until` that are not here from lower tiers. The lease does not wait
        for a page that a hand-off brings and that another store awaits here: its maker may be the worker that asks.

        A page that the lease was granted before is not granted again, even if that hold has expired: what its reader
        has copied meanwhile would count, under the new hold, whatever it was."""
        first, lease.reached = lease.reached, max(lease.reached, until)
        turn = TierResult()
        for index in range(first, until):
            if (page := self.pages.find(lease.keys[index])) is not None:
                self._grant(lease, index, page, turn)
            else:
                self.waiting.add_waiter(lease, index)
        on_disk = first + self._on_disk(lease, first, until)
        chain = _chain(lease)
        turn.merge(self._settle(self.loads.read_disk(chain[first:on_disk], now), now))
        if on_disk < until:
            sources = [source for source in lease.sources if source.pages > on_disk]
            most = max((source.pages for source in sources), default=0)
            turn.merge(self._settle(self.loads.fetch(sources, chain[on_disk : min(until, most)], False, now), now))
            if most < until:
                self._refuse(lease.keys[max(most, on_disk) : until], turn, lambda waiter, index: waiter is lease)
        contested = [key for key in lease.keys[first:until] if self._contested(key)]
        self._cancel_waiters(contested, turn, lambda waiter, index: waiter is lease)
        return turn

    def _on_disk(self, lease: Lease, first: int, until: int) -> int:
        """How many of the lease's pages from `first` on the disk has, without a gap."""
        keys = lease.keys[first:until]
        if lease.apart:
            return next((index for index, key in enumerate(keys) if not self.disk.has(key)), len(keys))
        return self.disk.prefix(keys, lease.keys[first - 1] if first else lease.parent)

    def hand_off(self, lease: Lease, now: float) -> TierResult:
        """Bring the pages that the lease waits for: those on the own disk from there, the others from its sources.

        A page on the own disk is never asked of another store: that store may await it from this one."""
        chain, has = _chain(lease), self.disk.has
        turn = self._settle(self.loads.read_disk([chain[i] for i in sorted(lease.waits) if has(chain[i][0])], now), now)
        turn.merge(self._from_others(lease, now))
        return turn

    def _from_others(self, lease: Lease, now: float) -> TierResult:
        """Bring the pages of the lease that are not here, and that it waits for, from its sources as they are
        sealed. Pages that no source is believed to have or make are waited for here. A partial page is loose where
        it is brought."""
        chain = _chain(lease)
        missing: dict[tuple[PageSource, ...], list[ChainLink]] = {}
        for index in sorted(lease.waits):
            if sources := lease.sources_of(index):
                missing.setdefault(sources, []).append(chain[index])
        turn = TierResult()
        for sources, part in missing.items():
            turn.merge(self._settle(self.loads.fetch(sources, part, True, now), now))
        return turn

    def prune(self, now: float) -> TierResult:
        """Stop transfers without a waiter: leases have ended, or their pages came in another way."""
        waiting = self.waiting
        return self._settle(self.loads.prune(waiting.awaited, waiting.worker_awaits, waiting.named, now), now)

    # --- what threads, other stores and the operator do ------------------------------------------------------------

    def handle(self, event: interface.PeerEvent | DiskEvent, now: float) -> TierResult:
        match event:
            case interface.PagesLanded():
                return self._settle(self.loads.landed(event, now), now)
            case interface.PeerReplied(peer=peer, reply=reply):
                return self._settle(self.loads.peer_replied(peer, reply, now), now)
            case interface.FetchRetracted(fetch=fetch):
                return self._settle(self.loads.retracted(fetch, now), now)
            case interface.PeerRequested(peer=peer, request=request):
                return self._settle(self.server.peer_requested(peer, request, now), now)
            case interface.PagesSent(number=number):
                self.server.served(number)
                return TierResult()
            case interface.SlotVerified(number=number, intact=intact):
                return self._settle(self.server.checked(number, intact), now)
            case _:
                return self._disk_result(self.disk.handle(event), now)

    def pin(self, order: PinPages, router: str, now: float) -> tuple[PagesPinned, TierResult]:
        """What is pinned goes to the disk as well."""
        answer, pages = self.pins.pin(order, router, now)
        return answer, TierResult(self._demote(pages))

    def tick(self, now: float, paused: float) -> TierResult:
        turn = self._settle(self.loads.tick(now, paused), now)
        self.server.tick(now, paused)
        self.pins.tick(now)
        if now >= self._next_prune:
            self._next_prune = now + self._heartbeat
            self._forsaken = {key for key in self._forsaken if self.loads.coming(key)}
            turn.merge(self.prune(now))
        turn.merge(self._disk_result(self.disk.tick(now), now))
        return turn

    def open_disk(self, namespace: bytes, page_bytes: int, kv_heads: int) -> list[interface.PeerOrder | DiskOrder]:
        return list(self.disk.open(namespace, page_bytes, kv_heads).orders)

    # --- internals --------------------------------------------------------------------------------------------------

    def _settle(self, outcome: InboundResult, now: float) -> TierResult:
        """Answer the waiters for pages that have landed or failed. A failed cache does not concern the waiter for a
        hand-off: a prefill worker is making its pages, here or at its sources, which are asked then."""
        turn = TierResult(outcome.orders)
        for page in outcome.landed:
            self._arrive(page, turn)
            self.pages.unhold(page)
        contested = [key for key in outcome.contested if self._contested(key)]
        self._cancel_waiters(contested, turn, lambda waiter, index: isinstance(waiter, Lease) and not waiter.wait)
        if not (outcome.unmade or outcome.failed or outcome.gone):
            return turn
        turn.merge(self._ask_others(outcome, now))
        self._refuse_all(outcome.unmade, turn)
        self._refuse(outcome.failed, turn, lambda waiter, index: not waiter.wait)
        for waiter in self.waiting.waiters(outcome.failed):
            if isinstance(waiter, Lease):
                turn.merge(self._from_others(waiter, now))  # the disk has failed, or there was no slot for what it has
        self._refuse_all(self._forsaken.intersection(outcome.failed + outcome.gone), turn)
        self._refuse(outcome.gone, turn, lambda waiter, index: not waiter.wait or _has_sources(waiter, index))
        return turn

    def _ask_others(self, outcome: InboundResult, now: float) -> TierResult:
        """What the sources of one hand-off do not have, those of another may: prompts that begin alike are computed on
        different nodes."""
        missing: dict[tuple[tuple[PageSource, ...], frozenset[str]], list[ChainLink]] = {}
        chains: dict[Lease, list[ChainLink]] = {}
        for key in outcome.gone:
            tried = outcome.tried.get(key, frozenset())
            for lease, index in self.waiting.of(key).items():
                if not isinstance(lease, Lease) or not lease.wait:
                    continue
                if sources := tuple(source for source in lease.sources_of(index) if source.store not in tried):
                    chain = chains[lease] = chains.get(lease) or _chain(lease)
                    missing.setdefault((sources, tried), []).append(chain[index])
                    break
        turn = TierResult()
        for (sources, tried), part in missing.items():
            turn.merge(self._settle(self.loads.fetch(sources, part, True, now, tried), now))
        return turn

    def _arrive(self, page: HostPage, turn: TierResult) -> None:
        for waiter, index in self.waiting.page_arrived(page.key):
            if isinstance(waiter, Lease):
                self._grant(waiter, index, page, turn)
            elif isinstance(waiter, PeerFetch):
                turn.orders += self.server.arrived(waiter, index, page).orders

    def _grant(self, lease: Lease, index: int, page: HostPage, turn: TierResult) -> None:
        self.pages.hold(page)
        lease.holds[index] = page
        turn.granted.setdefault(lease, []).append((index, page))

    def _refuse_all(self, keys: Iterable[bytes], turn: TierResult) -> None:
        """These keys have no writer here any more. Those on their way may still come; otherwise they have no producer.

        Other stores do not wait for what a hand-off brings here. That hand-off may wait for theirs."""
        keys = list(keys)
        self._forsaken.update(key for key in keys if self.loads.coming(key))
        self._refuse(keys, turn, lambda waiter, index: True)
        lost = [key for key in keys if self.loads.handing_off(key) and not self._has_writer(key)]
        self._cancel_waiters(lost, turn, lambda waiter, index: not isinstance(waiter, Lease))

    def _has_writer(self, key: bytes) -> bool:
        """Return whether a worker of this node has reserved a slot for this page."""
        return any(writer != STORE for writer in self.pages.writers(key))

    def _contested(self, key: bytes) -> bool:
        """Return whether another store awaits here a page that only a hand-off from elsewhere brings.

        A cached page is not worth waiting for then. The worker that asks for it may be the one that has to make it, and
        the stores along the hand-off may wait for each other in a circle."""
        return self.loads.handing_off(key) and self.waiting.promised(key) and not self._has_writer(key)

    def _refuse(self, keys: Iterable[bytes], turn: TierResult, who: Callable[[PageWaiter, int], bool]) -> None:
        """Refuse these keys to the waiters that `who` selects, unless another producer makes or brings them."""
        gone = [key for key in keys if not self.loads.coming(key) and not self.pages.being_written(key)]
        self._cancel_waiters(gone, turn, who)

    def _cancel_waiters(self, gone: Iterable[bytes], turn: TierResult, who: Callable[[PageWaiter, int], bool]) -> None:
        for waiter, index in self.waiting.cancel(gone, who):
            if isinstance(waiter, Lease):
                turn.refused.append((waiter, index))
            elif isinstance(waiter, PeerFetch):
                turn.orders += self.server.not_coming(waiter, index).orders

    def _bad(self, page: HostPage) -> list[bytes]:
        """Return the keys without a writer because of it."""
        if page.dropped:
            return []
        self.corrupt += 1
        return self.pages.drop(page)

    def _used(self, keys: Sequence[bytes]) -> list[interface.PeerOrder | DiskOrder]:
        """A page goes to the disk with everything before it; the deepest tells which those are."""
        deepest: HostPage | None = None
        apart: list[HostPage] = []
        for key in keys:
            if self._admission.used(key) and self.disk.wants(key) and (page := self.pages.find(key)) is not None:
                if page.apart:
                    apart.append(page)
                else:
                    deepest = page
        return self._demote(apart if deepest is None else self.pages.chain(deepest))

    def _demote(self, chain: Sequence[HostPage]) -> list[interface.PeerOrder | DiskOrder]:
        batch: list[DiskPage] = []
        for page in chain:
            if page.node is None or page.key in self._demoting or not self.disk.wants(page.key):
                continue
            self.pages.hold(page)
            self._demoting[page.key] = page
            batch.append(DiskPage(page.key, page.node.parent_key, page.slot, page.checksum))
        if not batch:
            return []
        result = self.disk.write(batch)
        return self._disk_result(result, 0.0).orders

    def _disk_result(self, result: DiskResult, now: float) -> TierResult:
        turn = TierResult(list(result.orders))
        for ended in result.ended:
            turn.merge(self._disk_ended(ended, now))
        return turn

    def _disk_ended(self, ended: DiskOutcome, now: float) -> TierResult:
        match ended:
            case ReadEnded():
                return self._settle(self.loads.read_ended(ended, now), now)
            case WriteEnded(key=key, intact=intact):
                page = self._demoting.pop(key)
                turn = TierResult() if intact else self.unmade(self._bad(page))
                self.pages.unhold(page)
                return turn

    # --- what can be read off -------------------------------------------------------------------------------------

    @property
    def speeds(self) -> tuple[TierSpeed, ...]:
        """How fast each lower tier that there is brings pages."""
        disk = (self.disk.speed,) if self.disk.working else ()
        return (*disk, self.loads.remote_speed.speed)

    def waits(self, store: str, leases: Sequence[Lease]) -> Iterator[WaitEdge]:
        """Yield the waits for pages: of leases, of other stores' fetches, and of the pages for what brings them."""
        writers: dict[bytes, list[WaitNode]] = {}
        cached: dict[bytes, list[WaitNode]] = {}
        for lease in leases:
            incarnation = lease.owner.incarnation
            node = ("lease", incarnation, lease.number)
            for index in lease.waits:
                yield node, ("page", store, lease.keys[index])
                if not lease.wait:
                    cached.setdefault(lease.keys[index], []).append(node)
            for index, reservation in lease.reservations.items():
                if reservation.node is not None:
                    writers.setdefault(lease.keys[index], []).append(("place", incarnation, lease.prompt))
        for fetch in self.server.fetches:
            for index in fetch.waits:
                awaited = ("promise" if fetch.wait else "page", store, fetch.keys[index])
                yield ("fetch", fetch.peer, fetch.number), awaited
        for key in self.waiting.awaited_keys:
            number = self.loads.fetch_of(key)
            fetches: list[WaitNode] = [] if number is None else [("fetch", store, number)]
            # A hand-off from elsewhere keeps no promise. It is kept by a worker here, which may be one that waits.
            makers = cached.get(key, []) if self.loads.handing_off(key) else fetches
            for node in writers.get(key) or fetches:
                yield ("page", store, key), node
            for node in writers.get(key) or makers:
                yield ("promise", store, key), node

    def snapshot(self) -> list[PageSegment]:
        """Every page that can be found here, parents first, on each tier."""
        return [*page_runs(self.pages.pages(), "CPU"), *page_runs(self.disk.pages(), "DISK")]

    def validate(self, leases: Sequence[Lease]) -> None:
        self.pages.validate()
        self.loads.validate()
        self.disk.validate()
        self.waiting.validate([*leases, *self.server.fetches])
        holds: dict[int, int] = {}
        held = [page for lease in leases for page in lease.holds.values()]
        for page in (*held, *self.server.held, *self.pins.held, *self._demoting.values()):
            holds[id(page)] = holds.get(id(page), 0) + 1
            assert page.node is not None or page.dropped or page.holds
        everything = {id(page): page for page in (*held, *self.server.held, *self.pins.held, *self._demoting.values())}
        assert all(page.holds == holds[number] for number, page in everything.items())
        assert len(everything) == self.pages.held
        assert sum(page.node is None for page in everything.values()) == self.pages.unlisted
        writers = sum(len(lease.reservations) for lease in leases)
        shared = {id(lease.shared): lease.shared for lease in leases if lease.shared}
        writers += sum(len(each.reservations) for each in shared.values())
        assert writers + sum(1 for _ in self.loads.reservations) == self.pages.reserved
        for lease in leases:
            assert lease.waits.isdisjoint(lease.holds)
            for index in lease.waits:
                assert self.pages.find(lease.keys[index]) is None


def _chain(lease: Lease) -> list[ChainLink]:
    """Its pages. A partial one is loose where it is brought, and so are those that stand apart."""
    if lease.apart:
        return [(key, NOWHERE) for key in lease.keys]
    chain = links(lease.keys, lease.parent)
    if lease.partial:
        chain[-1] = lease.keys[-1], NOWHERE
    return chain


def _has_sources(waiter: PageWaiter, index: int) -> bool:
    return isinstance(waiter, Lease) and bool(waiter.sources_of(index))
