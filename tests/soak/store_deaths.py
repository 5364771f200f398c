"""Stores killed again and again under load, with disk tiers below them: the body of a test and of `make soak`.

One store that both workers share, or two, between which every page of a prompt must pass. The arenas and the devices
are so small that pages leave them all the time, and come back from the disk. Every request must end with the
reference's tokens. At the end nothing may be held. Once every process with pages in memory has been restarted, prefixes
are found on the disk.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

from baton.client import Generated
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, process
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.workload import PAGE

COUNT = 24  # tokens generated
STREAMS = 4
BETWEEN_DEATHS = (0.3, 2.5)  # seconds
SURE = 1e-3
"""Torch computes here, and the order of its sums goes by the step's rows: two best logits closer than this may swap."""


@cache
def documents(path: Path) -> Mapping[tuple[int, ...], list[int]]:
    """Prompts that share the prefixes of a few documents, and the greedy tokens that follow each."""
    rng = random.Random(5)
    model = checkpoints.reference(path)
    expected: dict[tuple[int, ...], list[int]] = {}
    for _ in range(8):
        text = [rng.randrange(3, checkpoints.VOCAB) for _ in range(20 * PAGE)]
        for _ in range(3):
            tail = [rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.randrange(1, 60))]
            prompt = text[: PAGE * rng.randrange(8, 21)] + tail
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
        self._running: dict[Future[Generated], tuple[int, ...]] = {}
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
            self.attempts += answer.work.attempts


def check(prompt: Sequence[int], answer: Generated, expected: Mapping[tuple[int, ...], list[int]]) -> None:
    assert answer.token_ids == expected[tuple(prompt)], f"wrong tokens for a prompt of {len(prompt)}"


def restart(cluster: LocalCluster, *names: str) -> None:
    """Kill these and start them again; returns when all live."""
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.start(name)
    cluster.wait_live(names)


def known_pages(cluster: LocalCluster, store: str) -> int:
    """How many of its pages the router knows of, in its arena and on its disk."""
    status = process(cluster, store)
    return status.pages_known if status else 0


def warm_from_disk(cluster: LocalCluster, stores: Sequence[str], expected: Mapping[tuple[int, ...], list[int]]) -> int:
    """Restart every process with pages in memory, then ask for each prompt once. Returns how many tokens the disks
    saved."""
    restart(cluster, *stores, "prefill-0", "decode-0")
    eventually(lambda: all(known_pages(cluster, store) for store in stores), what="pages found on every disk")
    cached = 0
    for prompt in expected:
        answer = workload.ask(cluster.address, prompt, COUNT)
        check(prompt, answer, expected)
        cached += answer.usage.cached_tokens
    eventually(lambda: loads_of(cluster, stores, "disk") > 0, what="loads from disk counted")
    return cached


def loads_of(cluster: LocalCluster, stores: Sequence[str], tier: str) -> float:
    """Pages brought from that tier by the stores that run now."""
    return sum(metric(cluster, store, "tier_loads_total", tier=tier) for store in stores)


def store_deaths(kills: int, seed: int, folder: Path, path: Path, nodes: Sequence[str] = ("a",)) -> dict[str, object]:
    """Kill stores so many times; raises AssertionError at the first wrong or lost token, or where no page was ever read
    from a tier below."""
    rng = random.Random(seed)
    expected = documents(path)
    settings = workload.settings(path, 1, 1, **workload.SMALL_TIERS, **{"disk.path": str(folder / "disk")})
    placed = {"decode-0": nodes[0], "prefill-0": nodes[-1]}
    stores = [f"store-{number}" for number in range(len(nodes))]
    loads = {"disk": 0.0, "remote": 0.0}
    evictions = 0.0
    with LocalCluster(settings, folder / "cluster", nodes=nodes, placed=placed) as cluster:
        load = Load(cluster, expected, rng)
        load.run(1.0)
        for _ in range(kills):
            load.run(rng.uniform(*BETWEEN_DEATHS))
            victim = rng.choice(stores)
            for tier in loads:
                loads[tier] += loads_of(cluster, [victim], tier)
            evictions += metric(cluster, victim, "page_evictions_total", tier="host")
            cluster.kill(victim)
            load.run(rng.uniform(0.0, 0.5))
            cluster.start(victim)

        def every_tier_was_read() -> bool:
            load.run(0.3)
            tiers = loads if len(nodes) > 1 else ["disk"]
            return all(loads[tier] + loads_of(cluster, stores, tier) > 0 for tier in tiers)

        # On a slow machine no store may have lived for long enough so far.
        eventually(every_tier_was_read, what="pages read from the disk, and from another store where there is one")
        load.finish()
        cluster.wait_live([*stores, "prefill-0", "decode-0"])
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: all(nothing_held(cluster, store) for store in stores), what="nothing held in any store")
        for tier in loads:
            loads[tier] += loads_of(cluster, stores, tier)
        warm = warm_from_disk(cluster, stores, expected)
        assert warm > 0, "nothing was found on the disk"
        eventually(lambda: all(nothing_held(cluster, store) for store in stores), what="nothing held in any store")
    return {
        "seed": seed,
        "nodes": len(nodes),
        "kills": kills,
        "requests": load.requests,
        "tokens": load.requests * COUNT,
        "attempts": load.attempts,
        "cached_tokens": load.cached,
        "pages_from_disk": round(loads["disk"]),
        "pages_from_other_stores": round(loads["remote"]),
        "evictions": round(evictions),
        "cached_tokens_after_restart": warm,
    }
