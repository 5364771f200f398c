"""The real store under real workers: deaths, stops, lost connections, rubbish. Nothing here waits for time to pass but
for something to happen.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton import store_protocol as protocol
from baton.errors import PortInUse, StoreGone
from baton.messages import Heartbeat, Hello, Peer, Welcome
from baton.wire import Listener, ReplayClient, Subscriber
from kvstore.arena.shared_slots import LEFT, MARK_BYTES
from kvstore.checksum import page_checksum
from kvstore.client.connection import store_address
from kvstore.events.changes import packed_digest
from kvstore.events.wire_format import BlockStored, decode, publisher_of
from kvstore.service import run
from tests.kvstore.chains import key, keys
from tests.kvstore.process_fixtures import (
    NODE,
    PAGE,
    PATIENCE,
    SHARED,
    StoreProcess,
    TestClient,
    config_of,
    eventually,
    worker_process,
)
from tests.kvstore.store_fixtures import NAMESPACE

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path)
    yield store
    store.kill()


def packed(chain: str) -> bytes:
    return b"".join(keys(chain))


def is_full(client: TestClient, lease: int, chain: str) -> bool:
    """Whether the store has no room for a chain now; it is given back if it has."""
    call = protocol.Reserve(lease, b"", packed(chain))
    client.leases.add(lease)
    client.store.call(call)
    reply = client.next(object, lease)  # type: ignore[type-abstract]
    client.store.call(protocol.EndLease(lease))
    return isinstance(reply, protocol.NotReserved)


# --- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_written_by_one_process_is_read_by_another(store: StoreProcess) -> None:
    with worker_process(store.cluster, "write abc"), TestClient(store.cluster) as reader:
        pages = reader.ask(protocol.Acquire(1, packed("abc")), protocol.PagesReady).pages
        for page, letter in zip(pages, b"abc", strict=True):
            assert bytes(reader.store.slot(page.slot)) == bytes([letter]) * PAGE
            assert page_checksum(reader.store.slot(page.slot), 1) == page.checksum
        assert all(reader.ask(protocol.Release(1, (0, 1, 2)), protocol.Released).held)


# --- workers that die, stop, leave ------------------------------------------------------------------------------------


def test_a_killed_writers_slots_come_back_and_its_waiters_are_told(store: StoreProcess) -> None:
    with worker_process(store.cluster, "reserve abcdef") as writer, TestClient(store.cluster) as client:
        assert is_full(client, 1, "uvwxyz")
        client.leases.add(2)
        client.store.call(protocol.Acquire(2, packed("abc"), wait=True))
        eventually(lambda: 2 in client.next(protocol.StoreHeartbeat).leases, what="a heartbeat from after the call")
        started = time.monotonic()
        writer.kill()
        assert client.next(protocol.PagesUnavailable, 2).index == 0
        assert time.monotonic() - started < 2
        client.leases.discard(2)
        assert not is_full(client, 3, "uvwxyz")


def test_those_that_share_slots_with_a_killed_process_find_its_mark_changed(store: StoreProcess) -> None:
    with worker_process(store.cluster, "share") as other, TestClient(store.cluster) as client:
        slots = client.ask(protocol.ShareSlots(1, SHARED, slots=3, members=2, place=0), protocol.Reserved).slots
        marks = client.store.slot(slots[0] or 0)
        marks[:] = bytes(len(marks))
        other.kill()
        mark = SHARED[:8] + LEFT.to_bytes(8, "little")
        eventually(lambda: marks[MARK_BYTES:][: len(mark)] == mark, what="the mark")
        assert bytes(marks) == bytes(MARK_BYTES) + mark + bytes(len(marks) - MARK_BYTES - len(mark))


def test_a_stopped_writer_keeps_its_slots_and_may_go_on(store: StoreProcess) -> None:
    """Longer than a hold lasts and than silence is suffered: it could be writing when it wakes."""
    with worker_process(store.cluster, "reserve abcdef") as writer, TestClient(store.cluster) as client:
        writer.send_signal(signal.SIGSTOP)
        client.leases.add(1)
        client.store.call(protocol.Acquire(1, key("a"), wait=True))
        for _ in range(40):  # two seconds of the store's own time
            client.next(protocol.StoreHeartbeat)
        assert is_full(client, 2, "uvwxyz")
        writer.send_signal(signal.SIGCONT)
        writer.stdin.write(b"seal\n")
        writer.stdin.flush()
        assert client.next(protocol.PagesReady, 1).pages[0].index == 0


def test_slots_come_back_when_all_that_write_for_a_worker_have_ended(store: StoreProcess) -> None:
    """A rank of a killed worker is stopped: it could still be writing when it wakes."""
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank,
        worker_process(store.cluster, f"reserve abcdef with {rank.pid}") as writer,
        TestClient(store.cluster) as client,
    ):
        rank.send_signal(signal.SIGSTOP)
        writer.kill()
        writer.wait()
        for _ in range(20):
            client.next(protocol.StoreHeartbeat)
        assert is_full(client, 1, "uvwxyz")
        rank.kill()
        eventually(lambda: not is_full(client, 2, "uvwxyz"), "room after the rank's death")


def test_a_writer_that_leaves_gives_its_slots_back_while_its_process_goes_on(store: StoreProcess) -> None:
    with TestClient(store.cluster) as writer, TestClient(store.cluster) as client:
        writer.ask(protocol.Reserve(1, b"", packed("abcdef")), protocol.Reserved)
        assert is_full(client, 1, "uvwxyz")
        writer.store.leave()
        eventually(lambda: not is_full(client, 2, "uvwxyz"), "room while the process lives")


def test_workers_that_come_and_go_leave_nothing(store: StoreProcess) -> None:
    with TestClient(store.cluster) as client:
        client.next(protocol.StoreHeartbeat)
        before = store.descriptors()
        for _ in range(100):
            with TestClient(store.cluster) as other:
                other.ask(protocol.Acquire(1, key("a")), protocol.PagesUnavailable)
        with worker_process(store.cluster, "reserve xyz"):
            assert store.descriptors() > before
        eventually(lambda: store.descriptors() == before, "every descriptor closed")
        assert not is_full(client, 1, "abcdefgh")


# --- the store dies, stops --------------------------------------------------------------------------------------------


def gone(client: TestClient) -> bool:
    try:
        client.turn()
    except StoreGone:
        return True
    return False


def test_a_killed_store_is_noticed_at_once_and_its_successor_is_another(store: StoreProcess) -> None:
    with TestClient(store.cluster) as client:
        client.write(1, "a")
        view = client.store.slot(0)
        first, before = client.store.incarnation, bytes(view)
        started = time.monotonic()
        store.kill()
        eventually(lambda: gone(client), "StoreGone")
        assert time.monotonic() - started < 1
        client.store.call(protocol.LeaseHeartbeat())  # says nothing, raises nothing
        client.store.disconnect()
        assert not client.store.connected
        with pytest.raises(StoreGone):
            client.store.slot(0)
        with pytest.raises(StoreGone):
            client.store.connect()
        store.start()
        client.leases.clear()
        client.connect()
        assert client.store.incarnation not in ("", first)
        assert client.ask(protocol.Acquire(1, key("a")), protocol.PagesUnavailable).index == 0
        assert bytes(view) == before, "the old memory is still there"


def test_sigterm_ends_a_store_cleanly(store: StoreProcess) -> None:
    with TestClient(store.cluster) as client:
        store.signal(signal.SIGTERM)
        assert store.process.wait(PATIENCE) == 0
        eventually(lambda: gone(client), "StoreGone")
    assert store.errors.read_text() == ""


# --- rubbish and strangers --------------------------------------------------------------------------------------------


def raw(cluster: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(b"\0" + store_address(cluster, NODE).encode())
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """The last thing heard before the other end closed."""
    last = b""
    try:
        while packet := connection.recv(65_536):
            last = packet
    except ConnectionResetError:
        pass
    return last


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(
    "rubbish",
    [
        os.urandom(500),
        b"\xc1",
        msgspec.msgpack.encode({"type": "Decode"}),
        msgspec.msgpack.encode({"type": "Seal", "lease": -1, "first": 0, "checksums": []}),
        msgspec.msgpack.encode({"type": "Acquire", "lease": 1, "keys": bytes(16 * 1_025)}),
        msgspec.msgpack.encode({"type": "Acquire", "lease": 1, "keys": bytes(17)}),
        msgspec.msgpack.encode({"type": "Release", "lease": 1, "indices": [0] * 1_025}),
        msgspec.msgpack.encode({"type": "A" * 160_000}),
        msgspec.msgpack.encode({"type": "Attach", "peer": {"x": msgspec.Raw(b"\x91" * 50_000 + b"\xc0")}}),
        bytes(100_000),
    ],
    ids=[
        "random",
        "reserved byte",
        "another link's",
        "negative",
        "too many keys",
        "half a key",
        "too many indices",
        "a long name",
        "nested",
        "large",
    ],
)
def test_rubbish_ends_its_connection_and_nothing_else(store: StoreProcess, rubbish: bytes, attached: bool) -> None:
    with TestClient(store.cluster) as client, raw(store.cluster) as connection:
        client.write(1, "ab", hold=True)
        if attached:
            peer = Peer("decode", "bad", NODE, "bad", os.getpid())
            connection.send(msgspec.msgpack.encode(protocol.Attach(peer, NAMESPACE, PAGE)))
            assert b"Attached" in connection.recv(65_536)
        connection.send(rubbish)
        assert b"AttachRefused" in until_closed(connection)
        assert client.ask(protocol.Acquire(2, packed("ab")), protocol.PagesReady)
        assert store.process.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_served(store: StoreProcess) -> None:
    with TestClient(store.cluster) as client:
        code = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "s.connect(b'\\0' + sys.argv[1].encode())\n"
            "s.settimeout(20)\n"
            "sys.exit(0 if s.recv(1000) == b'' else 1)\n"
        )
        subprocess.run([sys.executable, "-c", code, store_address(store.cluster, NODE)], check=True, timeout=PATIENCE)
        client.next(protocol.StoreHeartbeat)


# --- starting ---------------------------------------------------------------------------------------------------------


def test_one_store_per_node(store: StoreProcess) -> None:
    with TestClient(store.cluster), pytest.raises(PortInUse, match="another process listens"):
        run(config_of(store.cluster, 8), "store-1", NODE, (), threading.Event())


# --- the router's side ------------------------------------------------------------------------------------------------


def test_a_router_hears_of_its_pages_by_events_and_by_snapshot(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(_router(tmp_path), PATIENCE))


async def _router(directory: Path) -> None:
    me = Peer("router", "router", NODE, "router-1", os.getpid())
    listener = Listener("tcp://127.0.0.1:0", me)
    store = StoreProcess(directory, router=listener.endpoint)
    subscriber: Subscriber | None = None
    asker: ReplayClient | None = None
    client = TestClient(store.cluster)
    try:
        hello = await listener.receive()
        assert isinstance(hello.message, Hello)
        assert hello.message.peer.role == "store"
        assert hello.message.data.startswith("tcp://127.0.0.1:")
        assert hello.message.model is None
        listener.send(hello.sender, Welcome(me, 50, 1_000))
        subscriber = Subscriber(hello.message.events)
        await asyncio.to_thread(client.connect)
        stored: list[bytes] = []
        for number in range(1_000):  # a subscriber hears nothing until its subscription has arrived
            await asyncio.to_thread(client.write, number, f"{number}")
            try:
                batch = decode(*await asyncio.wait_for(subscriber.receive(), 0.05))
            except TimeoutError:
                continue
            assert batch.holder == hello.sender
            assert batch.sequence > 0
            stored = [name for event in batch.events if isinstance(event, BlockStored) for name in event.block_hashes]
            if stored:
                break
        assert stored
        asker = ReplayClient(hello.message.replay)
        asker.ask()
        topic, snapshot = await asker.receive()
        assert publisher_of(topic) == hello.sender
        assert snapshot.sequence >= batch.sequence
        assert stored[-1] in b"".join(run.keys for run in snapshot.runs)
        digest = 0
        for run in snapshot.runs:
            digest ^= packed_digest(run.keys, run.medium)
        while True:
            message = (await listener.receive()).message
            if isinstance(message, Heartbeat) and message.events == snapshot.sequence:
                assert message.load.pages_total in (0, 8)
                assert message.digest == digest
                break
    finally:
        client.store.close()
        if subscriber is not None:
            subscriber.close()
        if asker is not None:
            asker.close()
        listener.close()
        store.kill()
