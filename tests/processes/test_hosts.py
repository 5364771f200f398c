"""A cluster over two hosts: real processes in network namespaces of their own, and a cable between them."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.client import Client
from baton.wire import ClusterKeys
from deploy.local import LocalCluster
from tests.support import checkpoints, network_namespaces, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.network_namespaces import ADDRESSES, Hosts

pytestmark = pytest.mark.skipif(bool(network_namespaces.unavailable()), reason=network_namespaces.unavailable())

OPEN = {"router.host": ADDRESSES[0], "api.host": ADDRESSES[0], "api.insecure": True}
_DEADLINE = 60.0  # seconds
PLACED = {"decode-0": "one", "prefill-0": "two"}


@pytest.fixture
def two() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


def spread(two: Hosts, path: Path, folder: Path, **more: object) -> LocalCluster:
    """Router, store and decode worker on host one; store and prefill worker on host two."""
    settings = workload.settings(path, 1, 1, **{**OPEN, **more})
    return LocalCluster(settings, folder, nodes=two.nodes, placed=PLACED, reach=two.reach)


def state_of(client: Client, name: str) -> int:
    return next(process.state for process in client.status(timeout=_DEADLINE).processes if process.name == name)


def keys_in(folder: Path) -> str:
    ClusterKeys.generate().write(folder / "cluster.key")
    return str(folder / "cluster.key")


def test_prompts_computed_on_one_host_are_continued_on_the_other(two: Hosts, path: Path, tmp_path: Path) -> None:
    prompts = [prompt for prompt in workload.prompts() if len(prompt) < 600][:16]
    with spread(two, path, tmp_path, **{"cluster.key_file": keys_in(tmp_path)}) as cluster:
        answers = workload.ask_all(cluster.address, prompts)
        workload.compare(path, prompts, answers, workload.references(path, prompts))
        assert any(a.work.prefill_worker and a.work.pages_fetched for a in answers)
        eventually(lambda: metric(cluster, "store-0", "tier_loads_total", tier="remote") > 0)
        eventually(lambda: all(nothing_held(cluster, store) for store in ("store-0", "store-1")))


CUT: Mapping[str, Callable[[Client, float], bool]] = {
    "restored before anybody noticed": lambda client, seconds: seconds > 0.3,
    "restored when the other host had been given up": lambda client, seconds: state_of(client, "prefill-0") != "live",
    "not restored": lambda client, seconds: False,
}
"""Whether it is time to restore the cable, which was cut so many seconds ago."""


def test_the_cable_is_cut_in_mid_transfer(two: Hosts, path: Path, tmp_path: Path) -> None:
    """In each case another prompt of 3,000 tokens, of which some pages have come and others are being computed."""
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
