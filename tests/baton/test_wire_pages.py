"""Sockets that carry pages: allowed peers, frames that belong to their message, and the time when bytes are free."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from baton import peer_protocol as peers
from baton.errors import PortInUse, StartupError
from baton.messages import Envelope
from baton.wire.pages import PageLink, PageSockets, Sending
from tests.support import cluster_keys
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

DEADLINE = 60.0


@pytest.fixture
def both() -> Iterator[tuple[PageSockets, PageSockets]]:
    a, b = (PageSockets(name, "tcp://127.0.0.1:0", 10.0) for name in "ab")
    yield a, b
    a.close()
    b.close()


def requests_of(sockets: PageSockets, count: int) -> list[tuple[str, peers.PageRequest]]:
    heard: list[tuple[str, peers.PageRequest]] = []
    end = time.monotonic() + DEADLINE
    while len(heard) < count:
        assert time.monotonic() < end
        sockets.wait(0.05)
        heard += sockets.server.receive(count - len(heard))
    return heard


def answered(sockets: PageSockets, link: PageLink) -> tuple[peers.PageReply, list[memoryview]]:
    end = time.monotonic() + DEADLINE
    while True:
        assert time.monotonic() < end
        sockets.wait(0.05)
        for reply in link.receive(1):
            return reply


def test_requests_go_one_way_and_pages_the_other(both: tuple[PageSockets, PageSockets]) -> None:
    a, b = both
    link = a.link("b", b.server.endpoint)
    assert a.link("b", b.server.endpoint) is link
    link.send(peers.FetchHeartbeat(1))
    link.send(peers.FetchHeartbeat(2))
    assert requests_of(b, 2) == [("a", peers.FetchHeartbeat(1)), ("a", peers.FetchHeartbeat(2))]
    memory = memoryview(bytearray(b"x" * 100_000 + b"y" * 100_000))
    sending = Sending()
    pages = peers.FetchedPages(7, (peers.SentPage(0, 11), peers.SentPage(1, 12)))
    views = (memory[place : place + 100_000] for place in (0, 100_000))
    assert b.server.send_pages("a", pages, views, sending)
    assert b.server.send("a", peers.FetchUnavailable(7, 2))
    reply, frames = answered(a, link)
    assert reply == pages
    assert [bytes(frame) for frame in frames] == [b"x" * 100_000, b"y" * 100_000]
    assert answered(a, link) == (peers.FetchUnavailable(7, 2), [])
    eventually(lambda: sending.done)


def test_an_endpoint_without_a_store(both: tuple[PageSockets, PageSockets]) -> None:
    _, b = both
    sending = Sending()
    assert not b.server.send("a", peers.FetchUnavailable(1, 1))
    assert not b.server.send_pages(
        "a", peers.FetchedPages(1, (peers.SentPage(0, 0),)), iter([memoryview(b"x")]), sending
    )
    assert sending.done
    assert b.drops.dropped == 2


def test_pages_are_busy_until_their_connection_is_gone(both: tuple[PageSockets, PageSockets]) -> None:
    a, b = both
    link = a.link("b", b.server.endpoint)
    link.send(peers.FetchHeartbeat(1))
    requests_of(b, 1)
    memory = memoryview(bytearray(2**20))
    sending = Sending()
    for index in range(64):  # which `a` does not read
        assert b.server.send_pages("a", peers.FetchedPages(1, (peers.SentPage(index, 0),)), iter([memory[:]]), sending)
    time.sleep(0.2)
    assert not sending.done
    a.drop(link)

    def done() -> bool:
        b.wait(0)  # ZMQ ends connections while its sockets are in use
        return sending.done

    eventually(done)


def test_one_store_at_a_time_lives_at_an_endpoint(both: tuple[PageSockets, PageSockets]) -> None:
    a, b = both
    old = a.link("old", b.server.endpoint)
    link = a.link("b", b.server.endpoint)
    assert old.socket.closed
    assert set(a.links) == {"b"}
    heard: list[tuple[str, peers.PageRequest]] = []

    def through() -> bool:  # the old connection may come last, and take the new one with it: that one connects again
        link.send(peers.FetchHeartbeat(1))
        b.wait(0.05)
        heard.extend(b.server.receive(9))
        return len(heard) > 0

    eventually(through)
    assert heard[0] == ("a", peers.FetchHeartbeat(1))


@pytest.mark.parametrize("endpoint", ["", "ipc:///tmp/x", "inproc://x", "tcp://", "tcp://127.0.0.1:port"])
def test_an_endpoint_that_can_be_no_stores_is_a_typed_error(
    both: tuple[PageSockets, PageSockets], endpoint: str
) -> None:
    a, _ = both
    with pytest.raises(StartupError):
        a.link("b", endpoint)
    assert a.links == {}


def test_a_port_in_use_is_a_typed_error(both: tuple[PageSockets, PageSockets]) -> None:
    with pytest.raises(PortInUse):
        PageSockets("c", both[0].server.endpoint, 1.0)


def test_frames_that_do_not_belong_to_their_message_are_malformed(both: tuple[PageSockets, PageSockets]) -> None:
    a, _ = both
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    liar = context.socket(zmq.ROUTER)
    liar.setsockopt(zmq.LINGER, 0)
    port = cluster_keys.server(liar).bind_to_random_port("tcp://127.0.0.1")
    link = a.link("b", f"tcp://127.0.0.1:{port}")
    link.send(peers.FetchHeartbeat(1))
    identity, _ = liar.recv_multipart()

    def say(message: peers.PageReply, *frames: bytes, sender: str = "b", addressee: str = "a") -> None:
        liar.send_multipart([identity, msgspec.msgpack.encode(Envelope(sender, addressee, 1, message)), *frames])

    try:
        one = peers.FetchedPages(1, (peers.SentPage(0, 0),))
        say(one)
        say(one, b"x", b"y")
        say(peers.FetchUnavailable(1, 1), b"x")
        liar.send_multipart([identity, b"\xc1"])
        nested = msgspec.Raw(b"\x91" * 10_000 + b"\xc0")  # deeper than Python's stack
        liar.send_multipart([identity, msgspec.msgpack.encode(["b", "a", 1, peers.FetchStatus(1), nested])])
        liar.send_multipart([identity, b"\x90" * (2**20 + 1)])
        say(one, b"x", sender="c")
        say(one, b"x", addressee="old")
        say(one, b"x")
        say(peers.FetchStatus(1))
        end = time.monotonic() + DEADLINE
        heard: list[tuple[peers.PageReply, list[bytes]]] = []
        while len(heard) < 2 and time.monotonic() < end:
            a.wait(0.05)
            heard += [(reply, [bytes(frame) for frame in frames]) for reply, frames in link.receive(3)]
        assert heard == [(one, [b"x"]), (peers.FetchStatus(1), [])]
        assert (a.drops.malformed, a.drops.dropped) == (6, 2)
    finally:
        liar.close(0)
        context.term()
