"""StoreState, rule by rule."""

from collections.abc import Sequence

import msgspec
import pytest

from baton import store_protocol as protocol
from baton.clock import Tick
from baton.config import ArenaBytes, DiskConfig, StoreConfig
from baton.messages import Namespace, PageSource, Peer
from baton.peer_protocol import FetchPages, FetchUnavailable
from kvstore.disk.file_names import PageFile
from kvstore.disk.index import DiskIndex
from kvstore.disk.orders import Opened, PagesListed
from kvstore.events.changes import PagesCleared, PagesRemoved, PagesStored
from kvstore.server import events
from kvstore.server.state import StoreState
from kvstore.transport.interface import AskPeer, PeerReplied
from tests.kvstore.chains import key, keys, parent
from tests.kvstore.store_fixtures import NAMESPACE, STORE, Rig, replies


def packed(chain: str, start: int = 0) -> bytes:
    return b"".join(keys(chain, start))


def reserve(lease: int, chain: str, start: int = 0) -> protocol.Reserve:
    return protocol.Reserve(lease, parent(chain, start), packed(chain, start))


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_page_is_readable_once_sealed_and_not_before(rig: Rig) -> None:
    writer, reader = rig.attach(1), rig.attach(2)
    (reserved,) = rig.say(writer, reserve(1, "abc"))
    assert isinstance(reserved, protocol.Reserved)
    assert len(set(reserved.slots)) == 3
    assert rig.say(reader, protocol.Acquire(1, packed("abc"))) == [protocol.PagesUnavailable(1, 0)]
    assert rig.say(writer, protocol.Seal(1, 0, (7, 8))) == [protocol.Sealed(1, 0, 2)]
    slots = reserved.slots
    assert rig.say(reader, protocol.Acquire(2, packed("abc"))) == [
        protocol.PagesReady(2, (protocol.LeasedPage(0, slots[0] or 0, 7), protocol.LeasedPage(1, slots[1] or 0, 8))),
        protocol.PagesUnavailable(2, 2),
    ]
    assert rig.changes() == [PagesCleared(), PagesStored(b"", tuple(keys("ab")))]


def test_a_partial_page_ends_with_its_last_hold(rig: Rig) -> None:
    writer, other, reader = rig.attach(1), rig.attach(2), rig.attach(3)
    for connection in (writer, other):
        assert isinstance(
            rig.say(connection, protocol.Reserve(1, b"", packed("abp"), partial=True))[0], protocol.Reserved
        )
    rig.say(writer, protocol.Seal(1, 0, (7, 8, 9), hold=True))
    assert rig.changes() == [PagesCleared(), PagesStored(b"", tuple(keys("ab")))]
    rig.say(writer, protocol.EndLease(1))
    (arrived,) = rig.say(reader, protocol.Acquire(1, packed("abp"), True, partial=True))
    assert len(arrived.pages) == 3, "another writer has it reserved: it may be told that it is there"
    rig.say(other, protocol.EndLease(1))
    assert rig.say(reader, protocol.Release(1, (0, 1, 2))) == [protocol.Released(1, (0, 1, 2), (True,) * 3)]
    assert rig.say(reader, protocol.Acquire(2, packed("abp"))) == [
        protocol.PagesReady(2, tuple(page for page in arrived.pages if page.index < 2)),
        protocol.PagesUnavailable(2, 2),
    ]
    assert rig.changes() == []
    rig.write(writer, 2, "abx")  # full pages follow the same parent
    assert rig.changes() == [PagesStored(key("ab"), (key("abx"),))]


def test_an_unheld_partial_page_waits_for_its_reader() -> None:
    rig = Rig(slots=4)
    writer, reader = rig.attach(1), rig.attach(2)
    rig.say(writer, protocol.Reserve(1, b"", packed("abp"), partial=True))
    rig.say(writer, protocol.Seal(1, 0, (7, 8, 9)))
    rig.say(writer, protocol.EndLease(1))
    (arrived,) = rig.say(reader, protocol.Acquire(1, packed("abp"), True, partial=True))
    assert len(arrived.pages) == 3
    rig.say(reader, protocol.EndLease(1))
    assert rig.state.stats(0.0).sealed == 2
    rig.say(writer, protocol.Reserve(2, b"", packed("abp"), partial=True))
    rig.say(writer, protocol.Seal(2, 2, (9,)))
    rig.say(writer, protocol.EndLease(2))
    rig.write(writer, 3, "xy")
    assert rig.has("ab")
    assert rig.state.stats(0.0).evictions == 1


def test_all_or_nothing_when_slots_run_out() -> None:
    rig = Rig(slots=4)
    writer, other = rig.attach(1), rig.attach(2)
    assert isinstance(rig.say(writer, reserve(1, "abc"))[0], protocol.Reserved)
    assert rig.say(other, reserve(2, "xy")) == [protocol.NotReserved(2, "full")]
    assert rig.state.stats(rig.now).reserved == 3
    assert isinstance(rig.say(other, reserve(2, "x"))[0], protocol.Reserved)


def test_a_chain_never_evicts_what_it_stands_on() -> None:
    rig = Rig(slots=4)
    writer = rig.attach(1)
    rig.write(writer, 1, "abc")
    assert rig.say(writer, reserve(2, "abcde")) == [protocol.NotReserved(2, "full")]
    assert rig.say(writer, reserve(2, "abcde", 3)) == [protocol.NotReserved(2, "full")]
    assert rig.has("abc")
    assert rig.state.stats(rig.now).evictions == 0


def test_one_writer_reserves_its_share_at_most() -> None:
    rig = Rig(slots=8, share=0.5)
    writer, other = rig.attach(1), rig.attach(2)
    assert isinstance(rig.say(writer, reserve(1, "abc"))[0], protocol.Reserved)
    assert rig.say(writer, reserve(2, "xy")) == [protocol.NotReserved(2, "quota")]
    assert isinstance(rig.say(other, reserve(1, "xy"))[0], protocol.Reserved)
    rig.say(writer, protocol.Seal(1, 0, (1,)))
    assert isinstance(rig.say(writer, reserve(2, "xy"))[0], protocol.Reserved)


def test_a_parent_must_be_here_or_the_same_writers(rig: Rig) -> None:
    writer, other = rig.attach(1), rig.attach(2)
    assert rig.say(writer, reserve(1, "ab", 1)) == [protocol.NotReserved(1, "orphan")]
    rig.say(writer, reserve(2, "a"))
    assert rig.say(other, reserve(1, "ab", 1)) == [protocol.NotReserved(1, "orphan")]
    assert isinstance(rig.say(writer, reserve(3, "ab", 1))[0], protocol.Reserved)
    rig.say(writer, protocol.Seal(2, 0, (1,)))
    assert isinstance(rig.say(other, reserve(1, "ac", 1))[0], protocol.Reserved)


def test_contradicting_keys_are_refused(rig: Rig) -> None:
    writer = rig.attach(1)
    rig.write(writer, 1, "ab")
    assert rig.say(writer, protocol.Reserve(2, b"", key("ab"))) == [protocol.NotReserved(2, "orphan")]
    assert rig.has("ab")


def test_what_is_here_already_need_not_be_written_and_is_held() -> None:
    rig = Rig(slots=4)
    writer, other = rig.attach(1), rig.attach(2)
    rig.write(writer, 1, "ab")
    (reserved,) = rig.say(other, reserve(1, "abc"))
    assert isinstance(reserved, protocol.Reserved)
    assert reserved.slots[:2] == (None, None)
    assert reserved.slots[2] is not None
    rig.say(other, protocol.Seal(1, 0, (0, 0, 5), hold=True))
    assert rig.state.stats(rig.now).held == 3
    assert rig.say(writer, reserve(2, "xy")) == [protocol.NotReserved(2, "full")]
    rig.say(other, protocol.EndLease(1))
    assert isinstance(rig.say(writer, reserve(2, "xy"))[0], protocol.Reserved)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    rig = Rig(slots=4)
    writer = rig.attach(1)
    rig.write(writer, 1, "ab")
    rig.write(writer, 2, "xy")
    rig.say(writer, protocol.Acquire(3, packed("ab")))
    rig.say(writer, protocol.EndLease(3))
    rig.changes()
    rig.write(writer, 4, "m")
    assert rig.changes() == [PagesRemoved((key("xy"),)), PagesStored(b"", (key("m"),))]
    rig.write(writer, 5, "n")
    assert rig.changes() == [PagesRemoved((key("x"),)), PagesStored(b"", (key("n"),))]
    assert rig.has("ab")


def test_waiters_hear_when_a_maker_gives_up_but_not_while_another_goes_on(rig: Rig) -> None:
    one, two, reader = (rig.attach(pid) for pid in (1, 2, 3))
    rig.say(one, reserve(1, "ab"))
    rig.say(two, reserve(1, "ab"))
    rig.say(reader, protocol.Acquire(1, packed("abc"), wait=True))
    assert rig.tell(one, protocol.EndLease(1)) == {}
    assert rig.state.stats(rig.now).waits == 3
    rig.say(two, protocol.Seal(1, 0, (1,)))
    assert rig.tell(two, protocol.EndLease(1)) == {reader: [protocol.PagesUnavailable(1, 1)]}
    assert rig.state.stats(rig.now).waits == 0
    assert rig.say(reader, protocol.Release(1, (0,))) == [protocol.Released(1, (0,), (True,))]


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_not_coming_names_the_first_page_lost_and_leaves_the_waits_before_it(rig: Rig) -> None:
    one, two, reader = (rig.attach(pid) for pid in (1, 2, 3))
    rig.say(one, reserve(1, "a"))
    rig.say(two, reserve(1, "abc"))
    rig.say(reader, protocol.Acquire(1, packed("abcd"), wait=True))
    assert rig.tell(two, protocol.EndLease(1)) == {reader: [protocol.PagesUnavailable(1, 1)]}
    assert rig.state.stats(rig.now).waits == 1
    assert [
        reply.lease
        for reply in rig.tell(one, protocol.Seal(1, 0, (1,)))[reader]
        if isinstance(reply, protocol.PagesReady)
    ] == [1]


def test_waits_without_a_maker_last_until_forgotten(rig: Rig) -> None:
    reader = rig.attach(1)
    rig.say(reader, protocol.Acquire(1, packed("ab"), wait=True))
    rig.now = 5.0
    rig.say(reader, protocol.LeaseHeartbeat((1,)))
    rig.now = 11.0
    assert rig.state.handle(Tick(), rig.now) == [events.SendReply(reader, protocol.StoreHeartbeat((1,)))]
    assert rig.state.stats(rig.now).waits == 2
    rig.say(reader, protocol.EndLease(1))
    assert rig.state.stats(rig.now).waits == 0


# --- holding ----------------------------------------------------------------------------------------------------------


def test_a_hold_that_is_not_renewed_expires_and_its_bytes_do_not_count(rig: Rig) -> None:
    writer, reader = rig.attach(1), rig.attach(2)
    rig.write(writer, 1, "ab")
    rig.say(reader, protocol.Acquire(1, packed("abc"), wait=True))
    rig.now = 9.9
    rig.do(Tick())
    assert rig.state.stats(rig.now).held == 2
    rig.now = 10.2
    assert protocol.PagesUnavailable(1, 2) in replies(rig.do(Tick()))[reader]
    assert rig.state.stats(rig.now).expired == 2
    assert rig.say(reader, protocol.Release(1, (0, 1))) == [protocol.Released(1, (0, 1), (False, False))]


def test_a_pause_of_the_store_ends_no_lease(rig: Rig) -> None:
    writer, reader = rig.attach(1), rig.attach(2)
    rig.write(writer, 1, "ab")
    rig.say(reader, protocol.Acquire(1, packed("ab")))
    rig.now = 100.0
    rig.do(Tick(paused=99.0))
    assert rig.say(reader, protocol.Release(1, (0, 1))) == [protocol.Released(1, (0, 1), (True, True))]


def test_release_tells_the_truth_about_each_page(rig: Rig) -> None:
    writer, reader = rig.attach(1), rig.attach(2)
    rig.write(writer, 1, "ab")
    rig.say(reader, protocol.Acquire(1, packed("abc"), wait=True))
    assert rig.say(reader, protocol.Release(1, (1, 2))) == [protocol.Released(1, (1, 2), (True, False))]
    assert rig.say(reader, protocol.Release(1, (0, 1))) == [protocol.Released(1, (0, 1), (True, False))]
    rig.say(reader, protocol.EndLease(1))
    assert rig.say(reader, protocol.Release(1, (0,))) == [protocol.Released(1, (0,), (False,))]


def test_what_a_heartbeat_leaves_out_is_forgotten(rig: Rig) -> None:
    worker, reader = rig.attach(1), rig.attach(2)
    rig.say(worker, reserve(1, "a"))
    rig.say(worker, reserve(2, "x"))
    rig.say(reader, protocol.Acquire(1, packed("a"), wait=True))
    assert rig.tell(worker, protocol.LeaseHeartbeat((2, 99))) == {reader: [protocol.PagesUnavailable(1, 0)]}
    assert rig.state.stats(rig.now).reserved == 1
    assert replies(rig.do(Tick())) == {worker: [protocol.StoreHeartbeat((2,))], reader: [protocol.StoreHeartbeat((1,))]}


# --- corruption -------------------------------------------------------------------------------------------------------


def test_only_a_holder_is_believed(rig: Rig) -> None:
    writer, reader = rig.attach(1), rig.attach(2)
    rig.write(writer, 1, "a")
    rig.say(reader, protocol.Acquire(1, packed("a")))
    rig.say(reader, protocol.Release(1, (0,)))
    rig.say(reader, protocol.PageCorrupt(1, 0))
    rig.say(reader, protocol.PageCorrupt(5, 0))
    assert rig.has("a")


# --- coming and going -------------------------------------------------------------------------------------------------


def test_death_before_the_end_of_the_connection_closes_it(rig: Rig) -> None:
    writer = rig.attach(1)
    rig.say(writer, reserve(1, "ab"))
    assert rig.do(events.WriterDied(1)) == [events.CloseConnection(writer)]
    assert rig.do(events.Disconnected(writer)) == []
    assert rig.state.stats(rig.now).free == 8


def test_a_process_that_comes_back_finds_its_reservations_and_may_seal_them(rig: Rig) -> None:
    first = rig.attach(1)
    rig.say(first, reserve(1, "ab"))
    rig.say(first, reserve(2, "xy"))
    rig.do(events.Disconnected(first))
    again = rig.attach(1)
    assert rig.state.stats(rig.now).unproven == 0
    rig.say(again, protocol.LeaseHeartbeat((1,)))
    assert rig.state.stats(rig.now).reserved == 2
    assert rig.say(again, protocol.Seal(1, 0, (1, 2))) == [protocol.Sealed(1, 0, 2)]


def test_another_incarnation_has_no_reservations(rig: Rig) -> None:
    first = rig.attach(1, "old")
    rig.say(first, reserve(1, "ab"))
    rig.do(events.Disconnected(first))
    for connection in (rig.attach(2, "old"), rig.attach(1, "new")):
        rig.say(connection, protocol.LeaseHeartbeat())
        assert rig.state.stats(rig.now).unproven == 2


def test_a_second_connection_of_a_process_replaces_the_first(rig: Rig) -> None:
    first = rig.attach(1)
    rig.say(first, reserve(1, "ab"))
    second = rig.connect(1)
    commands = rig.state.handle(
        heard_over_the_wire(second, protocol.Attach(Peer("decode", "w", "node", "i", 1), NAMESPACE, 100)), rig.now
    )
    assert commands == [events.CloseConnection(first), events.SendReply(second, protocol.Attached(STORE, 8, 100))]
    assert rig.say(first, protocol.EndLease(1)) == []
    assert rig.state.stats(rig.now).reserved == 2


def test_another_namespace_waits_for_the_last_worker() -> None:
    rig = Rig(slots=8)
    other = msgspec.structs.replace(NAMESPACE, kv_dtype="bfloat16")
    first = rig.attach(1)
    rig.say(first, reserve(1, "a"))
    rig.write(first, 2, "xy")
    rig.do(events.Disconnected(first))
    for namespace, size in ((other, 100), (NAMESPACE, 50)):
        second = rig.connect(2)
        (refusal,) = rig.say(second, protocol.Attach(Peer("decode", "w", "node", "j", 2), namespace, size))
        assert isinstance(refusal, protocol.AttachRefused)
        assert refusal.reason == "incompatible"
    rig.do(events.WriterDied(1))
    rig.changes()
    rig.attach(2, namespace=NAMESPACE)
    assert rig.has("xy"), "pages outlast those who use them"
    rig.do(events.WriterDied(2))
    rig.attach(3, namespace=other, page_bytes=50)
    assert rig.changes() == [PagesCleared()]
    assert rig.state.stats(rig.now).slots == 16
    assert rig.state.snapshot() == []


def test_dividing_anew_is_one_word_for_the_pages_of_all_tiers() -> None:
    """A second event for the pages on the disk would make the digest that of pages which no tier has."""
    index = DiskIndex(DiskConfig(path="/never/opened"))
    state = StoreState(STORE, StoreConfig(host_cache_bytes=ArenaBytes(1_000)), index, 2, 0.25, 3.0)

    def attach(connection: int, namespace: Namespace) -> None:
        state.handle(events.Connected(connection, connection), 0.0)
        worker = Peer("decode", "w", "node", f"i{connection}", connection)
        state.handle(events.CallReceived(connection, protocol.Attach(worker, namespace, 100)), 0.0)

    attach(1, NAMESPACE)
    state.drain_events()
    state.handle(PagesListed(1, (PageFile(key("a"), b"", 1), PageFile(key("ab"), key("a"), 1))), 0.0)
    state.handle(Opened(1, read_only="read-only file system"), 0.0)
    assert [medium for medium, _ in state.drain_events()] == ["DISK"]
    assert "disk" in [speed.tier for speed in state.load().tiers], "it can be read"
    state.handle(events.Disconnected(1), 0.0)
    attach(2, msgspec.structs.replace(NAMESPACE, numerics="other"))
    assert state.drain_events() == [("CPU", [PagesCleared()])]


def test_a_page_larger_than_the_arena_is_refused() -> None:
    rig = Rig(slots=1)
    (refusal,) = rig.say(rig.connect(1), protocol.Attach(Peer("decode", "w", "node", "i", 1), NAMESPACE, 101))
    assert isinstance(refusal, protocol.AttachRefused)
    assert "raise store.host_cache_bytes" in refusal.message


# --- two hand-offs that begin alike, made on different nodes ---


def _two_hand_offs() -> tuple[Rig, int, int, FetchPages]:
    """Workers that wait for the same pages: one from store s1, which is asked, the other from s2."""
    rig = Rig(slots=16)
    first, second = rig.attach(1, "first"), rig.attach(2, "second")
    for worker, store in ((first, "s1"), (second, "s2")):
        source = PageSource(store, f"tcp://{store}:1", 3)
        orders = rig.do(events.CallReceived(worker, protocol.Acquire(1, b"".join(keys("abc")), True, b"", (source,))))
        if worker == first:
            (want,) = [order.request for order in orders if isinstance(order, AskPeer)]
    assert isinstance(want, FetchPages)
    return rig, first, second, want


def _wants(commands: Sequence[events.StoreCommand]) -> list[tuple[str, bytes]]:
    asks = [each for each in commands if isinstance(each, AskPeer)]
    return [(ask.source.store, ask.request.keys) for ask in asks if isinstance(ask.request, FetchPages)]


def test_what_the_source_of_one_hand_off_lacks_comes_from_that_of_the_other() -> None:
    rig, *_, want = _two_hand_offs()
    commands = rig.do(PeerReplied("s1", FetchUnavailable(want.fetch, 0)))
    assert _wants(commands) == [("s2", want.keys)]
    assert not [each for each in commands if isinstance(each, events.SendReply)], "nobody waits in vain"
    (again,) = [each.request for each in commands if isinstance(each, AskPeer) and isinstance(each.request, FetchPages)]
    refused = rig.do(PeerReplied("s2", FetchUnavailable(again.fetch, 0)))
    assert sorted(each.connection for each in refused if isinstance(each, events.SendReply)) == [1, 2], (
        "both have been asked"
    )


def test_a_source_of_an_ended_lease_is_not_awaited() -> None:
    rig, first, _, want = _two_hand_offs()
    requests = _wants(rig.do(events.CallReceived(first, protocol.EndLease(1))))
    for _ in range(4):
        rig.now += 0.3
        requests += _wants(rig.do(Tick()))
    assert requests == [("s2", want.keys)]


# --- what may not be said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        protocol.Reserve(9, b"", bytes(17)),
        protocol.Reserve(9, b"", b""),
        protocol.Reserve(9, b"12345", key("q")),
        protocol.Reserve(9, b"", key("q") * 2),
        protocol.Reserve(1, b"", key("q")),
        protocol.Acquire(1, key("q")),
        protocol.Acquire(9, b""),
        protocol.Seal(9, 0, (1,)),
        protocol.Seal(1, 0, ()),
        protocol.Seal(1, 1, (1, 1)),
        protocol.Seal(1, 2, (1,)),
        protocol.Seal(1, 0, (1,)),
        protocol.Seal(2, 0, (1,)),
        protocol.Release(2, (1,)),
        protocol.Release(2, (-1,)),
        protocol.PageCorrupt(2, 1),
        protocol.Attach(Peer("decode", "w", "node", "i", 1), NAMESPACE, 100),
        protocol.ShareSlots(9, key("q"), 1, members=2, place=0),
    ],
)
def test_an_invalid_call_costs_its_connection_alone(rig: Rig, call: protocol.StoreCall) -> None:
    bad, good = rig.attach(1), rig.attach(2)
    rig.say(bad, reserve(1, "ab"))
    rig.say(bad, protocol.Seal(1, 0, (1,)))
    rig.say(bad, protocol.Acquire(2, key("a")))
    rig.say(good, protocol.Acquire(1, key("a")))
    commands = rig.state.handle(heard_over_the_wire(bad, call), rig.now)
    rig.state.validate()
    refusal, drop = commands
    assert isinstance(refusal, events.SendReply)
    assert isinstance(refusal.reply, protocol.AttachRefused)
    assert drop == events.CloseConnection(bad)
    assert rig.state.stats(rig.now).reserved == 1, "it may still be writing"
    assert rig.say(good, protocol.Release(1, (0,))) == [protocol.Released(1, (0,), (True,))]
    assert rig.say(bad, protocol.EndLease(1)) == []


def test_calls_before_attach_are_refused(rig: Rig) -> None:
    (refusal,) = rig.say(rig.connect(1), protocol.LeaseHeartbeat())
    assert isinstance(refusal, protocol.AttachRefused)
    stranger = rig.connect(2)
    (refusal,) = rig.say(stranger, protocol.Attach(Peer("decode", "w", "node", "i", 1), NAMESPACE, 100, protocol=99))
    assert isinstance(refusal, protocol.AttachRefused)
    assert refusal.reason == "incompatible"


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.state.MAX_LEASES", 2)
    rig = Rig()
    worker = rig.attach(1)
    for lease in (1, 2):
        rig.say(worker, protocol.Acquire(lease, key("a"), wait=True))
    assert isinstance(rig.say(worker, protocol.Acquire(3, key("a")))[0], protocol.AttachRefused)


def heard_over_the_wire(connection: int, call: protocol.StoreCall) -> events.CallReceived:
    """The call as it looks after a journey over the wire."""
    return events.CallReceived(
        connection, msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=protocol.StoreCall)
    )
