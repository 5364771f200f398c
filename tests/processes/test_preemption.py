"""Exact tokens from real processes while a pool too small for its load takes pages from those that run."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.support.thorough import cases

LONG = 120  # tokens of output
POOL = "4MiB"  # 64 pages; each of the prompts below takes up to 18 in the end


def some(count: int, lengths: range, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.choice(lengths))] for _ in range(count)]


@pytest.mark.technique("Preemption by recompute")
@pytest.mark.parametrize("prefill", cases([0, 1], [1]))
def test_every_token_is_right_however_often_sequences_are_preempted(
    prefill: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """First come short outputs, of which router and worker learn to expect more of the kind. Then come long ones, in
    three classes of priority: too many of them are admitted, and the urgent ones displace others besides."""
    path = checkpoint("wide-llama")
    short = some(100, range(4, 12), seed=1)
    long = some(18, range(40, 160), seed=2)
    first = workload.references(path, short, 1)
    with LocalCluster(workload.settings(path, prefill, 1, **{"decode.kv_cache_bytes": POOL}), tmp_path) as cluster:
        for prompt in short:
            stop = first[tuple(prompt)]
            answer = workload.ask(cluster.address, prompt, LONG, stop_token_ids=stop)
            assert answer.token_ids == stop
        with ThreadPoolExecutor(len(long)) as pool:
            answers = list(
                pool.map(
                    lambda each: workload.ask(cluster.address, each[1], LONG, priority=each[0] % 3 - 1), enumerate(long)
                )
            )
        workload.compare(path, long, answers, workload.references(path, long, LONG))
        eventually(lambda: metric(cluster, "decode-0", "num_preemptions_total") > 0, what="preemptions on the page")
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
        print(f"{metric(cluster, 'decode-0', 'num_preemptions_total'):.0f} preemptions")
