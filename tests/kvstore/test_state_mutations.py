"""Each invariant of the store, broken on purpose: the state machine must notice every time.

A mutation replaces one method of the real code with one that is wrong in one way that a tired programmer might choose.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis.stateful import RULE_MARKER
from msgspec.structs import replace

from baton.errors import MalformedMessage
from baton.peer_protocol import FetchCredit
from kvstore.arena.eviction import LeafFirstLru
from kvstore.arena.host_page_pool import HostPage, HostPagePool, SlotReservation
from kvstore.disk.orders import WriteEnded
from kvstore.server.events import StoreCommand
from kvstore.server.inbound_transfers import InboundResult, InboundTransfers, RemoteFetch
from kvstore.server.leases import ClientProcess, Lease, PageWaiters
from kvstore.server.outbound_transfers import OutboundTransfers, PeerFetch
from kvstore.server.pins import PinnedPrefixes
from kvstore.server.state import StoreState
from kvstore.server.tier_manager import TierManager, TierResult
from kvstore.transport.interface import AskPeer, PagesLanded, SendPages
from tests.kvstore.test_tier_manager_machine import TiersMachine
from tests.support.fake_disk import FakeDisk, Finished, Write
from tests.support.thorough import run_machine
from tests.support.wait_graph import WaitCycle

pytestmark = pytest.mark.slow

Patch: TypeAlias = pytest.MonkeyPatch
Mutation: TypeAlias = Callable[[Patch], None]

MUTATIONS: list[tuple[Mutation, tuple[str, ...]]] = []


def mutation(*rules: str) -> Callable[[Mutation], Mutation]:
    """What it is called is what is wrong. With `rules` the machine has only these: all of them find it too, later."""

    def add(function: Mutation) -> Mutation:
        MUTATIONS.append((function, rules))
        return function

    return add


def machine(rules: Sequence[str]) -> type[TiersMachine]:
    everything = [name for name in dir(TiersMachine) if hasattr(getattr(TiersMachine, name), RULE_MARKER)]
    others = [name for name in everything if rules and name not in rules]
    return type("Machine", (TiersMachine,), dict.fromkeys(others))


# --- nothing is readable before it is sealed, or with other bytes -----------------------------------------------------


@mutation()
def a_page_is_sealed_when_it_is_reserved(patch: Patch) -> None:
    reserve = StoreState._reserve

    def sealing(self: StoreState, process: ClientProcess, call: Any, now: float) -> list[StoreCommand]:
        commands = reserve(self, process, call, now)
        lease = process.leases.get(call.lease)
        for index, reservation in list((lease.reservations if lease else {}).items()):
            if reservation.node is not None and reservation.node.value.page is None:
                self._pages.seal(lease.reservations.pop(index), 0, hold=False)
        return commands

    patch.setattr(StoreState, "_reserve", sealing)


@mutation("reserve", "seal")
def the_second_seal_wins(patch: Patch) -> None:
    seal = HostPagePool.seal

    def overwrite(self: HostPagePool, reservation: SlotReservation, checksum: int, hold: bool) -> HostPage | None:
        page = seal(self, reservation, checksum, hold)
        if page is not None:
            page.checksum = checksum
        return page

    patch.setattr(HostPagePool, "seal", overwrite)


@mutation("interrupted")
def damaged_pages_are_landed(patch: Patch) -> None:
    landed = InboundTransfers.landed

    def trusting(self: InboundTransfers, event: PagesLanded, now: float) -> InboundResult:
        pages = (*event.pages, *((index, 0) for index in event.damaged))
        return landed(self, PagesLanded(event.fetch, pages), now)

    patch.setattr(InboundTransfers, "landed", trusting)


@mutation("interrupted")
def a_doubt_is_answered_without_checking(patch: Patch) -> None:
    checked = OutboundTransfers.checked
    patch.setattr(OutboundTransfers, "checked", lambda self, number, intact: checked(self, number, True))


@mutation("from_disk")
def a_failed_read_is_landed(patch: Patch) -> None:
    ended = InboundTransfers.read_ended

    def trusting(self: InboundTransfers, event: Any, now: float) -> InboundResult:
        return ended(self, replace(event, ok=True), now)

    patch.setattr(InboundTransfers, "read_ended", trusting)


@mutation("write", "load", "odds_and_ends", "time_passes", "interrupted")
def a_page_is_granted_twice(patch: Patch) -> None:
    promote = TierManager.promote

    def again(self: TierManager, lease: Lease, until: int, now: float) -> TierResult:
        lease.reached = next((index for index in range(until) if index not in lease.holds), until)
        return promote(self, lease, until, now)

    patch.setattr(TierManager, "promote", again)


@mutation()
def a_dropped_page_counts_as_held(patch: Patch) -> None:
    def drop(self: HostPagePool, page: HostPage) -> list[bytes]:
        return []

    patch.setattr(HostPagePool, "drop", drop)


# --- no held page and no unproven reservation is reused ---------------------------------------------------------------


@mutation()
def a_hold_does_not_pin(patch: Patch) -> None:
    def hold(self: HostPagePool, page: HostPage) -> None:
        page.holds += 1
        self.held += page.holds == 1

    def unhold(self: HostPagePool, page: HostPage) -> None:
        page.holds -= 1
        self.held -= page.holds == 0

    patch.setattr(HostPagePool, "hold", hold)
    patch.setattr(HostPagePool, "unhold", unhold)
    patch.setattr(LeafFirstLru, "validate", lambda self, tree: None)


@mutation("reserve", "mishap")
def the_end_of_a_connection_frees_its_reservations(patch: Patch) -> None:
    disconnect = StoreState._disconnect

    def free(self: StoreState, connection: int) -> list[StoreCommand]:
        process = self._attached.get(connection)
        commands = self._end(list(process.leases.values())) if process else []
        return commands + disconnect(self, connection)

    patch.setattr(StoreState, "_disconnect", free)


@mutation()
def reservations_expire(patch: Patch) -> None:
    expire = StoreState._expire

    def also(self: StoreState, now: float) -> list[StoreCommand]:
        old = [t for t in self._leases() if t.reservations and now >= t.expires]
        return self._end(old) + expire(self, now)

    patch.setattr(StoreState, "_expire", also)


@mutation()
def retired_slots_are_free_before_the_transport_lets_go(patch: Patch) -> None:
    end = InboundTransfers._end

    def at_once(self: InboundTransfers, fetch: RemoteFetch, outcome: InboundResult) -> InboundResult:
        outcome = end(self, fetch, outcome)
        for reservation in self._retired[fetch.number]:
            self._reserved -= 1
            self._pages.release(reservation)
        self._retired[fetch.number] = []
        return outcome

    patch.setattr(InboundTransfers, "_end", at_once)


@mutation("interrupted", "write")
def a_page_is_released_when_it_is_served(patch: Patch) -> None:
    send = OutboundTransfers._send

    def release(self: OutboundTransfers, fetch: PeerFetch, pages: Sequence[tuple[int, HostPage]]) -> InboundResult:
        outcome = send(self, fetch, pages)
        for order in outcome.orders:
            assert isinstance(order, SendPages)
            for page in self._sending.pop(order.number):
                self._pages.unhold(page)
        return outcome

    patch.setattr(OutboundTransfers, "_send", release)
    patch.setattr(OutboundTransfers, "served", lambda self, number: None)


@mutation("interrupted")
def a_doubted_page_is_not_held(patch: Patch) -> None:
    doubt = OutboundTransfers._recheck

    def release(self: OutboundTransfers, fetch: PeerFetch, index: int) -> InboundResult:
        outcome = doubt(self, fetch, index)
        for doubted in list(self._doubted.values())[-len(outcome.orders) :]:
            if doubted.fetch is fetch and doubted.page.holds:
                self._pages.unhold(doubted.page)
        return outcome

    patch.setattr(OutboundTransfers, "_recheck", release)


@mutation()
def demotion_does_not_hold(patch: Patch) -> None:
    demote, ended = TierManager._demote, TierManager._disk_ended

    def release(self: TierManager, chain: Sequence[HostPage]) -> Any:
        before = set(self._demoting)
        orders = demote(self, chain)
        for key in self._demoting.keys() - before:
            self.pages.unhold(self._demoting.pop(key))
        return orders

    def forgive(self: TierManager, outcome: Any, now: float) -> TierResult:
        return TierResult() if isinstance(outcome, WriteEnded) else ended(self, outcome, now)

    patch.setattr(TierManager, "_demote", release)
    patch.setattr(TierManager, "_disk_ended", forgive)


@mutation()
def a_pin_does_not_hold(patch: Patch) -> None:
    pin = PinnedPrefixes.pin

    def release(self: PinnedPrefixes, order: Any, router: str, now: float) -> Any:
        answer, pages = pin(self, order, router, now)
        self.unpin(router, order.pin)
        return answer, pages

    patch.setattr(PinnedPrefixes, "pin", release)


@mutation()
def a_failed_read_frees_its_slot_twice(patch: Patch) -> None:
    abort = HostPagePool.abort

    def twice(self: HostPagePool, reservation: SlotReservation) -> list[bytes]:
        unmade = abort(self, reservation)
        self._free.append(reservation.slot)
        return unmade

    patch.setattr(HostPagePool, "abort", twice)


# --- every slot is accounted for --------------------------------------------------------------------------------------


@mutation("reserve", "seal")
def a_duplicate_is_never_freed(patch: Patch) -> None:
    seal = HostPagePool.seal

    def leak(self: HostPagePool, reservation: SlotReservation, checksum: int, hold: bool) -> HostPage | None:
        node = reservation.node
        duplicate = node is not None and node.value.page is not None
        page = seal(self, reservation, checksum, hold)
        if duplicate:
            self._free.remove(reservation.slot)
        return page

    patch.setattr(HostPagePool, "seal", leak)


@mutation("load", "write", "read")
def a_loose_page_is_never_freed(patch: Patch) -> None:
    unhold = HostPagePool.unhold

    def leak(self: HostPagePool, page: HostPage) -> None:
        if page.node is not None or page.dropped or page.holds > 1:
            unhold(self, page)

    patch.setattr(HostPagePool, "unhold", leak)


@mutation()
def a_served_page_stays_held(patch: Patch) -> None:
    patch.setattr(OutboundTransfers, "served", lambda self, number: None)


@mutation()
def a_fetch_goes_on_when_nobody_wants_it(patch: Patch) -> None:
    patch.setattr(TierManager, "prune", lambda self, now: TierResult())


@mutation("hand_off", "flow")
def two_stores_may_wait_for_each_other(patch: Patch) -> None:
    patch.setattr(PageWaiters, "worker_awaits", PageWaiters.awaited)
    patch.setattr(PageWaiters, "named", lambda self, key, store: True)


# --- no orphans -------------------------------------------------------------------------------------------------------


@mutation()
def an_evicted_parent_leaves_its_child(patch: Patch) -> None:
    def most_recent(self: LeafFirstLru[Any]) -> Any:
        _, node = self._order.popitem(last=True)
        return node

    patch.setattr(LeafFirstLru, "pop", most_recent)


@mutation()
def a_dropped_page_leaves_its_children(patch: Patch) -> None:
    def drop(self: HostPagePool, top: Any) -> list[bytes]:
        page = top.value.page
        top.value.page = None
        if page is not None:
            page.node, page.dropped = None, True
            self.unlisted += bool(page.holds)
            if not page.holds:
                self._free.append(page.slot)
        return []

    patch.setattr(HostPagePool, "_drop", drop)


@mutation("reserve", "seal")
def a_child_is_told_of_before_its_parent(patch: Patch) -> None:
    tell = HostPagePool._list

    def early(self: HostPagePool, node: Any) -> None:
        if node.parent is not None and not node.parent.value.whole:
            self._changes.stored(node.key, node.parent_key)
        tell(self, node)

    patch.setattr(HostPagePool, "_list", early)


@mutation()
def the_disk_tells_of_a_child_before_its_parent(patch: Patch) -> None:
    handle = FakeDisk.handle

    def early(self: FakeDisk, event: Any) -> Any:
        if isinstance(event, Finished) and isinstance(event.order, Write) and event.ok and event.intact:
            page = event.order.page
            if page.parent and page.parent not in self._pages:
                self._changes.stored(page.key, page.parent)
        return handle(self, event)

    patch.setattr(FakeDisk, "handle", early)


# --- every wait has a live producer -----------------------------------------------------------------------------------


@mutation("hand_off", "mishap", "odds_and_ends")
def nobody_hears_that_a_maker_has_gone(patch: Patch) -> None:
    patch.setattr(TierManager, "unmade", lambda self, keys: TierResult())


@mutation()
def nobody_hears_that_a_load_has_failed(patch: Patch) -> None:
    anew = InboundTransfers._anew

    def quiet(self: InboundTransfers, *arguments: Any) -> InboundResult:
        outcome = anew(self, *arguments)
        outcome.failed, outcome.gone = [], []
        return outcome

    patch.setattr(InboundTransfers, "_anew", quiet)


@mutation("interrupted", "odds_and_ends", "cut_off")
def a_load_is_forgotten_with_one_of_its_leases(patch: Patch) -> None:
    let_go = StoreState._end_lease_parts

    def forget(self: StoreState, lease: Lease) -> None:
        for index in lease.waits:
            self._tiers.loads._coming.pop(lease.keys[index], None)
        let_go(self, lease)

    patch.setattr(StoreState, "_end_lease_parts", forget)


@mutation("cut_off")
def a_lost_credit_is_never_said_again(patch: Patch) -> None:
    tick = InboundTransfers.tick

    def once(self: InboundTransfers, now: float, paused: float) -> InboundResult:
        outcome = tick(self, now, paused)
        outcome.orders = [
            o for o in outcome.orders if not (isinstance(o, AskPeer) and isinstance(o.request, FetchCredit))
        ]
        return outcome

    patch.setattr(InboundTransfers, "tick", once)


@mutation("cut_off")
def lost_pages_are_not_missed(patch: Patch) -> None:
    patch.setattr(InboundTransfers, "_lacks", lambda self, fetch, sent: False)


@mutation()
def a_silent_store_is_waited_for(patch: Patch) -> None:
    patch.setattr(InboundTransfers, "_try_next", lambda self, fetch, outcome, now: outcome)


# --- no wait rests on itself ------------------------------------------------------------------------------------------

CIRCLES: list[tuple[Mutation, tuple[str, ...]]] = []


def circle(*rules: str) -> Callable[[Mutation], Mutation]:
    """Like `mutation`. The machine must see the cycle of the wait-for graph itself, not what comes of it."""

    def add(function: Mutation) -> Mutation:
        CIRCLES.append((function, rules))
        return function

    return add


@circle("crossing")
def a_hand_off_asks_others_first_and_they_are_promised_what_it_awaits(patch: Patch) -> None:
    patch.setattr(TierManager, "hand_off", TierManager._from_others)
    patch.setattr(InboundTransfers, "fetching", lambda self, key: False)


@circle("crossing")
def a_cached_page_may_rest_on_a_hand_off_that_rests_on_it(patch: Patch) -> None:
    patch.setattr(TierManager, "_contested", lambda self, key: False)


# --- the test ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mutate", "rules"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_the_machine_notices(mutate: Mutation, rules: tuple[str, ...], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    # A check of ours, the worker's check of a reply, or what comes of it: a thing is not there twice.
    with pytest.raises((AssertionError, KeyError, MalformedMessage)):
        run_machine(machine(rules), 400, 60)


@pytest.mark.parametrize(("mutate", "rules"), CIRCLES, ids=[mutate.__name__ for mutate, _ in CIRCLES])
def test_the_machine_notices_a_circle_of_waits(mutate: Mutation, rules: tuple[str, ...], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(WaitCycle):
        run_machine(machine(rules), 400, 60)


def test_a_machine_with_fewer_rules_finds_nothing_wrong_by_itself() -> None:
    """So whatever it notices above is the mutation."""
    for rules in dict.fromkeys(rules for _, rules in (*MUTATIONS, *CIRCLES)):
        run_machine(machine(rules), 15, 40)
