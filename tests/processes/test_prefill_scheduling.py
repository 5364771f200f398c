"""Prompts that begin alike, at the same time, in a cluster of real processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.support.workload import PAGE

SHARED = 1_600 // PAGE  # pages


def test_four_prompts_that_begin_alike_compute_it_once(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(5)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, checkpoints.VOCAB) for _ in range(count)]

    shared = some(SHARED * PAGE)
    prompts = [shared + some(2 * PAGE + 5) for _ in range(4)]
    path = checkpoint("wide-llama")
    settings = workload.settings(path, **{"prefill.max_num_seqs": 4, "prefill.max_num_batched_tokens": 64})
    with LocalCluster(settings, tmp_path) as cluster:
        answers = workload.ask_all(cluster.address, prompts)
        workload.compare(path, prompts, answers, workload.references(path, prompts))
        split = [answer for answer in answers if answer.work.prefill_worker]
        assert len(split) == 4
        once = SHARED * PAGE + 4 * (2 * PAGE + 4)  # all but the last token of each
        eventually(lambda: metric(cluster, "prefill-0", "prompt_tokens_computed_total") == once, what="computed once")
        assert metric(cluster, "prefill-0", "prompt_pages_cached_total") == 3 * SHARED
