"""Real sockets: messages between a router and workers, garbage among them; Unix sockets with descriptors."""

import asyncio
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.errors import MalformedMessage, PortInUse, StoreGone
from baton.messages import Cancel, Heartbeat, Hello, LoadReport, Peer, ToDecode
from baton.monotonic_clock import MonotonicClock
from baton.store_protocol import AttachRefused, EndLease, LeaseHeartbeat, StoreCall, StoreHeartbeat, StoreReply
from baton.unix import UnixListener, UnixSocket
from baton.wire import HeartbeatSender, Listener, Poller, Publisher, RouterSocket, Subscriber
from tests.support import cluster_keys
from tests.support.eventually import eventually
from tests.support.virtual_clock import VirtualClock

pytestmark = pytest.mark.slow

ROUTER = Peer("router", "router", "n0", "router-1", 1)
ME = Peer("decode", "d0", "n0", "worker-1", 2)
DEADLINE = 60.0


async def test_messages_travel_both_ways_and_garbage_is_dropped() -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    link: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    junk = zmq.Context.instance().socket(zmq.DEALER)
    junk.setsockopt(zmq.LINGER, 0)
    cluster_keys.client(junk).connect(listener.endpoint)
    try:
        nested = msgspec.Raw(b"\x91" * 10_000 + b"\xc0")  # deeper than Python's stack
        deep = msgspec.msgpack.encode(["x", "", 1, Hello(ME), nested])
        for frames in ([b""], [b"\xff" * 50], [b"a", b"b"], [b"\x94\xa1x\xa0\x01\x81\xa4type\xa5Hello"], [deep]):
            junk.send_multipart(frames)
        link.send("", Hello(ME))
        envelope = await listener.receive()
        assert (envelope.sender, envelope.message) == ("worker-1", Hello(ME))
        while listener.malformed < 5:
            receiving = asyncio.create_task(listener.receive())
            await asyncio.sleep(0.01)
            receiving.cancel()
        assert listener.send("worker-1", Cancel("r", 1)) == 1
        assert listener.send("worker-1", Cancel("r", 2)) == 2
        assert listener.send("nobody", Cancel("r", 2)) == 1
        heard = []
        while len(heard) < 2:
            heard += link.receive()
            await asyncio.sleep(0.005)
        assert [(e.sequence, e.message) for e in heard] == [(1, Cancel("r", 1)), (2, Cancel("r", 2))]
    finally:
        junk.close(0)
        link.close()
        listener.close()


async def test_messages_in_another_name_are_dropped() -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    impostor: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, Peer("decode", "d0", "n0", "other", 3), ToDecode)
    honest: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    try:
        impostor._me = ME  # what an attacker would do
        impostor.send("", Hello(ME))
        while not listener.malformed:
            receiving = asyncio.create_task(listener.receive())
            await asyncio.sleep(0.01)
            assert not receiving.done() or receiving.cancelled()
            receiving.cancel()
        honest.send("", Hello(ME))
        assert (await listener.receive()).message == Hello(ME)
    finally:
        impostor.close()
        honest.close()
        listener.close()


async def test_the_heart_beats_while_the_loop_is_busy() -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    clock = MonotonicClock()
    heart = HeartbeatSender(listener.endpoint, ME, clock)
    try:
        heart.publish("router-1", Heartbeat(3, LoadReport(), step=8), 0.02, clock.now() - 1.0)
        beats = [await listener.receive() for _ in range(3)]
        assert [b.sequence for b in beats] == [1, 2, 3]
        ages = [b.message.step_age_ms for b in beats]  # type: ignore[union-attr]
        assert 1_000 <= ages[0] <= ages[1] <= ages[2]
        heart.step_ended()
        await until(listener, lambda beat: (beat.step, beat.step_age_ms) == (8, 0))
        heart.publish("router-1", Heartbeat(3, LoadReport(), step=9), 0.02, None)
        await until(listener, lambda beat: (beat.step, beat.step_age_ms) == (9, 0))
    finally:
        heart.close()
        listener.close()


async def until(listener: Listener, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
    while True:
        beat = (await listener.receive()).message
        assert isinstance(beat, Heartbeat)
        if condition(beat):
            return beat


async def test_the_heart_tells_since_when_the_loop_stands_still() -> None:
    """Not counted is the time for which the heart stood still as well: the whole process was stopped then."""
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    clock = VirtualClock()
    heart = HeartbeatSender(listener.endpoint, ME, clock)
    try:
        heart.publish("router-1", Heartbeat(3, LoadReport()), 0.02, None)
        await until(listener, lambda beat: beat.loop_age_ms == 0)
        for age in (500, 1_000, 1_500):
            clock.advance(0.5)
            await until(listener, lambda beat, age=age: beat.loop_age_ms == age)
        clock.advance(50.0)
        beats = [await listener.receive() for _ in range(5)]
        ages = [beat.message.loop_age_ms for beat in beats]  # type: ignore[union-attr]
        assert all(1_500 <= age < 2_000 for age in ages), ages
        heart.publish("router-1", Heartbeat(3, LoadReport()), 0.02, clock.now())
        await until(listener, lambda beat: beat.loop_age_ms == 0)
        clock.advance(0.5)
        await until(listener, lambda beat: (beat.loop_age_ms, beat.step_age_ms) == (500, 500))
        heart.step_ended()
        await until(listener, lambda beat: (beat.loop_age_ms, beat.step_age_ms) == (0, 0))
    finally:
        heart.close()
        listener.close()


async def test_a_port_in_use_is_a_typed_error() -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    try:
        with pytest.raises(PortInUse, match="in use"):
            Listener(listener.endpoint, ROUTER)
    finally:
        listener.close()


async def test_events_are_published_with_their_sequence() -> None:
    publisher = Publisher()
    subscriber = Subscriber(publisher.endpoint)
    try:
        receiving = asyncio.create_task(subscriber.receive())
        while not receiving.done():  # until the subscription has arrived, batches are lost
            publisher.send(b"topic", 7, b"payload")
            await asyncio.sleep(0.01)
        assert receiving.result() == (b"topic", 7, b"payload")
    finally:
        subscriber.close()
        publisher.close()


@pytest.fixture
def pair() -> Iterator[tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]]:
    address = f"baton-test/{secrets.token_hex(8)}"
    listener: UnixListener[StoreCall] = UnixListener(address, StoreCall)
    client: UnixSocket[StoreReply] = UnixSocket.connect(address, StoreReply)
    server = listener.accept()
    assert server is not None
    yield server, client
    client.close()
    server.close()
    listener.close()


def test_a_unix_socket_carries_messages_descriptors_and_identity(
    pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]],
) -> None:
    server, client = pair
    assert (server.pid, server.uid) == (os.getpid(), os.getuid())
    assert server.receive() is None
    client.send(EndLease(4))
    assert server.receive() == (EndLease(4), [])
    memory = os.memfd_create("test")
    os.write(memory, b"shared")
    server.send(StoreHeartbeat((1,)), [memory])
    received = client.receive()
    assert received is not None
    message, (descriptor,) = received
    assert message == StoreHeartbeat((1,))
    assert os.pread(descriptor, 6, 0) == b"shared"
    os.close(descriptor)
    os.close(memory)


def test_what_a_peer_said_before_it_closed_is_received(
    pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]],
) -> None:
    """Even if it closes with messages unread, which resets the connection, and if sending is what tells of it."""
    server, client = pair
    server.send(StoreHeartbeat((1,)))
    client.send(EndLease(4))
    client.close()
    with pytest.raises(StoreGone):
        server.send(StoreHeartbeat((2,)))
    assert server.closed_by_peer
    assert server.receive() == (EndLease(4), [])
    with pytest.raises(StoreGone):
        server.receive()


def test_a_pidfd_tells_of_the_peers_death() -> None:
    address = f"baton-test/{secrets.token_hex(8)}"
    listener: UnixListener[StoreCall] = UnixListener(address, StoreCall)
    program = f"import socket; s = socket.socket(1, 5); s.connect(b'\\0{address}'); s.recv(1)"
    child = subprocess.Popen([sys.executable, "-c", program])
    eventually(lambda: select.select([listener], [], [], 0)[0] != [])
    server = listener.accept()
    assert server.pid == child.pid
    pidfd = server.pidfd()
    assert select.select([pidfd], [], [], 0)[0] == []
    child.kill()
    assert select.select([pidfd], [], [], DEADLINE)[0] == [pidfd]
    child.wait()
    os.close(pidfd)
    server.close()
    listener.close()


def test_descriptors_beside_garbage_are_closed(pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]) -> None:
    server, client = pair
    before = len(list(Path("/proc/self/fd").iterdir()))
    for junk in (b"", b"junk"):
        memory = os.memfd_create("test")
        socket.send_fds(client._socket, [junk], [memory])
        os.close(memory)
        with pytest.raises((StoreGone, MalformedMessage)):
            server.receive()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_closed_unix_socket_is_told(pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]) -> None:
    server, client = pair
    server.send(AttachRefused("incompatible", "go away"))
    server.close()
    assert client.receive() == (AttachRefused("incompatible", "go away"), [])
    with pytest.raises(StoreGone):
        client.receive()


def test_garbage_on_a_unix_socket_is_a_typed_error(pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]) -> None:
    server, client = pair
    client._socket.send(b"\xc1garbage")
    with pytest.raises(MalformedMessage):
        server.receive()
    client.send(LeaseHeartbeat((1, 2)))
    assert server.receive() == (LeaseHeartbeat((1, 2)), [])


def test_a_peer_that_does_not_read_is_given_up(pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]) -> None:
    _, client = pair

    def flood() -> None:
        for lease in range(100_000):
            client.send(LeaseHeartbeat(tuple(range(lease, lease + 500))))

    with pytest.raises(StoreGone, match="unread"):
        flood()


def test_a_poller_wakes_for_either_kind(pair: tuple[UnixSocket[StoreCall], UnixSocket[StoreReply]]) -> None:
    server, client = pair
    poller = Poller()
    poller.add(server.fileno())
    assert not poller.wait(0)
    client.send(EndLease(1))
    assert server.fileno() in poller.wait(DEADLINE)
    poller.remove(server.fileno())
    assert not poller.wait(0)


def test_a_socket_without_a_listener_is_a_typed_error() -> None:
    with pytest.raises(StoreGone, match="no store answers"):
        UnixSocket.connect(f"baton-test/{secrets.token_hex(8)}", StoreReply)


def test_an_address_in_use_is_a_typed_error() -> None:
    address = f"baton-test/{secrets.token_hex(8)}"
    listener: UnixListener[StoreCall] = UnixListener(address, StoreCall)
    with pytest.raises(PortInUse):
        UnixListener(address, StoreCall)
    listener.close()
