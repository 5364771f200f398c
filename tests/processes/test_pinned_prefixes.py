"""Pinned prefixes in a cluster of real processes: they outlast a flood that evicts everything else, until they end."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import Client
from baton.errors import PinNotFound, QuotaExceeded
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.workload import PAGE, PAGE_BYTES

SLOTS = 96  # of the arena, and of either worker's pool
PREFIX = 20  # pages
QUOTA = 2 * PREFIX


@pytest.fixture
def cluster(path: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    small = dict.fromkeys(
        ("store.host_cache_bytes", "prefill.kv_cache_bytes", "decode.kv_cache_bytes"), SLOTS * PAGE_BYTES
    )
    settings = workload.settings(path, 1, 1, **small, **{"store.pin_bytes": QUOTA * PAGE_BYTES})
    with LocalCluster(settings, tmp_path) as running:
        yield running


def some(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, checkpoints.VOCAB) for _ in range(tokens)]


def flood(cluster: LocalCluster, seed: int) -> None:
    """Prompts of three times as many pages as anything holds."""
    for i in range(12):
        workload.ask(cluster.address, some(24 * PAGE + 1, seed + i), count=1)


def cached(cluster: LocalCluster, prefix: list[int]) -> int:
    """Pages of a prefix that need not be computed for a prompt that begins with it."""
    return workload.ask(cluster.address, [*prefix, 5, 6, 7], count=4).usage.cached_tokens // PAGE


@pytest.mark.technique("Pinned prefixes")
def test_a_pinned_prefix_outlasts_a_flood(path: Path, cluster: LocalCluster) -> None:
    prefix, other = some(PREFIX * PAGE, 1), some(PREFIX * PAGE, 2)
    with Client(cluster.address, cluster.operator) as client:
        first = client.pin_prefix(prefix, id="kept", timeout=30)
        assert (first.pin.pages, first.pin.bytes, first.pin.node) == (PREFIX, PREFIX * PAGE_BYTES, "local")
        assert (first.tokens_computed, first.tokens_cached) == (PREFIX * PAGE, 0)
        again = client.pin_prefix(prefix, id="again", timeout=30)
        assert (again.tokens_computed, again.tokens_cached) == (0, PREFIX * PAGE)
        workload.ask(cluster.address, other, count=1)
        flood(cluster, 100)
        assert cached(cluster, other) == 0
        answer = workload.ask(cluster.address, [*prefix, 5, 6, 7])
        assert answer.usage.cached_tokens == PREFIX * PAGE
        assert (answer.work.prefill_worker, answer.work.pages_fetched) == ("", PREFIX)
        prompts = [[*prefix, 5, 6, 7]]
        workload.compare(path, prompts, [answer], workload.references(path, prompts))
        # Both pins are of the same pages, which count once; more than the quota is refused.
        with pytest.raises(QuotaExceeded, match=r"store\.pin_bytes"):
            client.pin_prefix(some((QUOTA - PREFIX + 1) * PAGE, 3), timeout=30)
        with pytest.raises(QuotaExceeded, match=r"store\.pin_bytes"):
            client.pin_prefix(some((QUOTA + 1) * PAGE, 3), timeout=30)
        assert [pin.id for pin in client.pins()] == ["again", "kept"]
        client.unpin("kept")
        with pytest.raises(PinNotFound):
            client.unpin("kept")
        flood(cluster, 200)
        assert cached(cluster, prefix) == PREFIX  # the other pin still holds them
        client.unpin("again")
        flood(cluster, 300)
        assert cached(cluster, prefix) == 0
