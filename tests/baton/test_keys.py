"""CURVE keys: clients that our sockets accept, and bytes that others can read. Real sockets, on loopback and off it."""

import asyncio
import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton import wire
from baton.errors import KeysUnusable, PortInUse, StartupError
from baton.messages import Cancel, Heartbeat, Hello, LoadReport, ToDecode
from baton.monotonic_clock import MonotonicClock
from baton.wire import ClusterKeys, HeartbeatSender, Listener, Publisher, RouterSocket, Subscriber, guard, use_keys
from baton.wire.sockets import bind, configure, connect
from tests.baton.test_wire import DEADLINE, ME, ROUTER
from tests.support import cluster_keys
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

OURS, THEIRS = ClusterKeys.generate(), ClusterKeys.generate()
SECRET = b"what the user asked"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_NEWS", 10)
    use_keys(OURS)


@pytest.fixture
def sockets() -> Iterator[Callable[[int], Any]]:
    with contextlib.ExitStack() as cleanup:

        def make(kind: int) -> Any:
            socket = configure(zmq.Context.instance().socket(kind))
            cleanup.callback(socket.close, 0)
            return socket

        yield make


def own_address() -> str:
    """An address of this machine that others could reach, or nothing. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


HOSTS = ["127.0.0.1", "localhost", *filter(None, [own_address()])]


# --- the file -------------------------------------------------------------------------------------------------------


def test_keys_are_written_for_their_owner_alone_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cluster.key"
    OURS.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ClusterKeys.read_file(path) == OURS
    with pytest.raises(KeysUnusable, match="exists"):
        THEIRS.write(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_keys_that_others_can_reach_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cluster.key"
    OURS.write(path)
    path.chmod(mode)
    with pytest.raises(KeysUnusable, match=r"read by others.*chmod 600"):
        ClusterKeys.read_file(path)


@pytest.mark.parametrize(
    "text",
    ["", "short", "x" * 41, "ä" * 40, '"' * 40, OURS.secret[:-1] + "~", "a\nb"],
    ids=["empty", "short", "long", "not ASCII", "quotes", "a wrong last character", "lines"],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeysUnusable, match="baton keys"):
        ClusterKeys.read_file(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(KeysUnusable, match="baton keys"):
        ClusterKeys.read_file(tmp_path / "none")


def test_processes_that_start_at_once_get_one_pair(tmp_path: Path) -> None:
    path = tmp_path / "state" / "cluster.key"
    start = threading.Barrier(8)

    def get() -> ClusterKeys:
        start.wait()
        return ClusterKeys.read_or_make(path)

    with ThreadPoolExecutor(8) as pool:
        (one,) = {future.result() for future in [pool.submit(get) for _ in range(8)]}
    assert ClusterKeys.read_or_make(path) == ClusterKeys.read_file(path) == one
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path], "half-made files are removed"


def test_a_folder_that_others_can_write_to_holds_no_keys(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ClusterKeys.read_or_make(folder / "cluster.key")
    folder.chmod(0o770)
    with pytest.raises(KeysUnusable, match=r"0770.*chmod 700"):
        ClusterKeys.read_or_make(folder / "cluster.key")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_holds_no_keys(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(KeysUnusable, match="belongs to uid 65534"):
        ClusterKeys.read_or_make(tmp_path / "cluster.key")


def test_a_folder_that_can_not_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysUnusable, match=r"cluster\.key_file"):
        ClusterKeys.read_or_make(tmp_path / "file" / "cluster.key")


def test_the_secret_is_in_no_text() -> None:
    assert OURS.secret not in f"{OURS} {OURS!r}"


# --- when sockets are encrypted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_every_tcp_socket_needs_keys(sockets: Callable[[int], Any], host: str) -> None:
    use_keys(None)
    with pytest.raises(StartupError, match=r"cluster\.key_file"):
        bind(sockets(zmq.PULL), f"tcp://{host}:0")
    with pytest.raises(StartupError, match=r"cluster\.key_file"):
        connect(sockets(zmq.PUSH), f"tcp://{host}:9")


@pytest.mark.parametrize("host", HOSTS)
async def test_links_are_encrypted_unasked(host: str) -> None:
    listener = Listener(f"tcp://{host}:0", ROUTER)
    link: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    clock = MonotonicClock()
    heart = HeartbeatSender(listener.endpoint, ME, clock)
    try:
        link.send("", Hello(ME))
        assert (await listener.receive()).message == Hello(ME)
        assert link.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
        heart.publish("router-1", Heartbeat(3, LoadReport()), 0.02, None)
        beat = (await listener.receive()).message
        assert isinstance(beat, Heartbeat)
        assert msgspec.structs.replace(beat, loop_age_ms=0) == Heartbeat(3, LoadReport())
        listener.send("worker-1", Cancel("r", 1))
        heard = []
        while not heard:
            heard += link.receive()
            await asyncio.sleep(0.005)
        assert heard[0].message == Cancel("r", 1)
    finally:
        heart.close()
        link.close()
        listener.close()


@pytest.mark.parametrize("host", HOSTS)
async def test_events_are_encrypted_unasked(host: str) -> None:
    publisher = Publisher(f"tcp://{host}:0")
    subscriber = Subscriber(publisher.endpoint)
    try:
        receiving = asyncio.create_task(subscriber.receive())
        while not receiving.done():
            publisher.send(b"topic", 7, b"payload")
            await asyncio.sleep(0.01)
        assert receiving.result() == (b"topic", 7, b"payload")
        assert publisher._socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    finally:
        subscriber.close()
        publisher.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_every_interface_is_no_address(sockets: Callable[[int], Any], host: str) -> None:
    with pytest.raises(StartupError, match="every interface"):
        bind(sockets(zmq.PULL), f"tcp://{host}:0")


# --- accepted clients -----------------------------------------------------------------------------------------------


def stranger(kind: str, server: int, client: int, endpoint: str) -> tuple[Any, Any]:
    """Return a context of its own, as in another process, and a socket that must neither receive nor deliver
    anything."""
    context: Any = zmq.Context()
    socket = configure(context.socket(client))
    if kind == "its own keys for the right server":
        public, secret = zmq.curve_keypair()
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = OURS.public, public, secret
    elif kind == "another cluster's keys":
        socket.curve_serverkey = socket.curve_publickey = THEIRS.public
        socket.curve_secretkey = THEIRS.secret.encode()
    socket.reconnect_ivl = 10
    if client == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    return context, socket


@pytest.mark.parametrize("kind", ["nothing", "its own keys for the right server", "another cluster's keys"])
@pytest.mark.parametrize(("server", "client"), [(zmq.ROUTER, zmq.DEALER), (zmq.PUB, zmq.SUB)])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_strangers_get_nothing_through(
    kind: str,
    server: int,
    client: int,
    asynchronous: bool,
    sockets: Callable[[int], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await asyncio.sleep(0.1)  # the last test's refusals are counted
    before = wire.refused()
    threads = threading.active_count()
    context: Any = zmq.asyncio.Context.instance() if asynchronous else zmq.Context.instance()
    with caplog.at_level(logging.WARNING):
        ours = configure(context.socket(server))
        endpoint = bind(ours, "tcp://127.0.0.1:0")
        friend = sockets(client)
        if client == zmq.SUB:
            friend.subscribe(b"")
        connect(friend, endpoint)
        strange, other = stranger(kind, server, client, endpoint)
        raw = zmq.Socket.shadow(ours.underlying)
        try:
            deadline = time.monotonic() + 10
            heard: list[list[bytes]] = []
            while (len(heard) < 20 or wire.refused() == before) and time.monotonic() < deadline:
                if client == zmq.SUB:
                    raw.send_multipart([SECRET])
                else:
                    friend.send(b"hello", zmq.NOBLOCK)
                    with contextlib.suppress(zmq.Again):
                        other.send(b"intruder", zmq.NOBLOCK)
                with contextlib.suppress(zmq.Again):
                    while True:
                        heard.append((friend if client == zmq.SUB else raw).recv_multipart(zmq.NOBLOCK))
                await asyncio.sleep(0.01)
            assert len(heard) >= 20, "whoever has the keys was disturbed"
            assert wire.refused() > before, "the stranger's try was not counted"
            assert all(frames[-1] in (SECRET, b"hello") for frames in heard)
            with pytest.raises(zmq.Again):
                other.recv(zmq.NOBLOCK)
        finally:
            ours.close(0)
            other.close(0)
            strange.term()
    # One guard for each context at most, however many sockets and refusals.
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("theirs", [None, THEIRS], ids=["no keys", "another cluster's keys"])
def test_a_false_router_hears_nothing(theirs: ClusterKeys | None) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as false_router:
        false_router.linger = 0
        monitor = false_router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if theirs is not None:
            cluster_keys.server(false_router, theirs)
        link: RouterSocket[ToDecode] = RouterSocket(f"tcp://127.0.0.1:{plain_port(false_router)}", ME, ToDecode)
        try:
            link.send("", Hello(ME))
            assert monitor.poll(DEADLINE * 1_000), "no connection has failed"
            assert not false_router.poll(0)
        finally:
            link.close()
            false_router.disable_monitor()
            monitor.close(0)


def test_a_guard_ends_with_its_context() -> None:
    use_keys(OURS)
    context: Any = zmq.Context()
    server = configure(context.socket(zmq.PULL))
    bind(server, "tcp://127.0.0.1:0")
    started = [thread for thread in threading.enumerate() if thread.name == "zap"]
    server.close(0)
    context.term()
    eventually(lambda: any(not thread.is_alive() for thread in started))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_sockets_come_and_go(sockets: Callable[[int], Any]) -> None:
    """Nothing of a closed socket stays behind: neither a thread nor a descriptor."""
    bind(sockets(zmq.PULL), "tcp://127.0.0.1:0")
    time.sleep(0.1)
    before = threading.active_count(), descriptors()
    for _ in range(100):
        socket = configure(zmq.Context.instance().socket(zmq.PULL))
        bind(socket, "tcp://127.0.0.1:0")
        socket.close(0)
    eventually(lambda: descriptors() <= before[1] + 2)
    assert threading.active_count() == before[0]


def squat(endpoint: str, times: int) -> None:
    """Listen there in the router's place, and answer so many connections with what is no ZMQ."""
    with eventually(lambda: free_server(int(endpoint.rpartition(":")[2])), "the port given back by ZMQ") as listener:
        listener.settimeout(DEADLINE)
        for _ in range(times):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" * 10)
                connection.settimeout(DEADLINE)
                with contextlib.suppress(ConnectionError):
                    while connection.recv(1_000):
                        pass


def free_server(port: int) -> socket.socket | None:
    """A listener at that port; none while another one has it."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def listen_below_the_ephemeral_ports() -> Listener:
    """Return a listener on a port that no other process is given while this one has closed it for a moment."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(PortInUse):
            return Listener(f"tcp://127.0.0.1:{port}", ROUTER)
    raise AssertionError("no port is free")


async def test_a_program_on_a_dead_routers_port_does_not_end_the_links() -> None:
    """ZMQ gives up a connection whose other end breaks the protocol; link and heart connect again."""
    listener = listen_below_the_ephemeral_ports()
    link: RouterSocket[ToDecode] = RouterSocket(listener.endpoint, ME, ToDecode)
    heart = HeartbeatSender(listener.endpoint, ME, MonotonicClock())
    heart.publish("router-1", Heartbeat(3, LoadReport()), 0.02, None)
    try:
        for squatted in (False, True):
            if squatted:
                listener.close()
                await asyncio.to_thread(squat, listener.endpoint, 2)
                listener = Listener(listener.endpoint, ROUTER)
            heard: set[type] = set()
            receiving = asyncio.create_task(listener.receive())
            while heard != {Hello, Heartbeat}:
                link.send("", Hello(ME))
                done, _ = await asyncio.wait([receiving], timeout=0.02)
                if done:
                    heard.add(type(receiving.result().message))
                    receiving = asyncio.create_task(listener.receive())
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
    finally:
        heart.close()
        link.close()
        listener.close()


# --- what others read -----------------------------------------------------------------------------------------------


class Tap:
    """A TCP proxy on loopback that keeps every byte it carries, both ways."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(self._target)
                for one, other in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                self.carried += data
                other.sendall(data)
        for end in (one, other):
            end.close()


def plain_port(server: Any) -> int:
    return server.bind_to_random_port("tcp://127.0.0.1")


@pytest.mark.parametrize("secure", [True, False])
def test_a_tap_on_the_wire_reads_nothing(sockets: Callable[[int], Any], secure: bool) -> None:
    server, client = sockets(zmq.PULL), sockets(zmq.PUSH)
    tap = Tap(bind(server, "tcp://127.0.0.1:0") if secure else f"tcp://127.0.0.1:{plain_port(server)}")
    try:
        if secure:
            connect(client, tap.endpoint)
        else:
            client.connect(tap.endpoint)
        client.send(SECRET * 50)
        assert server.poll(10_000), "nothing came through"
        assert server.recv() == SECRET * 50
        assert len(tap.carried) > len(SECRET) * 50
        assert (SECRET in tap.carried) is not secure  # plain, it would be seen: the tap works
    finally:
        tap.close()
