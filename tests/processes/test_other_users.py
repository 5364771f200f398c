"""Attacks by other users of this machine, which reach every port on loopback, on a cluster without its keys.

Each attack is tried with the keys, too: it works then, so it is the keys that keep it out.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from baton.client import Client
from baton.messages import Delta, Envelope, Hello, Message, Peer, Tokens
from baton.peer_protocol import FetchPages
from baton.v1 import cluster_pb2
from baton.wire import ClusterKeys
from deploy.local import LocalCluster, launch
from tests.processes.test_kv_events import stored
from tests.support import checkpoints, cluster_keys, other_user, workload
from tests.support.other_user import Job, OtherUser, Told

PATIENCE = 60.0
PROMPT = list(range(3, 110))
COUNT = 60  # tokens

pytestmark = pytest.mark.skipif(bool(other_user.unavailable()), reason=other_user.unavailable() or "-")

WITHOUT = {"no keys": "", "keys of its own": ClusterKeys.generate().secret}
without = pytest.mark.parametrize("keys", list(WITHOUT.values()), ids=list(WITHOUT))


@pytest.fixture(scope="module")
def cluster(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("other-users")
    key_file: dict[str, object] = {"cluster.key_file": str(cluster_keys.key_file(folder))}
    with LocalCluster(workload.settings(checkpoint("llama"), 1, 1, **key_file), folder) as running:
        yield running


def members(cluster: LocalCluster) -> dict[str, cluster_pb2.Process]:
    with Client(cluster.address, cluster.operator) as client:
        return {each.name: each for each in client.status(timeout=PATIENCE).processes}


def envelope(sender: str, addressee: str, message: Message) -> bytes:
    return msgspec.msgpack.encode(Envelope(sender, addressee, 1, message))


def ports(process: cluster_pb2.Process) -> list[str]:
    """Every TCP endpoint where it listens, which /proc/net/tcp shows to every user."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    return [f"tcp://127.0.0.1:{each.laddr.port}" for each in connections if each.status == psutil.CONN_LISTEN]


def zmq_ports(process: cluster_pb2.Process) -> list[str]:
    """Those of a worker or a store that are not for Prometheus."""
    return [port for port in ports(process) if port != f"tcp://{process.metrics_address}"]


def expected(cluster: LocalCluster) -> list[int]:
    return checkpoints.reference(Path(cluster.config.model.path)).generate(PROMPT, COUNT)[0]


def refused(other: OtherUser) -> Told:
    """Wait until every endpoint has refused it."""
    return until(other, lambda told: min(told.refused) > 0, "refused everywhere")


def until(other: OtherUser, condition: Callable[[Told], object], what: str) -> Told:
    end = time.monotonic() + PATIENCE
    while not condition(told := other.told()):
        assert time.monotonic() < end, f"not {what}: {told}"
    return told


# --- as a worker ------------------------------------------------------------------------------------------------------


def joining(cluster: LocalCluster, keys: str) -> Job:
    hello = Hello(Peer("decode", "decode-99", cluster.node, "decode-99.x", 1))
    endpoint = cluster.addresses.endpoint if cluster.addresses is not None else ""
    said = ((envelope("decode-99.x", "", hello),),)
    return Job(keys, zmq.DEALER, (endpoint,), identity=b"decode-99.x", messages=said)


@without
def test_no_other_user_joins_as_a_worker(cluster: LocalCluster, keys: str) -> None:
    with OtherUser(joining(cluster, keys)) as other:
        refused(other)
        for answer in workload.ask_all(cluster.address, [PROMPT] * 6, COUNT):
            assert answer.token_ids == expected(cluster)
        assert other.told_now().heard == ()
    assert "decode-99" not in members(cluster)


def test_a_worker_with_the_keys_is_answered(cluster: LocalCluster) -> None:
    with OtherUser(joining(cluster, cluster_keys.KEYS.secret)) as other:
        until(other, lambda told: told.heard, "answered")


# --- as a live worker -------------------------------------------------------------------------------------------------


@without
def test_no_other_user_speaks_for_a_live_worker(cluster: LocalCluster, keys: str) -> None:
    """It takes the identities of the worker's link and of its heart, and sends tokens for every request."""
    known = members(cluster)
    worker, router = known["decode-0"].incarnation, known["router"].incarnation
    names = [f"victim-{number}" for number in range(40)]
    forged = Tokens(1, tuple(Delta(name, 1, len(PROMPT), (9,) * COUNT) for name in names))
    assert cluster.addresses is not None
    jobs = [
        Job(
            keys, zmq.DEALER, (cluster.addresses.endpoint,), identity=worker.encode() + suffix,
            messages=((envelope(worker, router, forged),),),
        )
        for suffix in (b"", b"/heart")
    ]  # fmt: skip
    right = expected(cluster)
    with OtherUser(jobs[0]) as link, OtherUser(jobs[1]) as heart:
        refused(link)
        refused(heart)
        for name in names:
            answer = workload.ask(cluster.address, PROMPT, COUNT, request_id=name)
            assert answer.token_ids == right
            assert answer.work.attempts == 1
        assert link.told_now().heard == heart.told_now().heard == ()
    assert members(cluster)["decode-0"].incarnation == worker


# --- as a store -------------------------------------------------------------------------------------------------------


def wanting(cluster: LocalCluster, keys: str) -> Job:
    """For pages that the store has, as their owner tells those with the keys; others guess them."""
    store = members(cluster)["store-0"]
    workload.ask(cluster.address, PROMPT, 1)
    end = time.monotonic() + PATIENCE
    while not (known := stored(store.replay_endpoint)):
        assert time.monotonic() < end, "the store has told of no page"
    names = [name for event in known for name in event["block_hashes"]]  # type: ignore[attr-defined]
    wants = [FetchPages(power, 2**power, b"".join(names[:4]), False, 4) for power in range(6, 21)]  # a page has one
    said = tuple((envelope("store-9.x", store.incarnation, want),) for want in wants)
    return Job(keys, zmq.DEALER, tuple(zmq_ports(store)), identity=b"store-9.x", messages=said)


@without
def test_no_other_user_gets_pages(cluster: LocalCluster, keys: str) -> None:
    with OtherUser(wanting(cluster, keys)) as other:
        refused(other)
        assert other.told_now().heard == ()


def test_a_store_with_the_keys_gets_pages(cluster: LocalCluster) -> None:
    with OtherUser(wanting(cluster, cluster_keys.KEYS.secret)) as other:
        until(other, lambda told: any(len(frames) > 1 for frames in told.heard), "sent a page")


# --- as a reader of KV events -----------------------------------------------------------------------------------------


OWNERS = ("prefill-0", "decode-0", "store-0")


def reading(cluster: LocalCluster, kind: int, keys: str) -> Job:
    found = members(cluster)
    if kind == zmq.SUB:
        return Job(keys, kind, tuple(found[name].events_endpoint for name in OWNERS))
    return Job(keys, kind, tuple(found[name].replay_endpoint for name in OWNERS), messages=((b"", bytes(8)),))


@without
@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER], ids=["events", "replays"])
def test_no_other_user_gets_events(cluster: LocalCluster, kind: int, keys: str) -> None:
    with OtherUser(reading(cluster, kind, keys)) as other:
        refused(other)
        prompts = [[number, *PROMPT] for number in range(3, 9)]  # there is something to tell of
        workload.ask_all(cluster.address, prompts, 4)
        assert other.told_now().heard == ()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER], ids=["events", "replays"])
def test_a_reader_with_the_keys_gets_events(cluster: LocalCluster, kind: int) -> None:
    with OtherUser(reading(cluster, kind, cluster_keys.KEYS.secret)) as other:
        for number in range(10, 10_000):
            workload.ask(cluster.address, [number % checkpoints.VOCAB, *PROMPT], 4)
            if other.told_now().heard:
                return


# --- every port -------------------------------------------------------------------------------------------------------


def test_every_port_but_those_for_clients_wants_the_keys(cluster: LocalCluster) -> None:
    """ZMQ's greeting names its encryption."""
    assert cluster.addresses is not None
    found = members(cluster)
    http = {each.metrics_address for each in found.values()} | {
        cluster.addresses.grpc,
        cluster.addresses.http,
        cluster.addresses.api,
    }
    mechanisms = {
        f"{name} {port}": mechanism(port)
        for name, each in found.items()
        for port in ports(each)
        if port.removeprefix("tcp://") not in http
    }
    assert len(mechanisms) >= 1 + 2 + 2 + 3  # the router's; two of each worker, three of the store
    assert set(mechanisms.values()) == {b"CURVE"}, mechanisms


def mechanism(endpoint: str) -> bytes:
    """What the greeting of ZMTP 3 names, or whatever else is there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        greeting = b""
        while len(greeting) < 64 and (more := connection.recv(64)):
            greeting += more
    return greeting[12:32].rstrip(b"\0")


# --- files and command lines ------------------------------------------------------------------------------------------


def test_no_other_user_reads_the_keys(cluster: LocalCluster) -> None:
    path = cluster.config.cluster.key_path
    assert re.fullmatch(r"\S{40}\s*", path.read_text())
    with OtherUser(Job(path=str(path))) as other:
        assert other.told() == Told(problem="PermissionError")


def test_keys_that_a_cluster_makes_are_for_its_owner(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCluster, "launch", staticmethod(launch))  # as users start them
    folder = tmp_path / "cluster"
    with LocalCluster(workload.settings(checkpoint("llama"), 0, 1), folder) as running:
        path = folder / "cluster.key"
        assert running.config.cluster.key_path == path
        assert path.stat().st_mode & 0o777 == 0o600
        secret = path.read_text().strip()
        for pid in running.pids.values():
            for readable in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{pid}/{readable}").read_text()
        assert len(workload.ask(running.address, PROMPT, 4).token_ids) == 4


# --- as the router ----------------------------------------------------------------------------------------------------


@without
def test_no_other_user_is_taken_for_a_router_that_has_died(cluster: LocalCluster, keys: str) -> None:
    """It listens on the router's port: no process says a word to it, and all join the router when that is back."""
    assert cluster.addresses is not None
    cluster.kill("router")
    try:
        with OtherUser(Job(keys, zmq.ROUTER, (cluster.addresses.endpoint,), listens=True)) as other:
            told = until(other, lambda told: sum(told.refused) >= 6, "tried by the workers")
            assert told.heard == ()
    finally:
        cluster.start("router")
    cluster.wait_live(OWNERS)
    assert workload.ask(cluster.address, PROMPT, COUNT).token_ids == expected(cluster)


def test_a_router_with_the_keys_is_spoken_to(cluster: LocalCluster) -> None:
    assert cluster.addresses is not None
    cluster.kill("router")
    try:
        job = Job(cluster_keys.KEYS.secret, zmq.ROUTER, (cluster.addresses.endpoint,), listens=True)
        with OtherUser(job) as other:
            until(other, lambda told: told.heard, "spoken to")
    finally:
        cluster.start("router")
    cluster.wait_live(OWNERS)
