"""A real store, and workers that talk to it over the real socket; also workers in processes of their own.

As a program: `python -m tests.kvstore.process_fixtures CLUSTER COMMAND` is such a worker. It attaches, does what the
command says, prints "ready", and stays, saying its heartbeats, until its input ends.
"""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from baton import store_protocol as protocol
from baton.config import ArenaBytes, ClusterConfig, Config, StoreConfig, dump
from baton.errors import StoreError, StoreGone
from baton.messages import Peer
from kvstore.checksum import page_checksum
from kvstore.client.connection import StoreClient, store_address
from tests.kvstore.chains import keys, parent
from tests.kvstore.store_fixtures import NAMESPACE
from tests.support import cluster_keys
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
PAGE = 4_096
NODE = "here"
PATIENCE = 20.0  # seconds; only a failing test waits that long
HEARTBEAT = 0.05
SHARED = bytes(range(16))
"""The name of slots that "share" asks for."""

T = TypeVar("T")
_numbers = itertools.count()


def attach(client: StoreClient) -> None:
    """Connect until the store has answered. Raises StoreError when it refuses."""

    def attached() -> bool:
        try:
            client.connect()
        except StoreGone:
            return False
        return True

    eventually(attached, "attached to the store")


def config_of(cluster: str, slots: int, lease_ms: int = 400, silence_ms: int = 1_000, **place: str) -> Config:
    """`silence_ms`: of another process, after which it counts as gone. `place`: more settings of the cluster."""
    beat = int(HEARTBEAT * 1_000)
    return Config(
        cluster=ClusterConfig(name=cluster, heartbeat_ms=beat, heartbeat_timeout_ms=silence_ms, **place),
        store=StoreConfig(host_cache_bytes=ArenaBytes(slots * PAGE), lease_ms=lease_ms, writer_share=1.0),
    )


class StoreProcess:
    """`python -m kvstore`, started and, in the end, killed."""

    def __init__(
        self,
        directory: Path,
        slots: int = 8,
        router: str = "tcp://127.0.0.1:1",
        lease_ms: int = 400,
        silence_ms: int = 1_000,
    ) -> None:
        self.cluster = f"test-{os.getpid()}-{next(_numbers)}"
        self.config = directory / f"{self.cluster}.yaml"
        self.errors = directory / f"{self.cluster}.err"
        place = {"key_file": str(cluster_keys.key_file(directory)), "log_dir": str(directory)}
        self.config.write_text(dump(config_of(self.cluster, slots, lease_ms, silence_ms, **place)))
        self._router = router
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvstore", "--config", str(self.config), "--name", "store-0", "--node", NODE]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen([*command, "--router", self._router], stderr=errors, cwd=ROOT)
        return self.process

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())


class TestClient:
    """A worker in this process that asks one thing at a time."""

    __test__ = False

    def __init__(self, cluster: str, silence_s: float = PATIENCE, writers: Sequence[int] = ()) -> None:
        incarnation = f"worker-{os.getpid()}-{next(_numbers)}"
        peer = Peer("prefill", "worker", NODE, incarnation, os.getpid())
        self.store = StoreClient(store_address(cluster, NODE), peer, NAMESPACE, PAGE, silence_s, writers)
        self.attach = protocol.Attach(peer, NAMESPACE, PAGE)
        self.leases: set[int] = set()
        self._beat = 0.0
        self._unread: list[protocol.StoreReply] = []

    def __enter__(self) -> TestClient:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def connect(self) -> None:
        attach(self.store)

    def turn(self) -> list[protocol.StoreReply]:
        """What has come in, after a heartbeat if one is due. Raises StoreGone."""
        if time.monotonic() >= self._beat:
            self._beat = time.monotonic() + HEARTBEAT
            self.store.call(protocol.LeaseHeartbeat(tuple(self.leases)))
        select.select([self.store.fileno()], [], [], 0.02)
        replies = self.store.receive()
        self.store.tick(time.monotonic())
        return replies

    def next(self, kind: type[T], lease: int | None = None) -> T:
        """The next reply of this kind (and lease); others that come before it are kept."""

        def take_reply() -> T | None:
            for reply in self._unread:
                if isinstance(reply, kind) and lease in (None, getattr(reply, "lease", None)):
                    self._unread.remove(reply)
                    return reply
            self._unread += [reply for reply in self.turn() if kind is protocol.StoreHeartbeat or not _is_beat(reply)]
            return None

        return eventually(take_reply, f"{kind.__name__} of lease {lease}")

    def ask(self, call: protocol.StoreCall, kind: type[T]) -> T:
        """Say something under a lease that is kept from now on, and await the answer."""
        lease: int = call.lease  # type: ignore[union-attr]
        self.leases.add(lease)
        self.store.call(call)
        return self.next(kind, lease)

    def reserve(self, lease: int, chain: str, start: int = 0) -> Sequence[int | None]:
        call = protocol.Reserve(lease, parent(chain, start), b"".join(keys(chain, start)))
        return self.ask(call, protocol.Reserved).slots

    def write(self, lease: int, chain: str, hold: bool = False) -> None:
        """Write every page of a chain: its bytes are its letter."""
        sums: list[int] = []
        for letter, slot in zip(chain, self.reserve(lease, chain), strict=True):
            if slot is not None:
                self.store.slot(slot)[:] = letter.encode() * PAGE
            sums.append(page_checksum(letter.encode() * PAGE, 1))
        self.ask(protocol.Seal(lease, 0, tuple(sums), hold), protocol.Sealed)


def _is_beat(reply: protocol.StoreReply) -> bool:
    return isinstance(reply, protocol.StoreHeartbeat)


@contextmanager
def worker_process(cluster: str, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own that has done `command` and says its heartbeats. "… with PID": that process
    writes for it."""
    arguments = [sys.executable, "-m", "tests.kvstore.process_fixtures", cluster, command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def _main(cluster: str, command: str) -> None:
    command, *helpers = command.split(" with ")
    client = TestClient(cluster, writers=[os.pidfd_open(int(pid)) for pid in helpers])
    client.connect()
    match command.split():
        case ["reserve", chain]:
            client.reserve(1, chain)
        case ["leave", chain]:
            client.reserve(1, chain)
            client.store.disconnect()
        case ["share"]:
            client.leases.add(1)
            client.store.call(protocol.ShareSlots(1, SHARED, slots=3, members=2, place=1))
        case ["write", chain]:
            client.write(1, chain, hold=True)
        case _:
            raise SystemExit(f"unknown command {command!r}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        if select.select([sys.stdin], [], [], 0.01)[0]:
            word = sys.stdin.readline().strip()
            if word != "seal":
                return
            client.store.call(protocol.Seal(1, 0, (0,)))
        if client.store.connected:
            try:
                client.turn()
            except StoreError:
                return


if __name__ == "__main__":
    _main(*sys.argv[1:])
