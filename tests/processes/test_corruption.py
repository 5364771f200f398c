"""One bit flipped in a page, tier by tier, under a real cluster: found, counted, dropped, made again; tokens right.

Corruption between stores: `tests/kvstore/test_service_two_stores.py`. Pages on a worker's device have no checksum:
every step reads them, in arithmetic that has no time for one. A page that leaves for the arena is sealed with a
checksum of its bytes on the device. `pages.recompute_share` finds what was wrong there.
"""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from deploy.local import LocalCluster
from engine.cpu import build
from tests.support import checkpoints, workload
from tests.support.engines import ENGINE
from tests.support.eventually import eventually
from tests.support.flipping_engine import LENGTH
from tests.support.metrics_page import metric
from tests.support.workload import PAGE, PAGE_BYTES

FULL = 12  # pages of the prompt that its worker may take from elsewhere
PROMPT = FULL * PAGE + PAGE // 2  # tokens
POOL = 40  # pages on the worker's device
COUNT = 12  # tokens generated


@dataclass
class Site:
    """A decode worker above a store with a disk, and a prompt of its own for each test."""

    cluster: LocalCluster
    path: Path
    disk: Path
    rng: random.Random

    def begin(self) -> list[int]:
        """Start over with an empty arena and an empty disk. Returns a prompt whose pages are in both."""
        self.kill_store()
        shutil.rmtree(self.disk)
        self.start_store()
        prompt = self.tokens(PROMPT)
        self.ask(prompt)
        eventually(lambda: self.on_disk() >= FULL, what="pages on the disk")
        return prompt

    def kill_store(self) -> None:
        """And the worker, which would give the next store what its device has."""
        self.cluster.kill("store-0")
        self.cluster.kill("decode-0")

    def start_store(self) -> None:
        """Returns once a worker has attached, and the disk is known."""
        self.cluster.start("store-0")
        self.cluster.start("decode-0")
        self.cluster.wait_live(["store-0", "decode-0"])
        eventually(lambda: metric(self.cluster, "store-0", "disk_up"), what="the disk in use")

    def ask(self, prompt: list[int]) -> int:
        """Ask for it; the tokens must be right. Returns how many of its pages came from the store."""
        answer = workload.ask(self.cluster.address, prompt, COUNT)
        assert answer.token_ids == checkpoints.reference(self.path).generate(prompt, COUNT)[0]
        return answer.work.pages_fetched

    def ask_again(self, prompt: list[int]) -> int:
        """The same when the worker's device has forgotten it, because of another prompt as large as its pool."""
        workload.ask(self.cluster.address, self.tokens(PAGE * POOL - 1), 1)
        return self.ask(prompt)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, checkpoints.VOCAB) for _ in range(count)]

    def on_disk(self) -> float:
        return metric(self.cluster, "store-0", "kv_pages", tier="disk", state="sealed")

    def failures(self, number: int, tier: str) -> None:
        """Wait until the store has counted so many."""
        sample = "checksum_failures_total"
        eventually(lambda: metric(self.cluster, "store-0", sample, tier=tier) == number, what=f"{number} of {sample}")

    def page_file(self, place: int) -> Path:
        """The file of a page of the prompt: each page's file names the page before it."""
        names = {file.name.split("-")[1]: file for file in self.disk.rglob("*.kv")}
        file = names["start"]
        for _ in range(place):
            file = names[file.name.split("-")[0]]
        return file


@pytest.fixture(scope="module")
def site(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("corruption")
    settings = workload.settings(
        path, 0, 1,
        **{
            **workload.SLOW_ENGINE,
            "cluster.heartbeat_ms": 100,
            "cluster.heartbeat_timeout_ms": 1_000,
            "store.verify_pages": True,
            "store.host_cache_bytes": 512 * PAGE_BYTES,
            "decode.kv_cache_bytes": POOL * PAGE_BYTES,
            "disk.path": str(folder / "disk"),
            "disk.admit_after": 1,
        },
    )  # fmt: skip
    with LocalCluster(settings, folder / "cluster") as cluster:
        workload.ask(cluster.address, [3, 4, 5], 1)
        yield Site(cluster, path, folder / "disk" / cluster.node, random.Random(1))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


def test_in_the_arena(site: Site) -> None:
    prompt = site.begin()
    descriptors = Path(f"/proc/{site.cluster.pids['store-0']}/fd").iterdir()
    arena = next(fd for fd in descriptors if "memfd:" in str(fd.readlink()))
    flip(arena, 5 * PAGE_BYTES + PAGE_BYTES // 2)  # slots are given out from the first
    assert site.ask_again(prompt) < FULL
    site.failures(1, "host")
    assert metric(site.cluster, "decode-0", "checksum_failures_total", tier="host") == 1
    assert site.ask_again(prompt) == FULL
    site.failures(1, "host")


@pytest.mark.parametrize("down", [True, False], ids=["while the store is down", "while the store is up"])
def test_on_the_disk(site: Site, down: bool) -> None:
    prompt = site.begin()
    site.kill_store()  # with it goes the arena
    if down:
        flip(site.page_file(5), PAGE_BYTES // 2)
    site.start_store()
    eventually(lambda: site.on_disk() >= FULL, what="pages found on the disk")
    if not down:
        flip(site.page_file(5), PAGE_BYTES // 2)
    assert site.ask_again(prompt) < FULL
    site.failures(1, "disk")
    assert site.ask_again(prompt) == FULL
    # What was made again is on the disk again, and the bad file is gone.
    eventually(lambda: site.on_disk() >= FULL, what="pages on the disk")
    site.kill_store()
    site.start_store()
    eventually(lambda: site.on_disk() >= FULL, what="pages found on the disk")
    assert site.ask_again(prompt) == FULL
    site.failures(0, "disk")


def test_on_the_disk_where_writing_was_cut_off(site: Site) -> None:
    """After a power loss a name may be there without all of its bytes: it is deleted when the store starts."""
    prompt = site.begin()
    site.kill_store()
    os.truncate(site.page_file(FULL - 1), PAGE_BYTES // 2)
    site.start_store()
    eventually(lambda: metric(site.cluster, "store-0", "disk_torn_records_total") == 1, what="the file found")
    assert site.ask_again(prompt) == FULL - 1
    assert site.ask_again(prompt) == FULL
    site.failures(0, "disk")


FLIPPING = {"prefill": ["tests.support.flipping_engine", "prefill"]}


@pytest.mark.skipif(
    ENGINE.name == "vllm" or not build.can_compile(), reason="a page's bits are to depend on its tokens alone"
)
def test_on_the_device(path: Path, tmp_path: Path) -> None:
    """The page was sealed as it is. It is found by recomputing it, and is no longer found in any cache."""
    rng = random.Random(2)
    prompt, sound = ([rng.randrange(3, checkpoints.VOCAB) for _ in range(LENGTH + more)] for more in (0, 100))
    settings = workload.settings(path, 1, 1, **{"pages.recompute_share": 1.0})
    with patch.dict("deploy.local._MODULES", FLIPPING), LocalCluster(settings, tmp_path) as cluster:

        def counted(name: str, worker: str = "prefill-0") -> float:
            return metric(cluster, worker, f"{name}_total")

        workload.ask(cluster.address, sound)
        pages = len(sound[:-1]) // PAGE
        for worker in ("prefill-0", "decode-0"):
            what = f"sound pages of {worker} recomputed"
            eventually(lambda worker=worker: counted("pages_recomputed", worker) >= pages, what)
            assert counted("pages_differing", worker) == 0
        workload.ask(cluster.address, prompt)
        eventually(lambda: counted("pages_differing") == 1, what="the page found")
        log = cluster.config.cluster.logs / "prefill-0.log"
        eventually(lambda: "differs from what its tokens give" in log.read_text(), what="a line about it")
        eventually(lambda: metric(cluster, "store-0", "checksum_failures_total", tier="host"), what="the store told")
        cluster.kill("decode-0")  # which has a copy
        cluster.start("decode-1")
        cluster.wait_live(["decode-1"])
        before = counted("prompt_tokens_computed")
        answer = workload.ask(cluster.address, prompt)
        assert answer.token_ids == checkpoints.reference(path).generate(prompt, workload.OUTPUT)[0]
        eventually(
            lambda: counted("prompt_tokens_computed") == before + LENGTH - 1 - 2 * PAGE, what="the rest computed"
        )
