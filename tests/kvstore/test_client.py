"""StoreClient against stores that misbehave: what it tells, when, and what it never does."""

import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton import store_protocol as protocol
from baton.errors import StoreError, StoreGone
from baton.messages import MAX_KEYS_PER_CALL, Message, Peer
from baton.unix import UnixListener, UnixSocket
from kvstore.arena.memory import Arena
from kvstore.client import connection
from kvstore.client.connection import StoreClient, store_address
from tests.kvstore.store_fixtures import NAMESPACE, STORE

PAGE = 4_096
SILENCE = 3.0


class FakeStore:
    """A store that says what a test tells it to."""

    def __init__(self, address: str) -> None:
        self.listener: UnixListener[protocol.StoreCall] = UnixListener(address, protocol.StoreCall)
        self.arena = Arena.create(4 * PAGE)
        self.socket: UnixSocket[protocol.StoreCall] | None = None

    def accept(self) -> UnixSocket[protocol.StoreCall]:
        self.hang_up()
        self.socket = self.listener.accept()
        received = self.socket.receive()
        assert isinstance(received[0], protocol.Attach)
        return self.socket

    def attached(self, slots: int = 4, page_bytes: int = PAGE) -> protocol.Attached:
        return protocol.Attached(STORE, slots, page_bytes)

    def hang_up(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def close(self) -> None:
        self.hang_up()
        self.listener.close()
        self.arena.close()


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return store_address(f"fake-{os.getpid()}", request.node.name)


@pytest.fixture
def fake(address: str) -> Iterator[FakeStore]:
    fake = FakeStore(address)
    yield fake
    fake.close()


@pytest.fixture
def client(address: str) -> Iterator[StoreClient]:
    client = StoreClient(address, Peer("decode", "w", "node", "w-1", os.getpid()), NAMESPACE, PAGE, SILENCE)
    yield client
    client.close()


def attach(fake: FakeStore, client: StoreClient) -> UnixSocket[protocol.StoreCall]:
    with pytest.raises(StoreGone, match="not answered yet"):
        client.connect()
    socket = fake.accept()
    socket.send(fake.attached(), [fake.arena.fd])
    client.connect()
    return socket


def test_connecting_goes_on_where_it_stood_and_never_waits_long(fake: FakeStore, client: StoreClient) -> None:
    for _ in range(3):
        with pytest.raises(StoreGone):
            client.connect()
    fake.accept().send(fake.attached(), [fake.arena.fd])
    client.connect()
    client.connect()
    assert client.connected
    assert client.incarnation == STORE.incarnation
    assert client.slots == 4
    assert len(client.slot(3)) == PAGE
    assert fake.listener.accept() is None, "one connection was enough"


def test_a_store_that_stands_still_is_not_waited_for(
    fake: FakeStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the connection, and no answer comes. A worker tries this between its steps."""
    waits: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(select, name)

        def waiting(*arguments: Any) -> Any:
            waits.append(name)
            return original(*arguments)

        return waiting

    for name in ("poll", "select", "epoll"):
        monkeypatch.setattr(select, name, recorded(name))
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append(f"sleep {seconds}"))
    for _ in range(100):
        with pytest.raises(StoreGone, match="not answered yet"):
            client.connect()
    assert waits == []
    fake.accept()
    assert fake.listener.accept() is None, "one connection was enough"


def test_a_missing_store_is_reported_at_once(client: StoreClient) -> None:
    started = time.monotonic()
    with pytest.raises(StoreGone, match="no store answers"):
        client.connect()
    assert time.monotonic() - started < 1
    for call in (client.fileno, client.receive, lambda: client.slot(0)):
        with pytest.raises(StoreGone):
            call()
    client.call(protocol.Acquire(1, bytes(16)))
    client.tick(0.0)


@pytest.mark.parametrize("slots", [0, 5])
def test_an_arena_smaller_than_its_slots_is_not_used(fake: FakeStore, client: StoreClient, slots: int) -> None:
    with pytest.raises(StoreGone):
        client.connect()
    fake.accept().send(fake.attached(slots), [fake.arena.fd])
    with pytest.raises(StoreError, match="arena can't be used"):
        client.connect()
    assert not client.connected


def test_pages_of_another_size_are_not_used(fake: FakeStore, client: StoreClient) -> None:
    with pytest.raises(StoreGone):
        client.connect()
    fake.accept().send(fake.attached(2, 2 * PAGE), [fake.arena.fd])
    with pytest.raises(StoreError, match="8192 bytes, ours 4096"):
        client.connect()


@pytest.mark.parametrize(
    "answer",
    [protocol.StoreHeartbeat(), protocol.AttachRefused("incompatible", "no"), protocol.Attached(STORE, 4, PAGE)],
)
def test_what_is_no_attachment_is_a_typed_error(fake: FakeStore, client: StoreClient, answer: Message) -> None:
    """The last one comes without a descriptor."""
    with pytest.raises(StoreGone):
        client.connect()
    fake.accept().send(answer)
    with pytest.raises(StoreError, match="does not attach us"):
        client.connect()
    with pytest.raises(StoreGone, match="not answered"):
        client.connect()  # a new try


def test_a_loss_is_told_once_by_receive_after_the_last_replies(fake: FakeStore, client: StoreClient) -> None:
    socket = attach(fake, client)
    socket.send(protocol.StoreHeartbeat((1,)))
    fake.hang_up()
    client.call(protocol.Acquire(1, bytes(16)))  # found out here, told by receive
    client.call(protocol.Acquire(2, bytes(16)))
    with pytest.raises(StoreGone):
        client.receive()
    assert client.connected, "until told to disconnect"
    client.disconnect()
    assert not client.connected
    assert client.incarnation == ""


def test_replies_before_the_end_are_not_lost(fake: FakeStore, client: StoreClient) -> None:
    attach(fake, client).send(protocol.StoreHeartbeat((1,)))
    fake.hang_up()
    assert client.receive() == [protocol.StoreHeartbeat((1,))]
    with pytest.raises(StoreGone):
        client.receive()


def test_a_refusal_is_the_end(fake: FakeStore, client: StoreClient) -> None:
    attach(fake, client).send(protocol.AttachRefused("malformed_message", "lease 1 is in use"))
    with pytest.raises(StoreGone, match="lease 1 is in use"):
        client.receive()


def test_silence_is_judged_by_what_was_read_and_not_by_our_own_pauses(fake: FakeStore, client: StoreClient) -> None:
    socket = attach(fake, client)
    now = 100.0
    client.tick(now)
    for _ in range(10):
        now += 0.5
        socket.send(protocol.StoreHeartbeat())
        client.receive()
        client.tick(now)
    now += 1_000.0  # a step of the engine that took this long
    client.tick(now)
    for _ in range(6):
        now += SILENCE / 6
        client.tick(now)
    with pytest.raises(StoreGone, match="silent for"):
        client.tick(now + 0.1)


def test_a_store_that_does_not_read_never_holds_us_up(fake: FakeStore, client: StoreClient) -> None:
    attach(fake, client)
    started = time.monotonic()
    for lease in range(10_000):
        client.call(protocol.Acquire(lease, bytes(16 * MAX_KEYS_PER_CALL)))
    assert time.monotonic() - started < 5
    with pytest.raises(StoreGone, match="unread"):
        client.tick(0.0)


def test_addresses_are_bounded_and_differ() -> None:
    assert store_address("a", "b") == store_address("a", "b")
    long = store_address("c" * 31, "n" * 128)
    assert len(long.encode()) <= 100
    assert len({long, store_address("c" * 31, "m" * 128), store_address("a", "b"), store_address("a", "c")}) == 4


def test_a_store_whose_reply_fits_no_call_counts_as_lost(fake: FakeStore, client: StoreClient) -> None:
    socket = attach(fake, client)
    client.call(protocol.Acquire(1, bytes(32), wait=True))
    good = protocol.PagesReady(1, (protocol.LeasedPage(1, 3, 9),))
    socket.send(good)
    socket.send(protocol.PagesReady(1, (protocol.LeasedPage(0, 4, 9),)))  # the arena has the slots 0 to 3
    assert client.receive() == [good]
    with pytest.raises(StoreGone, match="does not fit lease 1"):
        client.receive()
    with pytest.raises(StoreGone, match="does not fit lease 1"):
        client.tick(0.0)
    client.disconnect()
    socket = attach(fake, client)  # another incarnation, which owes nothing
    socket.send(good)
    assert client.receive() == [good]


def test_a_store_that_never_stops_talking_lets_its_worker_go_on(
    fake: FakeStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MOST_REPLIES", 4)
    socket = attach(fake, client)
    for _ in range(6):
        socket.send(protocol.StoreHeartbeat())
    assert [len(client.receive()) for _ in range(3)] == [4, 2, 0]
