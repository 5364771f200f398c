"""The rest of a long prompt goes to another prefill worker: the same tokens, and a death of either costs its chunks."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton.client import Client, Generated
from baton.operator_api import Explanation
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, expected, start
from tests.processes.test_pipelined_prompts import pages_known
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, load
from tests.support.eventually import eventually

__all__ = ["start"]  # a fixture

_RNG = random.Random(17)
OUTPUT, TRIES = 12, 4


@pytest.mark.technique("Long prompts over several prefill workers")
@pytest.mark.parametrize("victim", ["", "prefill-0", "prefill-1"])
def test_the_rest_of_a_prompt_moves(start: Callable[..., LocalCluster], path: Path, victim: str) -> None:
    cluster = start(2, 1, **{"prefill.max_num_batched_tokens": workload.PAGE, "prefill.step_ms": 5})
    streams, prompts = Streams(cluster), list[list[int]]()
    with Client(cluster.address, cluster.operator) as client:

        def explained() -> list[Explanation]:
            return [client.explain(each.request_id, timeout=DEADLINE) for each in client.requests(timeout=DEADLINE)]

        def moved() -> bool:
            return any("the rest of its prompt" in each.ended_because for one in explained() for each in one.attempts)

        def begin() -> list[Future[Generated]]:
            client.drain("prefill-1")
            enough = pages_known(cluster) + 8
            prompts.extend([_RNG.randrange(3, checkpoints.VOCAB) for _ in range(3_500)] for _ in range(2))
            futures = [streams.start(prompt, OUTPUT) for prompt in prompts[-2:]]
            eventually(lambda: load(cluster, "prefill-0").running == 2, what="both prompts at one worker")
            eventually(lambda: pages_known(cluster) >= enough, what="pages of both")
            client.drain("prefill-1", undo=True)
            eventually(lambda: moved() or all(each.done() for each in futures), what="the rest at the other worker")
            return futures

        futures = begin()
        while not moved() and len(prompts) < 2 * TRIES:  # on a slow machine they may end first
            futures = begin()
        assert moved()
        if victim:
            cluster.kill(victim)
        for future in futures:
            future.result(DEADLINE)
        parts = [one.attempts for one in explained() if len(one.attempts) > 1]
    assert ["prefill-0", "prefill-1"] in [[each.prefill_worker for each in attempts[:2]] for attempts in parts]
    for attempts in parts:
        cached = [each.predicted.cached_tokens or 0 for each in attempts]
        assert 0 == cached[0] < cached[1], "the pages that were sealed are not computed again"
        assert cached[1] == min(cached[1:])
    assert streams.seen == [expected(path, prompt, OUTPUT) for prompt in prompts]
    eventually(lambda: at_rest(cluster), what="everything freed")
