"""A disk below the arena, with real processes: what it saves survives any death, and its failures cost no request."""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from tests.soak.store_deaths import Load, documents, known_pages, restart, store_deaths
from tests.support import workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.workload import PAGE, PAGE_BYTES

NODE = "local"


def a_seed() -> int:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.mark.technique("Tiers: device, shared memory, disk, other nodes")
@pytest.mark.parametrize("nodes", [["a"], ["a", "b"]], ids=["one node", "two nodes"])
def test_a_store_killed_three_times_under_load(nodes: list[str], path: Path, tmp_path: Path) -> None:
    print(store_deaths(3, a_seed(), tmp_path, path, nodes))


def test_a_new_store_gets_what_the_workers_have_cached(path: Path, tmp_path: Path) -> None:
    """Another decode worker finds it there once no other process has it."""
    prompt = list(range(3, 3 + 12 * PAGE + 1))
    with LocalCluster(workload.settings(path, 1, 1), tmp_path) as cluster:
        first = workload.ask(cluster.address, prompt)
        restart(cluster, "store-0")
        eventually(lambda: known_pages(cluster, "store-0") >= 12, what="the cached pages in the new store")

        def refilled() -> float:
            return sum(metric(cluster, name, "pages_refilled_total") for name in ("prefill-0", "decode-0"))

        eventually(lambda: refilled() >= 12, what="these pages counted")
        cluster.kill("decode-0")
        cluster.start("decode-1")
        restart(cluster, "prefill-0")
        cluster.wait_live(["decode-1"])
        again = workload.ask(cluster.address, prompt)
        assert again.token_ids == first.token_ids
        assert again.usage.cached_tokens == 12 * PAGE
        assert again.work.pages_fetched == 12
        assert metric(cluster, "prefill-0", "prompt_tokens_computed_total") == 0


# --- directories that are not as they should be -----------------------------------------------------------------------


@dataclass
class Site:
    """A cluster whose store can be started with another disk under its feet. The disk has room for some of the pages
    only, so that it evicts too."""

    cluster: LocalCluster
    expected: Mapping[tuple[int, ...], list[int]]
    disk: Path  # the directory that the store's node has for itself

    def serve(self, until: Callable[[], object] = lambda: True) -> None:
        """Load until `until` holds, and for a while at least: every token right, no request failed, the store alive
        and holding nothing at the end."""
        pid = self.cluster.pids["store-0"]
        load = Load(self.cluster, self.expected, random.Random(a_seed()))

        def enough() -> bool:
            load.run(0.3)
            return load.requests > 40 and bool(until())

        eventually(enough, what="what the load was for")
        load.finish()
        assert self.cluster.pids.get("store-0") == pid
        eventually(lambda: nothing_held(self.cluster, "store-0"), what="nothing held in the store")

    def figure(self, sample: str, **labels: str) -> float:
        return metric(self.cluster, "store-0", sample, **labels)

    def loads(self) -> float:
        """Pages brought from the disk by the present store."""
        return self.figure("tier_loads_total", tier="disk")

    def files(self) -> list[Path]:
        return sorted(self.disk.rglob("*.kv"))


@pytest.fixture(scope="module")
def site(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    small = {"disk.path": str(folder / "disk"), "disk.max_bytes": LIMIT}
    settings = workload.settings(path, 1, 1, **{**workload.SMALL_TIERS, **small})
    with LocalCluster(settings, folder / "cluster", nodes=[NODE]) as cluster:
        yield Site(cluster, documents(path), folder / "disk" / NODE)


LIMIT = 192 * PAGE_BYTES  # twice the arena: a disk no larger than that holds hardly anything else, and is seldom read


@pytest.mark.technique("Tiers: device, shared memory, disk, other nodes")
def test_a_disk_with_room_for_some_pages_keeps_to_it_and_still_helps(site: Site) -> None:
    site.serve(lambda: site.loads() and site.figure("page_evictions_total", tier="disk"))
    assert site.figure("disk_up") == 1
    assert site.figure("tier_bytes", tier="disk") <= LIMIT
    assert sum(file.stat().st_size for file in site.files()) <= LIMIT


def test_without_a_directory_there_is_no_disk_and_nothing_else_changes(site: Site) -> None:
    site.cluster.kill("store-0")
    shutil.rmtree(site.disk)
    site.disk.write_text("a file")  # so that none can be made
    try:
        site.cluster.start("store-0")
        site.cluster.wait_live(["store-0", "prefill-0", "decode-0"])
        site.serve()
        assert site.figure("disk_up") == 0
        assert site.disk.read_text() == "a file"
    finally:
        site.disk.unlink()
