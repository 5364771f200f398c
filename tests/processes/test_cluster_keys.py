"""Every port of a cluster but those for clients wants its keys, and the keys are for their owner alone.

`tests/baton/test_keys.py` shows that nothing passes such a port without them.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baton.client import Client
from baton.operator_api import Process
from deploy.local import LocalCluster, launch
from tests.support import cluster_keys, workload

PATIENCE = 60.0
PROMPT = list(range(3, 110))


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster-keys")
    key_file: dict[str, object] = {"cluster.key_file": str(cluster_keys.key_file(folder))}
    with LocalCluster(workload.settings(path, 1, 1, **key_file), folder) as running:
        yield running


def members(cluster: LocalCluster) -> dict[str, Process]:
    with Client(cluster.address, cluster.operator) as client:
        return {each.name: each for each in client.status(timeout=PATIENCE).processes}


def ports(process: Process) -> list[str]:
    """Every TCP endpoint where it listens, which /proc/net/tcp shows to every user."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    return [f"tcp://127.0.0.1:{each.laddr.port}" for each in connections if each.status == psutil.CONN_LISTEN]


def test_every_port_but_those_for_clients_wants_the_keys(cluster: LocalCluster) -> None:
    """ZMQ's greeting names its encryption."""
    assert cluster.addresses is not None
    by_name = members(cluster)
    http = {each.metrics_address for each in by_name.values()} | {
        cluster.addresses.grpc,
        cluster.addresses.http,
        cluster.addresses.api,
    }
    mechanisms = {
        f"{name} {port}": mechanism(port)
        for name, each in by_name.items()
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
