"""A store under floods of connections, and without descriptors. The stores are real ones."""

import os
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.service import StoreService
from tests.kvstore.process_fixtures import NODE, PATIENCE, ROOT, StoreProcess, TestClient, config_of
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

PER_TURN = 16
CONNECTIONS = 100  # below the backlog of 128


@pytest.fixture
def store() -> Iterator[StoreService]:
    with StoreService(config_of(f"test-{os.getpid()}-{secrets.token_hex(4)}", 8), "store-0", NODE, ()) as store:
        yield store


@pytest.fixture
def flood(store: StoreService) -> Iterator[list[socket.socket]]:
    """Connections that wait to be accepted."""
    sockets: list[socket.socket] = []
    for _ in range(CONNECTIONS):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(b"\0" + store.address.encode())
        sockets.append(connection)
    yield sockets
    for connection in sockets:
        connection.close()


def test_a_turn_accepts_a_bounded_number_of_connections(store: StoreService, flood: list[socket.socket]) -> None:
    counts = [0]
    while counts[-1] < CONNECTIONS:
        store.turn()
        counts.append(len(store._connections))
        assert 0 < counts[-1] - counts[-2] <= PER_TURN


def test_connections_of_other_users_are_counted_and_rarely_logged(
    store: StoreService, flood: list[socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    while (before := store._strangers) < CONNECTIONS:
        store.turn()
        assert 0 < store._strangers - before <= PER_TURN
    assert not store._connections
    assert sum("may not attach" in record.getMessage() for record in caplog.records) <= 2


def test_a_store_without_descriptors_waits_for_some(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path)
    pid = process.process.pid
    log = tmp_path / "store-0.log"
    try:
        with TestClient(process.cluster) as first:
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (process.descriptors(), hard))
            second = TestClient(process.cluster)
            waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            waiting.connect(b"\0" + second.store._address.encode())
            eventually(lambda: "no connection is accepted" in log.read_text(), "the store says that it has none left")
            used, since = cpu_seconds(pid), time.monotonic()
            while time.monotonic() - since < 2.0:
                first.turn()  # raises StoreGone if the store ends or stands still
            assert cpu_seconds(pid) - used < 1.5  # a busy loop takes all of the 2 s on an idle machine
            assert process.process.poll() is None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1_024, hard))
            with second:
                second.write(1, "abc")
            waiting.close()
            assert log.read_text().count("no connection is accepted") <= 2
    finally:
        process.kill()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ABOVE_SELECT = f"""
import os, resource, socket
from kvstore.service import StoreService
from baton.wire import use_keys
from tests.support.cluster_keys import KEYS
from tests.kvstore.process_fixtures import NODE, TestClient, config_of
from tests.support.eventually import eventually
use_keys(KEYS)
resource.setrlimit(resource.RLIMIT_NOFILE, (4_096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with StoreService(config_of("test-above-select-%d" % os.getpid(), 8), "store-0", NODE, ()) as store:
    filler = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_100)]
    assert filler[-1] > 1_024
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for client in clients:  # of one process: for the second the store looks whether that process still runs
        client.connect(b"\\0" + store.address.encode())
        for _ in range({int(PATIENCE * 10)}):
            store.turn()
            if len(store._connections) == clients.index(client) + 1:
                break
    assert len(store._connections) == 2
    assert min(store._pidfds.values()) > 1_024
"""


def test_a_store_watches_processes_by_descriptors_of_any_number() -> None:
    subprocess.run([sys.executable, "-c", ABOVE_SELECT], check=True, timeout=10 * PATIENCE, cwd=ROOT)
