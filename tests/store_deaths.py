"""A store killed again and again under load, with a disk tier below it: the body of a test and of `make soak`.

The arena and the devices are so small that pages leave them all the time, and come back from the disk. Every request
must end with the reference's tokens. At the end nothing may be held; and once everybody who has pages in memory has
been started anew, prefixes are found on the disk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from deploy.local import LocalCluster
from tests import checkpoints
from tests.processes import workload
from tests.processes.seen import metric, nothing_held
from tests.processes.test_failures import at_rest, eventually, process

COUNT = 24  # tokens generated
STREAMS = 4
BETWEEN_DEATHS = (0.3, 2.5)  # seconds
SURE = 1e-3  # two best logits closer than this may swap between implementations
PAGE_BYTES = 2 * 4 * 2 * 16 * 16 * 4  # of the "llama" checkpoint in float32

SETTINGS: Mapping[str, object] = {
    "cluster.heartbeat_ms": 100,
    "cluster.silence_ms": 1_000,
    "store.arena_bytes": 96 * PAGE_BYTES,
    "prefill.pool_bytes": 64 * PAGE_BYTES,
    "decode.pool_bytes": 112 * PAGE_BYTES,
    "disk.admit_after": 1,
    "disk.max_bytes": "64MiB",
    "disk.segment_bytes": "1MiB",
}
"""Small tiers: none but the disk has room for all the pages of `documents`."""


def documents(path: Path, seed: int) -> dict[tuple[int, ...], list[int]]:
    """Prompts that share the prefixes of a few documents, and the greedy tokens that follow each."""
    rng = random.Random(seed)
    model = checkpoints.reference(path)
    expected: dict[tuple[int, ...], list[int]] = {}
    for _ in range(8):
        text = [rng.randrange(3, checkpoints.VOCAB) for _ in range(320)]
        for _ in range(3):
            tail = [rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.randrange(1, 60))]
            prompt = text[: 16 * rng.randrange(8, 21)] + tail
            tokens, gaps = model.generate(prompt, COUNT)
            if min(gaps) > SURE:
                expected[tuple(prompt)] = tokens
    return expected


class Load:
    """So many requests at any time, each checked as it ends."""

    def __init__(
        self, cluster: LocalCluster, expected: Mapping[tuple[int, ...], list[int]], rng: random.Random
    ) -> None:
        self._cluster = cluster
        self._expected = expected
        self._prompts = list(expected)
        self._rng = rng
        self._pool = ThreadPoolExecutor(STREAMS)
        self._running: dict[Future[workload.Answer], tuple[int, ...]] = {}
        self.requests = self.cached = self.attempts = 0

    def run(self, seconds: float) -> None:
        """Keep it up for so long. Raises AssertionError at the first wrong token, and what a request failed of."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            while len(self._running) < STREAMS:
                prompt = self._rng.choice(self._prompts)
                self._running[self._pool.submit(workload.ask, self._cluster.address, prompt, COUNT)] = prompt
            self._take(left)

    def finish(self) -> None:
        while self._running:
            self._take(60.0)

    def _take(self, seconds: float) -> None:
        finished, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in finished:
            prompt = self._running.pop(future)
            answer = future.result()
            check(prompt, answer, self._expected)
            self.requests += 1
            self.cached += answer.usage.cached_tokens
            self.attempts += answer.finished.work.attempts


def check(prompt: Sequence[int], answer: workload.Answer, expected: Mapping[tuple[int, ...], list[int]]) -> None:
    assert answer.tokens == expected[tuple(prompt)], f"wrong tokens for a prompt of {len(prompt)}"


def restart(cluster: LocalCluster, *names: str) -> None:
    """Kill these and start them again; returns when all live."""
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.start(name)
    cluster.wait_live(names)


def warm_from_disk(cluster: LocalCluster, expected: Mapping[tuple[int, ...], list[int]]) -> int:
    """Ask for everything once, after everybody who had pages in memory has been started anew. Returns how many tokens
    the disk saved."""
    restart(cluster, "store-0", "prefill-0", "decode-0")
    eventually(lambda: (found := process(cluster, "store-0")) and found.pages_known > 0, what="pages found on the disk")
    cached = 0
    for prompt in expected:
        answer = workload.ask(cluster.address, prompt, COUNT)
        check(prompt, answer, expected)
        cached += answer.usage.cached_tokens
    eventually(lambda: metric(cluster, "store-0", "tier_loads_total", tier="disk") > 0, what="loads from disk counted")
    return cached


def store_deaths(kills: int, seed: int, folder: Path, path: Path) -> dict[str, object]:
    """Kill the store so many times; raises AssertionError at the first wrong or lost token."""
    rng = random.Random(seed)
    expected = documents(path, seed)
    settings = workload.settings(path, 1, 1, **SETTINGS, **{"disk.path": str(folder / "disk")})
    loads = evictions = 0.0
    with LocalCluster(settings, folder / "cluster") as cluster:
        load = Load(cluster, expected, rng)
        load.run(2.0)
        for _ in range(kills):
            load.run(rng.uniform(*BETWEEN_DEATHS))
            loads += metric(cluster, "store-0", "tier_loads_total", tier="disk")
            evictions += metric(cluster, "store-0", "page_evictions_total", tier="host")
            cluster.kill("store-0")
            load.run(rng.uniform(0.0, 0.5))
            cluster.start("store-0")
        load.run(2.0)
        load.finish()
        cluster.wait_live(["store-0", "prefill-0", "decode-0"])
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
        warm = warm_from_disk(cluster, expected)
        assert warm > 0, "nothing was found on the disk"
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
    return {
        "seed": seed,
        "kills": kills,
        "requests": load.requests,
        "tokens": load.requests * COUNT,
        "attempts": load.attempts,
        "cached_tokens": load.cached,
        "pages_from_disk": round(loads),
        "evictions": round(evictions),
        "cached_tokens_after_restart": warm,
    }
