"""A cluster over two hosts: real processes in network namespaces of their own, and a cable between them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from baton.client import Client
from baton.errors import StartupError
from baton.v1 import cluster_pb2
from baton.wire import ClusterKeys
from deploy.local import LocalCluster
from tests.support import checkpoints, network_namespaces, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.network_namespaces import ADDRESSES, Hosts

pytestmark = pytest.mark.skipif(bool(network_namespaces.unavailable()), reason=network_namespaces.unavailable())

OPEN = {"router.host": ADDRESSES[0], "api.host": ADDRESSES[0], "api.insecure": True}
PLACED = {"decode-0": "one", "prefill-0": "two"}


@pytest.fixture
def two() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


def spread(two: Hosts, path: Path, folder: Path, **more: object) -> LocalCluster:
    """Router, store and decode worker on host one; store and prefill worker on host two."""
    settings = workload.settings(path, 1, 1, **{**OPEN, **more})
    return LocalCluster(settings, folder, nodes=two.nodes, placed=PLACED, reach=two.reach)


def state_of(client: Client, name: str) -> int:
    return next(process.state for process in client.status(timeout=_DEADLINE).processes if process.name == name)


def keys_in(folder: Path) -> str:
    ClusterKeys.generate().write(folder / "cluster.key")
    return str(folder / "cluster.key")


# --- the hosts themselves -------------------------------------------------------------------------------------------


_DEADLINE = 60.0  # seconds
_LISTEN = f"""
import socket
server = socket.create_server(("{ADDRESSES[1]}", 7777))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""
_CONNECT = f"""
import socket, time
began = time.monotonic()
socket.create_connection(("{ADDRESSES[1]}", 7777), timeout=3)
print(time.monotonic() - began)
"""


def test_the_cable_carries_is_cut_and_restored(two: Hosts) -> None:
    with two.two.start(sys.executable, "-c", _LISTEN, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            connect = (sys.executable, "-c", _CONNECT)
            two.one.run(*connect)
            two.cut()
            with pytest.raises(AssertionError, match=r"unreachable|timed out"):
                two.one.run(*connect)
            two.restore()
            two.one.run(*connect)
            if two.delay(60):
                assert float(two.one.run(*connect)) > 0.1
        finally:
            server.kill()


def test_everything_ends_with_the_test_that_is_killed() -> None:
    """Neither the namespaces' holders nor what runs in them outlives a test that is killed."""
    script = """
import signal
from tests.support.network_namespaces import Hosts
hosts = Hosts()
network_namespaces.reach("10.77.0.2:1")
network_namespaces.two.start("sleep", "77777")
print("ready", flush=True)
signal.pause()
"""
    test = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert test.stdout is not None
    assert test.stdout.readline() == "ready\n"
    ours = descendants(test.pid)
    assert len(ours) >= 4
    test.send_signal(signal.SIGKILL)
    test.wait()
    test.stdout.close()
    eventually(lambda: not any(Path(f"/proc/{pid}/root").is_dir() for pid in ours))


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


# --- clusters -------------------------------------------------------------------------------------------------------


def test_processes_of_two_hosts_are_one_cluster(two: Hosts, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    key_file = keys_in(tmp_path)
    with spread(two, checkpoint("llama"), tmp_path, **{"cluster.key_file": key_file}) as cluster:
        status = cluster.wait_live(cluster.pids)
        metrics = {process.name: process.metrics_address for process in status.processes}
        assert metrics["store-0"].startswith(f"{ADDRESSES[0]}:")
        assert metrics["prefill-0"].startswith(f"{ADDRESSES[1]}:")
        prompt = list(range(3, 43))
        first = workload.ask(cluster.address, prompt).token_ids
        assert len(first) == workload.OUTPUT
        # The other host goes, and comes back: those on it are silent for a while, then live again.
        two.cut()
        with Client(cluster.address, cluster.operator) as client:
            eventually(lambda: state_of(client, "prefill-0") != cluster_pb2.PROCESS_STATE_LIVE)
        assert workload.ask(cluster.address, prompt).token_ids == first
        two.restore()
        cluster.wait_live(cluster.pids, 30)


def test_a_process_with_other_keys_never_joins(two: Hosts, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    key_file, strange = keys_in(tmp_path), tmp_path / "strange.key"
    with spread(two, checkpoint("llama"), tmp_path, **{"cluster.key_file": key_file}) as cluster:
        ClusterKeys.generate().write(strange)
        assert cluster.addresses is not None
        config = tmp_path / "strange.yaml"
        config.write_text((tmp_path / "store-0.yaml").read_text().replace(key_file, str(strange)))
        stranger = two.two.start(
            *(sys.executable, "-m", "kvstore", "--config", config, "--name", "store-9", "--node", "nine"),
            *("--router", cluster.addresses.endpoint, "--host", ADDRESSES[1]),
        )
        try:
            log = cluster.log("router").with_name("logs") / "router.log"
            eventually(lambda: "refused a connection" in log.read_text(), _DEADLINE)
            assert stranger.poll() is None
            names = {process.name for process in cluster.wait_live(cluster.pids).processes}
            assert "store-9" not in names
        finally:
            stranger.kill()
            stranger.wait()


def test_without_a_key_file_no_process_listens_on_an_address_that_other_hosts_reach(
    two: Hosts, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    cluster = spread(two, checkpoint("llama"), tmp_path)
    without = msgspec.structs.replace(cluster.config.cluster, key_file="")
    cluster.config = msgspec.structs.replace(cluster.config, cluster=without)
    with pytest.raises(StartupError, match=r"10\.77\.0\.1 is not on loopback.*cluster\.key_file"):
        cluster.up()


# --- pages between hosts ----------------------------------------------------------------------------------------------


def test_prompts_computed_on_one_host_are_continued_on_the_other(
    two: Hosts, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint("llama")
    prompts = [prompt for prompt in workload.prompts() if len(prompt) < 600][:16]
    with spread(two, path, tmp_path, **{"cluster.key_file": keys_in(tmp_path)}) as cluster:
        answers = workload.ask_all(cluster.address, prompts)
        workload.compare(path, prompts, answers, workload.references(path, prompts))
        assert any(a.work.prefill_worker and a.work.pages_fetched for a in answers)
        eventually(lambda: metric(cluster, "store-0", "tier_loads_total", tier="remote") > 0)
        eventually(lambda: all(nothing_held(cluster, store) for store in ("store-0", "store-1")))


CUT: Mapping[str, Callable[[Client, float], bool]] = {
    "restored before anybody noticed": lambda client, seconds: seconds > 0.3,
    "restored when the other host had been given up": lambda client, seconds: (
        state_of(client, "prefill-0") != cluster_pb2.PROCESS_STATE_LIVE
    ),
    "not restored": lambda client, seconds: False,
}
"""Whether it is time to restore the cable, which was cut so many seconds ago."""


def test_the_cable_is_cut_in_mid_transfer(two: Hosts, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """In each case another prompt of 3,000 tokens, of which some pages have come and others are being computed."""
    path = checkpoint("llama")
    quick = {
        "cluster.heartbeat_ms": 100,
        "cluster.heartbeat_timeout_ms": 1_000,
        "prefill.max_num_batched_tokens": workload.PAGE,
    }
    quick |= workload.SLOW_ENGINE  # that there is a middle
    rng = random.Random(3)
    with (
        spread(two, path, tmp_path, **{"cluster.key_file": keys_in(tmp_path)}, **quick) as cluster,
        Client(cluster.address, cluster.operator) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def fetched() -> float:
            return metric(cluster, "store-0", "tier_loads_total", tier="remote")

        for case, time_to_restore in CUT.items():
            prompt = [rng.randrange(3, checkpoints.VOCAB) for _ in range(3_000)]
            before = fetched()
            running = pool.submit(workload.ask, cluster.address, prompt, 12)
            eventually(lambda before=before: fetched() > before)
            two.cut()
            began = time.monotonic()
            assert not running.done()
            while not running.done():
                if time_to_restore(client, time.monotonic() - began):
                    two.restore()
                    break
                time.sleep(0.05)
            answer = running.result(60)
            print(f"{case}: answered after {time.monotonic() - began:.1f} s, {answer.work.attempts} attempts")
            assert answer.token_ids == checkpoints.reference(path).generate(prompt, 12)[0]
            two.restore()
            cluster.wait_live(cluster.pids, 30)
            eventually(lambda: all(nothing_held(cluster, store) for store in ("store-0", "store-1")))
