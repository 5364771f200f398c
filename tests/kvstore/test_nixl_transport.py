"""Pages that are read out of another store's arena by NIXL, here by UCX on the memory of one machine."""

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from baton.errors import StartupError
from baton.messages import Peer
from baton.peer_protocol import FetchHeartbeat, FetchStatus, FetchUnavailable, NixlOffer, SentPage
from kvstore.checksum import page_checksum
from kvstore.transport import interface
from kvstore.transport.nixl_transport import NixlTransport, _Agent
from tests.kvstore.test_zmq_transport import PAGE, SLOTS, Store, process_that_asks, stores_of

try:
    import nixl._api  # noqa: F401

    HAVE = True
except ImportError:
    HAVE = False

needs_nixl = pytest.mark.skipif(not HAVE, reason="the package nixl is not installed")


@pytest.fixture
def stores() -> Iterator[Callable[..., Store]]:
    yield from stores_of(NixlTransport)


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(StartupError, match="nixl"):
        NixlTransport(Peer("store", "a", "a", "a", 1))


@pytest.mark.technique("Pages by RDMA")
@needs_nixl
@pytest.mark.parametrize("page", [1_024, PAGE, 2**21])
def test_pages_arrive_exact_where_they_are_expected(stores: Callable[..., Store], page: int) -> None:
    a, b = stores("a", page=page), stores("b", page=page)
    a.expect(1, {index: 63 - index for index in range(40)})
    a.want(b)
    sent = [b.fill(slot) for slot in range(40)]
    for number in range(4):
        b.serve(number, "a", 1, {index: index for index in range(10 * number, 10 * number + 10)})
    b.do(interface.AnswerPeer("a", FetchStatus(3, ((1, 40),))))
    a.heard(interface.PeerReplied("b", FetchStatus(3, ((1, 40),))))
    # What was said behind the pages has come behind them.
    assert sorted(a.landed(1)) == list(range(40))
    assert [bytes(a.slot(63 - index)) for index in range(40)] == sent
    assert a.slot(23) == bytes(page)
    b.until(lambda: {interface.PagesSent(number) for number in range(4)} <= set(b.events))
    assert a.transport.stats().pages_in == b.transport.stats().pages_out == 40


@needs_nixl
def test_a_page_is_written_only_while_it_is_expected_and_only_once(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    a.want(b)
    for slot in range(8):
        b.fill(slot)
    b.serve(1, "a", 1, {0: 0})  # not expected yet
    b.do(interface.AnswerPeer("a", FetchUnavailable(0, 1)))
    a.heard(interface.PeerReplied("b", FetchUnavailable(0, 1)))
    a.expect(1, {0: 10, 1: 11})
    a.want(b, 2)
    b.serve(2, "a", 1, {0: 1, 5: 2})
    b.serve(3, "a", 1, {0: 3})  # a second time
    b.do(interface.AnswerPeer("a", FetchUnavailable(0, 2)))
    a.heard(interface.PeerReplied("b", FetchUnavailable(0, 2)))
    a.do(interface.RetractFetch(1))
    a.heard(interface.FetchRetracted(1))
    a.want(b, 3)
    b.serve(5, "a", 1, {1: 5})  # not expected any more
    b.do(interface.AnswerPeer("a", FetchUnavailable(0, 3)))
    a.heard(interface.PeerReplied("b", FetchUnavailable(0, 3)))
    assert a.landed(1) == [0]
    assert a.slot(10) in (b.slot(1), b.slot(3))
    assert all(a.slot(slot) == bytes(PAGE) for slot in range(SLOTS) if slot != 10)
    b.until(lambda: {interface.PagesSent(number) for number in (1, 2, 3, 5)} <= set(b.events))


@needs_nixl
def test_pages_that_do_not_match_their_checksum_are_expected_again(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    a.expect(1, {0: 0})
    a.want(b)
    b.fill(0, 7)
    b.serve(1, "a", 1, {0: 0}, wrong=1)
    a.heard(interface.PagesLanded(1, (), (0,)))
    b.serve(2, "a", 1, {0: 0})
    a.heard(interface.PagesLanded(1, ((0, page_checksum(b.slot(0), 1)),)))
    assert a.slot(0) == b.slot(0)


@needs_nixl
def test_slots_are_given_back_when_the_reader_is_gone(stores: Callable[..., Store]) -> None:
    b = stores("b", silence_s=1.0)
    with process_that_asks(b) as child:
        child.send_signal(signal.SIGSTOP)
        for number in range(4):
            b.serve(number, "a", 1, {index: index for index in range(SLOTS)})
        b.until(lambda: {interface.PagesSent(number) for number in range(4)} <= set(b.events))


@needs_nixl
def test_a_store_that_dies_loses_its_pages_and_nothing_else(stores: Callable[..., Store]) -> None:
    a, dead, b = stores("a", silence_s=2.0), Store("dead", kind=NixlTransport), stores("b")
    dead.fill(0)
    a.expect(1, {0: 0})
    a.want(dead)
    dead.serve(1, "a", 1, {0: 0})
    a.until(lambda: a.landed(1) == [0], dead)
    endpoint = dead.transport.endpoint
    dead.close()
    a.ask(dead, FetchHeartbeat(1), at=endpoint)
    a.expect(2, {0: 1})
    a.want(b, 2)
    b.fill(3)
    b.do(interface.SendPages(9, "a", 2, (SentPage(0, page_checksum(b.slot(3), 1)),), (3,)))
    a.until(lambda: a.landed(2) == [0], b)
    assert a.slot(1) == b.slot(3)


@needs_nixl
def test_offers_that_lie_write_nothing_and_end(stores: Callable[..., Store]) -> None:
    a, b = stores("a", page=1_024, silence_s=2.0), stores("b", page=1_024)
    a.expect(1, {0: 0, 1: 1})
    a.want(b)
    b.fill(0)
    good = b.transport._carrier._agent  # type: ignore[attr-defined]
    page = (SentPage(0, 1),)
    offers = [
        NixlOffer(1, "b/1", b"", 1, 1_024, page, (0,)),
        NixlOffer(2, "b/1", b"junk", 1, 1_024, page, (good.arena,)),
        NixlOffer(4, "b/1", good.metadata, 1, 1_024, page, (8,)),
        NixlOffer(5, "b/1", good.metadata, 1, 1_024, page, (2**62,)),
        NixlOffer(6, "b/1", good.metadata, 1, 1_024, page, (good.arena + 1_024 * SLOTS - 8,)),
        NixlOffer(7, "b/1", good.metadata, 1, 512, page, (good.arena,)),
        NixlOffer(8, "b/1", good.metadata, 1, 1_024, page, ()),
        NixlOffer(9, "b/2", good.metadata, 1, 1_024, page, (good.arena,)),
        NixlOffer(10, "b/1", good.metadata, 1, 1_024, page * 2_000, (good.arena,) * 2_000),
    ]
    for offer in offers:
        b.do(interface.AnswerPeer("a", offer))  # type: ignore[arg-type]
    b.do(interface.AnswerPeer("a", FetchUnavailable(0, 0)))
    a.heard(interface.PeerReplied("b", FetchUnavailable(0, 0)))
    assert a.landed(1) == []
    assert a.slot(1) == bytes(1_024)
    b.serve(99, "a", 1, {0: 0})
    a.until(lambda: a.landed(1) == [0], b)
    assert a.slot(0) == b.slot(0)
    b.heard(interface.PagesSent(99))


@needs_nixl
def test_a_fetch_is_retracted_only_when_nothing_is_read_into_its_slots(
    stores: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, over = _Agent.state, threading.Event()
    monkeypatch.setattr(_Agent, "state", lambda self, handle: state(self, handle) if over.is_set() else "PROC")
    a, b = stores("a"), stores("b")
    a.expect(1, {0: 0})
    a.want(b)
    b.fill(0)
    b.serve(1, "a", 1, {0: 0})
    a.until(lambda: bool(a.transport._carrier._reads), b)  # type: ignore[attr-defined]
    a.do(interface.RetractFetch(1), interface.VerifySlot(7, 5, page_checksum(a.slot(5), 1)))
    a.heard(interface.SlotVerified(7, True))
    assert interface.FetchRetracted(1) not in a.events
    over.set()
    a.heard(interface.FetchRetracted(1))
    b.heard(interface.PagesSent(1))
    assert a.landed(1) == []


@needs_nixl
@pytest.mark.parametrize("outcome", ["PROC", "ERR"])
def test_a_read_that_fails_or_does_not_end_is_ended_with_its_agent(
    stores: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Pages that another store has offered meanwhile are read by the next agent, without being offered again."""
    state, both = _Agent.state, threading.Event()

    def outcome_of(agent: _Agent, handle: object) -> str:
        return state(agent, handle) if agent.name != "a/2" else outcome if both.is_set() else "PROC"

    monkeypatch.setattr(_Agent, "state", outcome_of)
    a, b, c = stores("a", silence_s=2.0 if outcome == "PROC" else 30.0), stores("b"), stores("c")
    carrier = a.transport._carrier  # type: ignore[attr-defined]
    first, second = (0, 1), (2, 3)  # slots
    a.expect(1, dict(enumerate(first)))
    a.expect(2, dict(enumerate(second)))
    a.want(b, 1)
    a.want(c, 2)
    closed = weakref.ref(carrier._reader._agent)
    for number, store, slots in ((1, b, first), (2, c, second)):
        for slot in slots:
            store.fill(slot)
        store.serve(number, "a", number, dict(enumerate(slots)))
        a.until(lambda number=number: len(carrier._reads) == number or closed() is None, b, c)
    both.set()
    a.until(lambda: sorted(a.landed(2)) == [0, 1], c)
    assert closed() is None
    assert a.landed(1) == []
    b.serve(3, "a", 1, dict(enumerate(first)))  # as the state asks again
    a.until(lambda: sorted(a.landed(1)) == [0, 1], b)
    assert [a.slot(slot) for slot in (*first, *second)] == [*map(b.slot, first), *map(c.slot, second)]
    for store, number in ((b, 1), (c, 2), (b, 3)):
        store.heard(interface.PagesSent(number))
