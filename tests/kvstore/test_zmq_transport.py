"""Pages between stores, over real sockets: exact, once, only where expected; whatever hangs, lies or is cut."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import peer_protocol as peers
from baton.messages import Envelope, PageSource, Peer
from baton.wire import use_keys
from kvstore.checksum import page_checksum
from kvstore.transport import interface as tr
from kvstore.transport.zmq_transport import ZmqTransport
from tests.kvstore.relay import Relay
from tests.support import cluster_keys

pytestmark = pytest.mark.slow

DEADLINE = 60.0
PAGE = 128 * 1024
SLOTS = 64


class Store:
    """A transport with an arena, and what it has told."""

    def __init__(
        self,
        name: str,
        endpoint: str = "tcp://127.0.0.1:0",
        silence_s: float = 30.0,
        page: int = PAGE,
        kind: type[ZmqTransport] = ZmqTransport,
    ) -> None:
        self.name = name
        self.page = page
        self.transport = kind(Peer("store", name, name, name, os.getpid()), endpoint, silence_s)
        self.memory = memoryview(bytearray(page * SLOTS))
        self.transport.use(self.memory, page, 1)
        self.events: list[tr.PeerEvent] = []

    def close(self) -> None:
        self.transport.close()

    def do(self, *orders: tr.PeerOrder) -> None:
        for order in orders:
            self.transport.submit(order)

    def ask(self, other: Store, *requests: peers.PageRequest, at: str = "") -> None:
        source = PageSource(other.name, at or other.transport.endpoint, 0)
        self.do(*(tr.AskPeer(source, request) for request in requests))

    def want(self, other: Store, fetch: int = 1, at: str = "") -> None:
        """Ask for something, so that the other can answer: it has heard it when this returns. A connection that takes
        over from another may lose what was said first, so it is said again."""
        want = peers.FetchPages(fetch, self.page, b"k" * 16, True, 1)
        end = time.monotonic() + DEADLINE
        while tr.PeerRequested(self.name, want) not in other.events:
            assert time.monotonic() < end, "not heard in time"
            self.ask(other, want, at=at)
            patience = time.monotonic() + 2.0
            while tr.PeerRequested(self.name, want) not in other.events and time.monotonic() < patience:
                other.hear(0.1)

    def expect(self, fetch: int, slots: dict[int, int]) -> None:
        self.do(tr.ExpectPages(fetch, tuple(slots.items())))

    def serve(self, number: int, peer: str, fetch: int, slots: dict[int, int], wrong: int = 0) -> None:
        pages = tuple(peers.SentPage(index, page_checksum(self.slot(slot), 1) ^ wrong) for index, slot in slots.items())
        self.do(tr.SendPages(number, peer, fetch, pages, tuple(slots.values())))

    def slot(self, slot: int) -> memoryview:
        return self.memory[slot * self.page : (slot + 1) * self.page]

    def fill(self, slot: int, seed: int | None = None) -> bytes:
        """Put bytes of that seed (the slot's number if none) in a slot."""
        page = _page(slot if seed is None else seed, self.page)
        self.slot(slot)[:] = page
        return page

    def hear(self, seconds: float = 0.0) -> None:
        """Take what is there, after waiting for it for at most so long."""
        select.select([self.transport], [], [], seconds)
        self.events += self.transport.poll()

    def until(self, condition: Callable[[], bool], *others: Store) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"not in time; heard {self.events[-10:]}"
            self.hear(0.01 if others else 0.1)
            for other in others:
                other.hear()

    def heard(self, event: tr.PeerEvent) -> None:
        self.until(lambda: event in self.events)

    def requests_of(self, peer: str) -> list[object]:
        return [event.request for event in self.events if isinstance(event, tr.PeerRequested) and event.peer == peer]

    def landed(self, fetch: int) -> list[int]:
        """The indices that have landed, in order."""
        events = [event for event in self.events if isinstance(event, tr.PagesLanded) and event.fetch == fetch]
        return [index for event in events for index, _ in event.pages]


@contextmanager
def process_that_asks(b: Store) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose store "a" expects pages, and whose request `b` has heard. Its start may take longer than a test
    waits for words: NIXL imports torch, which took 67 s beside other tests."""
    kind = type(b.transport)
    program = (
        f"from {kind.__module__} import {kind.__name__} as kind; from tests.kvstore.test_zmq_transport import ask;"
        f"ask(kind, {b.transport.endpoint!r}, {b.page})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            b.heard(tr.PeerRequested("a", peers.FetchHeartbeat(1)))
            yield process
        finally:
            process.kill()


def ask(kind: type[ZmqTransport], endpoint: str, page: int) -> None:
    """What the process above does until it is killed."""
    use_keys(cluster_keys.KEYS)
    a = Store("a", page=page, kind=kind)
    a.expect(1, {index: index for index in range(SLOTS)})
    os.write(1, b"ready\n")
    a.do(tr.AskPeer(PageSource("b", endpoint, 0), peers.FetchHeartbeat(1)))
    a.until(lambda: False)


def _page(seed: int, size: int) -> bytes:
    word = msgspec.msgpack.encode(seed) + b"."
    return (word * (size // len(word) + 1))[:size]


def stores_of(kind: type[ZmqTransport]) -> Iterator[Callable[..., Store]]:
    """The body of a fixture: what makes stores, which are closed at the end."""
    with ExitStack() as cleanup:
        yield lambda name, **options: cleanup.enter_context(closing(Store(name, kind=kind, **options)))


@pytest.fixture
def stores() -> Iterator[Callable[..., Store]]:
    yield from stores_of(ZmqTransport)


@pytest.mark.parametrize("page", [1_024, 65_536, PAGE, 2**21])
def test_pages_arrive_exact_where_they_are_expected(stores: Callable[..., Store], page: int) -> None:
    a, b = stores("a", page=page), stores("b", page=page)
    a.expect(1, {index: 40 - index for index in range(20)})
    a.want(b)
    sent = [b.fill(slot) for slot in range(20)]
    b.serve(7, "a", 1, {index: index for index in range(20)})
    b.do(tr.AnswerPeer("a", peers.FetchStatus(3, ((1, 20),))))
    a.heard(tr.PeerReplied("b", peers.FetchStatus(3, ((1, 20),))))
    assert a.landed(1) == list(range(20))
    assert [bytes(a.slot(40 - index)) for index in range(20)] == sent
    assert a.slot(20) == bytes(page)
    assert a.slot(41) == bytes(page)
    b.heard(tr.PagesSent(7))
    out, into = b.transport.stats(), a.transport.stats()
    assert out.pages_out == into.pages_in == 20
    assert (into.malformed, into.dropped, into.damaged, into.unexpected) == (0, 0, 0, 0)


def test_what_is_said_is_heard_in_order(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    requests = [peers.FetchHeartbeat(beat, (1, 2)) for beat in range(300)]
    a.want(b)
    a.ask(b, *requests)
    b.until(lambda: len(b.requests_of("a")) == 301)
    assert b.requests_of("a")[1:] == requests
    b.fill(3)
    a.expect(1, {index: index for index in range(50)})
    a.ask(b, peers.CancelFetch(9))
    b.until(lambda: peers.CancelFetch(9) in b.requests_of("a"))
    for index in range(50):
        b.serve(index, "a", 1, {index: 3})
        b.do(tr.AnswerPeer("a", peers.FetchUnavailable(1, index)))
    a.heard(tr.PeerReplied("b", peers.FetchUnavailable(1, 49)))
    events = [event for event in a.events if isinstance(event, tr.PagesLanded | tr.PeerReplied)]
    checksum = page_checksum(b.slot(3), 1)
    assert events == [
        event for index in range(50)
        for event in (tr.PagesLanded(1, ((index, checksum),)), tr.PeerReplied("b", peers.FetchUnavailable(1, index)))
    ]  # fmt: skip


def test_a_page_is_written_only_while_it_is_expected_and_only_once(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    a.want(b)
    for slot in range(8):
        b.fill(slot)
    b.serve(1, "a", 1, {0: 0})  # not expected yet
    b.do(tr.AnswerPeer("a", peers.FetchUnavailable(0, 1)))
    a.heard(tr.PeerReplied("b", peers.FetchUnavailable(0, 1)))
    a.expect(1, {0: 10, 1: 11})
    a.want(b, 2)
    b.serve(2, "a", 1, {0: 1, 5: 2})
    b.serve(3, "a", 1, {0: 3})  # a second time
    b.serve(4, "a", 2, {0: 4})  # of a fetch that expects nothing
    b.do(tr.AnswerPeer("a", peers.FetchUnavailable(0, 2)))
    a.heard(tr.PeerReplied("b", peers.FetchUnavailable(0, 2)))
    a.do(tr.RetractFetch(1))
    a.heard(tr.FetchRetracted(1))
    a.want(b, 3)
    b.serve(5, "a", 1, {1: 5})  # not expected any more
    b.do(tr.AnswerPeer("a", peers.FetchUnavailable(0, 3)))
    a.heard(tr.PeerReplied("b", peers.FetchUnavailable(0, 3)))
    assert [event for event in a.events if isinstance(event, tr.PagesLanded)] == [
        tr.PagesLanded(1, ((0, page_checksum(b.slot(1), 1)),))
    ]
    assert a.slot(10) == b.slot(1)
    assert all(a.slot(slot) == bytes(PAGE) for slot in range(SLOTS) if slot != 10)
    assert a.transport.stats().unexpected == 5
    b.until(lambda: {tr.PagesSent(number) for number in range(1, 6)} <= set(b.events))


def test_pages_that_do_not_match_their_checksum_are_expected_again(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    a.expect(1, {0: 0, 1: 1})
    a.want(b)
    b.fill(0, 7)
    b.fill(1, 8)
    b.serve(1, "a", 1, {0: 0}, wrong=1)
    b.serve(2, "a", 1, {1: 1})
    a.until(lambda: a.landed(1) == [1])
    assert tr.PagesLanded(1, (), (0,)) in a.events
    b.serve(3, "a", 1, {0: 0})
    a.until(lambda: a.landed(1) == [1, 0])
    assert (a.slot(0), a.slot(1)) == (b.slot(0), b.slot(1))
    assert a.transport.stats().damaged == 1


def test_slots_are_checked(stores: Callable[..., Store]) -> None:
    a = stores("a")
    a.fill(5)
    a.do(tr.VerifySlot(1, 5, page_checksum(a.slot(5), 1)), tr.VerifySlot(2, 5, 77))
    a.until(lambda: len(a.events) == 2)
    assert a.events == [tr.SlotVerified(1, True), tr.SlotVerified(2, False)]


@pytest.fixture
def relays() -> Iterator[Callable[[Store], Relay]]:
    with ExitStack() as cleanup:
        yield lambda store: cleanup.enter_context(closing(Relay(store.transport.endpoint)))


def test_a_bit_flipped_on_the_wire_ends_its_connection_and_a_new_one_follows(
    stores: Callable[..., Store], relays: Callable[[Store], Relay]
) -> None:
    a, b = stores("a"), stores("b")
    relay = relays(b)
    a.expect(1, {index: index for index in range(8)})
    a.want(b, at=relay.endpoint)
    for slot in range(8):
        b.fill(slot)
    relay.flip_after(3 * PAGE + PAGE // 2)
    for slot in range(8):
        b.serve(slot, "a", 1, {slot: slot})
    a.until(lambda: {0, 1, 2} <= set(a.landed(1)))
    end = time.monotonic() + DEADLINE
    for number in itertools.count(8):
        if len(a.landed(1)) == 8:
            break
        assert time.monotonic() < end
        a.want(b, number, at=relay.endpoint)  # heard again, maybe still through the old connection
        b.serve(number, "a", 1, {slot: slot for slot in range(3, 8)})
        patience = time.monotonic() + 2.0
        while len(a.landed(1)) < 8 and time.monotonic() < patience:
            a.hear(0.1)
    assert not any(event.damaged for event in a.events if isinstance(event, tr.PagesLanded))
    assert a.memory[: 8 * PAGE] == b.memory[: 8 * PAGE]


@pytest.mark.parametrize("silent", [False, True])
def test_a_cut_connection_loses_pages_and_nothing_else(
    stores: Callable[..., Store], relays: Callable[[Store], Relay], silent: bool
) -> None:
    a, b = stores("a", silence_s=1.0), stores("b", silence_s=1.0)
    relay = relays(b)
    a.expect(1, {index: index for index in range(SLOTS)})
    a.want(b, at=relay.endpoint)
    for slot in range(SLOTS):
        b.fill(slot)
    if silent:
        relay.silence()
    for number in range(SLOTS):
        b.serve(number, "a", 1, {number: number})
    if silent:  # b finds out by itself that its peer reads nothing
        b.until(lambda: {tr.PagesSent(number) for number in range(SLOTS)} <= set(b.events), a)
        assert len(a.landed(1)) < SLOTS
    else:
        a.until(lambda: len(a.landed(1)) >= 1)
    relay.cut()
    b.until(lambda: {tr.PagesSent(number) for number in range(SLOTS)} <= set(b.events), a)
    # The asking store hears nothing more, asks again until it is heard, and gets what it lacks.
    beat = 0
    while not any(isinstance(request, peers.FetchHeartbeat) for request in b.requests_of("a")):
        beat += 1
        a.ask(b, peers.FetchHeartbeat(beat, (1,)), at=relay.endpoint)
        b.hear(0.05)
        a.hear()
        assert beat < 400
    missing = sorted(set(range(SLOTS)) - set(a.landed(1)))
    b.serve(999, "a", 1, {index: index for index in missing})
    a.until(lambda: len(a.landed(1)) == SLOTS, b)
    assert a.memory == b.memory


def test_a_store_that_comes_back_takes_over_from_its_dead_connection(
    stores: Callable[..., Store], relays: Callable[[Store], Relay]
) -> None:
    a, b = stores("a"), stores("b")
    first, second = relays(b), relays(b)
    a.want(b, 1, at=first.endpoint)
    first.silence()  # b will not know for 30 seconds
    a.expect(2, {0: 0})
    a.want(b, 2, at=second.endpoint)
    b.fill(0)
    b.serve(1, "a", 2, {0: 0})
    a.until(lambda: a.landed(2) == [0])


def test_a_new_store_at_an_old_endpoint_hears_nothing_meant_for_its_predecessor(stores: Callable[..., Store]) -> None:
    a, old = stores("a"), Store("old")
    endpoint = old.transport.endpoint
    a.want(old)
    old.close()
    a.ask(old, peers.FetchCredit(1, 1), at=endpoint)  # waits for a connection
    new = stores("new", endpoint=endpoint)
    time.sleep(0.3)  # so that the words for the old one most likely come first
    a.want(new, 2)
    a.expect(2, {0: 0})
    new.fill(1)
    a.ask(new, peers.FetchCredit(2, 1))
    new.until(lambda: peers.FetchCredit(2, 1) in new.requests_of("a"))
    new.serve(1, "a", 2, {0: 1})
    a.until(lambda: a.landed(2) == [0])
    assert all(
        isinstance(each, peers.FetchPages | peers.FetchCredit) and each.fetch == 2 for each in new.requests_of("a")
    )
    assert a.transport.stats().links == 1


def test_a_store_that_restarts_gets_nothing_meant_for_its_predecessor(stores: Callable[..., Store]) -> None:
    b, old = stores("b"), Store("old")
    old.expect(1, {0: 0})
    old.want(b)
    old.close()
    new = stores("new")
    new.expect(1, {0: 0})
    new.want(b)
    b.fill(0)
    b.serve(1, "old", 1, {0: 0})
    b.do(tr.AnswerPeer("old", peers.FetchUnavailable(1, 0)))
    b.heard(tr.PagesSent(1))
    b.do(tr.AnswerPeer("new", peers.FetchStatus(1)))
    new.heard(tr.PeerReplied("b", peers.FetchStatus(1)))
    assert new.landed(1) == []
    assert new.slot(0) == bytes(PAGE)


def test_orders_for_an_unknown_store_are_dropped(stores: Callable[..., Store]) -> None:
    b = stores("b")
    b.serve(1, "nobody", 1, {0: 0})
    b.do(tr.AnswerPeer("nobody", peers.FetchUnavailable(1, 0)))
    b.heard(tr.PagesSent(1))
    b.until(lambda: b.transport.stats().dropped == 2)


class Deaf:
    """Asks and then reads nothing, while its connection lives."""

    def __init__(self, store: Store) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 2**16)):
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.IDENTITY, b"deaf")
        cluster_keys.client(self.socket).connect(store.transport.endpoint)
        want = peers.FetchPages(1, PAGE, b"", False, 1)
        self.socket.send(msgspec.msgpack.encode(Envelope("deaf", store.name, 1, want)))
        store.heard(tr.PeerRequested("deaf", want))

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@pytest.mark.parametrize("page", [1_024, PAGE])
def test_a_slot_is_not_given_back_while_its_bytes_may_still_be_read(stores: Callable[..., Store], page: int) -> None:
    b = stores("b", page=page)
    deaf = Deaf(b)
    count = 2**26 // page
    for first in range(0, count, SLOTS):  # far more than all buffers between the two hold
        b.serve(first, "deaf", 1, {index: index for index in range(SLOTS)})
    last = count - SLOTS
    b.until(lambda: b.transport.stats().pages_out == count)
    for _ in range(5):
        b.hear(0.1)
    assert tr.PagesSent(last) not in b.events
    # A frame reads the slot when it leaves, not when it was sent: as long as there was no PagesSent, that is the
    # promise.
    deaf.close()
    b.until(lambda: tr.PagesSent(last) in b.events)
    assert len([event for event in b.events if isinstance(event, tr.PagesSent)]) == count // SLOTS


@pytest.mark.parametrize("page", [PAGE, 2**24])  # the second does not fit into what lies between the two
def test_a_peer_that_stops_in_the_middle_is_cut_off_and_its_pages_given_back(
    stores: Callable[..., Store], page: int
) -> None:
    b = stores("b", silence_s=1.0, page=page)
    slots = {index: index for index in range(min(SLOTS, 2**26 // page))}
    with process_that_asks(b) as child:
        child.send_signal(signal.SIGSTOP)
        for number in range(20):
            b.serve(number, "a", 1, slots)
        b.until(lambda: {tr.PagesSent(number) for number in range(20)} <= set(b.events))
        child.send_signal(signal.SIGCONT)
        b.serve(99, "a", 1, {0: 0})
        b.heard(tr.PagesSent(99))


def test_closing_waits_for_no_hung_peer() -> None:
    b = Store("b")
    deaf = Deaf(b)
    b.ask(b, peers.FetchHeartbeat(1), at="tcp://127.0.0.1:9")  # where no process listens
    for number in range(16):
        b.serve(number, "deaf", 1, {index: index for index in range(SLOTS)})
    start = time.monotonic()
    b.close()
    assert time.monotonic() - start < 5
    b.close()
    deaf.close()


def test_an_unused_link_is_closed(stores: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.transport.zmq_transport._IDLE", 0.2)
    monkeypatch.setattr("kvstore.transport.zmq_transport._SWEEP", 0.05)
    monkeypatch.setattr("kvstore.transport.zmq_transport._TURN", 0.05)
    a, b = stores("a"), stores("b")
    a.want(b, 1)
    assert a.transport.stats().links == 1
    a.until(lambda: a.transport.stats().links == 0)
    a.want(b, 2)
    b.do(tr.AnswerPeer("a", peers.FetchUnavailable(2, 0)))
    a.heard(tr.PeerReplied("b", peers.FetchUnavailable(2, 0)))


def test_an_endpoint_that_is_none_loses_a_request_and_nothing_else(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    for endpoint in ("", "nonsense", "inproc://x", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x"):
        a.do(
            tr.AskPeer(PageSource("c", endpoint, 0), peers.FetchHeartbeat(1)),
            tr.AskPeer(PageSource("c", endpoint, 0), peers.FetchHeartbeat(2)),
        )
    a.want(b)
    assert a.transport.stats().dropped == 12


def test_a_loop_that_does_not_listen_is_not_buried(
    stores: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.transport.zmq_transport._BACKLOG", 100)
    a, b = stores("a"), stores("b")
    a.want(b)
    a.ask(b, *(peers.FetchHeartbeat(beat) for beat in range(900)))
    time.sleep(0.5)  # whatever comes meanwhile must stay outside
    b.events += b.transport.poll()
    assert len(b.requests_of("a")) < 300
    b.until(lambda: len(b.requests_of("a")) == 901)


def test_what_the_thread_dies_of_is_told(stores: Callable[..., Store]) -> None:
    a = stores("a")
    a.do(tr.VerifySlot(1, SLOTS, 0))
    with pytest.raises(AssertionError, match="not in the arena"):
        a.until(lambda: False)


# --- whatever a peer sends --------------------------------------------------------------------------------------------

_REPLIES: st.SearchStrategy[peers.PageReply] = st.one_of(
    st.builds(peers.FetchUnavailable, st.integers(0, 3), st.integers(0, 2**62)),
    st.builds(
        peers.FetchStatus, st.integers(0, 9), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9))).map(tuple)
    ),
    st.builds(
        peers.FetchedPages,
        st.integers(0, 3),
        st.lists(st.builds(peers.SentPage, st.integers(0, 9) | st.integers(0, 2**62), st.integers(0, 2**64 - 1))).map(
            tuple
        ),
    ),
)
_PAGE_FRAMES = st.sampled_from([b"", b"x", b"y" * 1_024, b"z" * 1_025, b"w" * 70_000])
_NAMES = st.sampled_from(["a", "b", "", "other", "ü" * 99])


@st.composite
def _junk(draw: st.DrawFn) -> list[bytes]:
    """Frames from a liar: nearly right, or not at all."""
    if draw(st.booleans()):
        return draw(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
    body = msgspec.msgpack.encode(Envelope(draw(_NAMES), draw(_NAMES), draw(st.integers(0, 9)), draw(_REPLIES)))
    if draw(st.integers(0, 4)) == 0:
        body = body[: draw(st.integers(0, len(body)))]
    return [body, *draw(st.lists(_PAGE_FRAMES, max_size=6))]


@settings(max_examples=40)
@given(st.lists(_junk(), min_size=1, max_size=20))
def test_a_lying_store_writes_nothing_but_what_is_expected(lies: list[list[bytes]]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    a = Store("a", page=1_024)
    liar = context.socket(zmq.ROUTER)
    liar.setsockopt(zmq.LINGER, 0)
    liar.setsockopt(zmq.RCVTIMEO, int(DEADLINE * 1_000))
    try:
        port = cluster_keys.server(liar).bind_to_random_port("tcp://127.0.0.1")
        a.expect(1, {0: 0, 1: 1, 7: 2})
        a.do(tr.AskPeer(PageSource("b", f"tcp://127.0.0.1:{port}", 0), peers.FetchHeartbeat(1, (1,))))
        assert liar.recv_multipart()[0] == b"a"
        for frames in lies:
            liar.send_multipart([b"a", *frames])
        end = Envelope("b", "a", 1, peers.FetchUnavailable(77, 77))
        liar.send_multipart([b"a", msgspec.msgpack.encode(end)])
        a.heard(tr.PeerReplied("b", peers.FetchUnavailable(77, 77)))
        written = {slot for slot in range(SLOTS) if a.slot(slot) != bytes(1_024)}
        landed = [event for event in a.events if isinstance(event, tr.PagesLanded)]
        assert {i for event in landed for i in (*event.damaged, *dict(event.pages))} <= {0, 1, 7}
        assert written <= {0, 1, 2}
    finally:
        liar.close(0)
        context.term()
        a.close()


@settings(max_examples=40)
@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), min_size=1, max_size=20), st.binary())
def test_a_lying_asker_is_dropped(lies: list[list[bytes]], name: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    b = Store("b", page=1_024)
    try:
        liars = [context.socket(zmq.DEALER) for _ in range(2)]
        for liar, identity in zip(liars, (b"honest", b"l" + name[:200]), strict=True):
            liar.setsockopt(zmq.LINGER, 0)
            liar.setsockopt(zmq.IDENTITY, identity)
            cluster_keys.client(liar).connect(b.transport.endpoint)
        for frames in lies:
            liars[1].send_multipart(frames)
        liars[1].send(msgspec.msgpack.encode(Envelope("honest", "b", 1, peers.FetchHeartbeat(5))))  # in another's name
        liars[0].send(msgspec.msgpack.encode(Envelope("honest", "c", 1, peers.FetchHeartbeat(6))))  # for another store
        liars[0].send(b"\xc1" * 2_000)
        liars[0].send(msgspec.msgpack.encode(Envelope("honest", "b", 1, peers.FetchHeartbeat(7))))
        b.heard(tr.PeerRequested("honest", peers.FetchHeartbeat(7)))
        b.until(lambda: b.transport.stats().malformed >= len(lies) + 2)
        assert b.requests_of("honest") == [peers.FetchHeartbeat(7)]
        assert b.transport.stats().dropped == 1
    finally:
        for liar in liars:
            liar.close(0)
        context.term()
        b.close()


def test_a_request_too_large_ends_its_connection_and_nothing_else(stores: Callable[..., Store]) -> None:
    a, b = stores("a"), stores("b")
    a.want(b)
    a.ask(b, peers.FetchHeartbeat(1, tuple(range(10**6))))
    while not any(isinstance(request, peers.FetchHeartbeat) for request in b.requests_of("a")):
        a.ask(b, peers.FetchHeartbeat(2))
        b.hear(0.05)
    assert b.requests_of("a")[-1] == peers.FetchHeartbeat(2)
