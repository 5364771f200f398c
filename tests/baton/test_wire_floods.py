"""Floods on real sockets: one turn reads a bounded number of messages, and real messages are served among them."""

import asyncio
import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from baton.messages import Cancel, Envelope, Hello, Peer, ToDecode
from baton.store_protocol import StoreCall
from baton.unix import OutOfDescriptors, UnixListener, readable
from baton.wire import Listener, RouterSocket, Subscriber, sockets
from tests.support import cluster_keys

pytestmark = pytest.mark.slow

ROUTER = Peer("router", "router", "n0", "router-1", 1)
ME = Peer("decode", "d0", "n0", "worker-1", 2)
DEADLINE = 60.0
FLOOD = 20_000
PER_TURN = 64


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        yield cluster_keys.client(socket)


async def most_per_turn(count: Callable[[], int], until: int) -> int:
    """The most that `count` rose by within one turn of the event loop, once it has reached `until`."""
    most, before = 0, count()
    while before < until:
        await asyncio.sleep(0)
        most, before = max(most, count() - before), count()
    return most


async def test_malformed_messages_do_not_keep_the_event_loop(
    dealer: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    link: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    try:
        dealer.connect(listener.endpoint)
        for _ in range(FLOOD):
            dealer.send(b"x")
        link.send("", Hello(ME))
        receiving = asyncio.create_task(listener.receive())
        assert (await receiving).message == Hello(ME)  # served among the flood
        receiving = asyncio.create_task(listener.receive())
        assert await most_per_turn(lambda: listener.malformed, FLOOD) <= PER_TURN
        receiving.cancel()
    finally:
        link.close()
        listener.close()
    lines = [record for record in caplog.records if "malformed" in record.getMessage()]
    assert len(lines) <= 1 + DEADLINE / 10  # one for every ten seconds


async def test_good_messages_do_not_keep_the_event_loop_either() -> None:
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    link: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    got = 0

    async def receive() -> None:
        nonlocal got
        while True:
            await listener.receive()
            got += 1

    try:
        for _ in range(FLOOD):
            link.send("", Hello(ME))
        receiving = asyncio.create_task(receive())
        assert await most_per_turn(lambda: got, FLOOD) <= PER_TURN
        receiving.cancel()
    finally:
        link.close()
        listener.close()


async def test_malformed_batches_do_not_keep_the_event_loop() -> None:
    publisher = zmq.Context.instance().socket(zmq.PUB)
    for option in (zmq.LINGER, zmq.SNDHWM):
        publisher.setsockopt(option, 0)
    cluster_keys.server(publisher).bind("tcp://127.0.0.1:0")
    subscriber = Subscriber(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
    receiving = asyncio.create_task(subscriber.receive())
    try:
        while not subscriber.malformed:  # until it has subscribed
            publisher.send(b"x")
            await asyncio.sleep(0.01)
        first = subscriber.malformed
        for _ in range(FLOOD):
            publisher.send(b"x", zmq.NOBLOCK)
        assert await most_per_turn(lambda: subscriber.malformed, first + FLOOD) <= PER_TURN
    finally:
        receiving.cancel()
        subscriber.close()
        publisher.close()


async def test_connections_without_a_handshake_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE", 200)
    listener = Listener("tcp://127.0.0.1:0", ROUTER)
    port = int(listener.endpoint.rpartition(":")[2])
    try:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        async with asyncio.timeout(20):  # ZMQ's own limit is 30 s
            for reader, _ in connections:
                await reader.read()  # the greeting, and then the end
        for _, writer in connections:
            writer.close()
    finally:
        listener.close()


def test_a_worker_reads_a_bounded_number_of_frames_per_turn() -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, 0)
    cluster_keys.server(router).bind("tcp://127.0.0.1:0")
    link: RouterSocket[ToDecode] = RouterSocket(router.getsockopt_string(zmq.LAST_ENDPOINT), ME, ToDecode)
    try:
        link.send("", Hello(ME))
        assert router.poll(int(DEADLINE * 1_000))
        identity, _ = router.recv_multipart()
        for _ in range(5_000):
            router.send_multipart([identity, b"x"])
        router.send_multipart(
            [identity, msgspec.msgpack.encode(Envelope("router-1", ME.incarnation, 1, Cancel("r", 1)))]
        )
        got: list[Any] = []
        end = time.monotonic() + DEADLINE
        while not got:
            assert time.monotonic() < end
            link.socket.poll(100)
            before = link.malformed
            got += link.receive()
            assert link.malformed - before <= 1_000
        assert (link.malformed, got[0].message) == (5_000, Cancel("r", 1))
    finally:
        link.close()
        router.close()
        context.term()


def test_no_descriptor_left_is_a_typed_error_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    listener: UnixListener[StoreCall] = UnixListener(f"test-{os.getpid()}-{secrets.token_hex(4)}", StoreCall)
    real = listener._socket

    class Out:
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    try:
        monkeypatch.setattr(listener, "_socket", Out())
        with pytest.raises(OutOfDescriptors, match="Too many open files"):
            listener.accept()
        monkeypatch.setattr(listener, "_socket", real)
        assert listener.accept() is None
    finally:
        listener.close()


ABOVE_SELECT = """
import os, resource, socket
from baton.unix import readable
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
here, there = socket.socketpair()
high = os.dup2(here.fileno(), 2000)
assert not readable(high, 0) and not readable(here.fileno(), 0)
there.send(b"x")
assert readable(high, 10) and readable(here.fileno(), 10)
"""


def test_any_descriptor_can_be_waited_for() -> None:
    subprocess.run([sys.executable, "-c", ABOVE_SELECT], check=True, timeout=DEADLINE)
    here, there = socket.socketpair()
    with here, there:
        assert not readable(here.fileno(), 0.001)
