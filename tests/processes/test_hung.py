"""Processes whose main loop hangs while their heart beats: requests end well without them, and they come back."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.operator_api import ProcessState
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, LONG, expected, start
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, process
from tests.support.eventually import eventually
from tests.support.hung_thread import hung

__all__ = ["start"]  # a fixture

_RNG = random.Random(11)
HUNG = {"cluster.step_timeout_ms": 5_000, "router.disaggregation": "always", "prefill.max_num_seqs": 8}


def fresh() -> list[int]:
    """A prompt that no cache has."""
    return [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(100)]


def listed(cluster: LocalCluster, name: str, state: ProcessState) -> Callable[[], bool]:
    def is_so() -> bool:
        status = process(cluster, name)
        return status is not None and status.state == state

    return is_so


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_requests_go_past_a_worker_that_hangs_outside_a_step(
    start: Callable[..., LocalCluster], path: Path, victim: str
) -> None:
    cluster = start(2, 2, **HUNG)
    streams = Streams(cluster)
    prompts = [LONG[100 * i : 100 * i + 90] for i in range(6)]
    with hung(cluster.pids[victim]):
        futures = [streams.start(prompt, 20) for prompt in prompts]
        for prompt, future, seen in zip(prompts, futures, streams.seen, strict=True):
            future.result(DEADLINE)
            assert seen == expected(path, prompt, 20)
        eventually(listed(cluster, victim, "stuck"), what=f"{victim} is stuck")
        assert workload.ask(cluster.address, prompts[0], 20).token_ids == expected(path, prompts[0], 20)
    eventually(listed(cluster, victim, "live"), what=f"{victim} is live again")
    for prompt, seen in zip(prompts, streams.seen, strict=True):
        assert seen == expected(path, prompt, 20), "its late answers change nothing"
    eventually(lambda: at_rest(cluster), what="everything freed")

    def serves() -> bool:
        answers = workload.ask_all(cluster.address, [fresh() for _ in range(6)], 2)
        served = [answer.work for answer in answers]
        return any(victim in (*work.decode_workers, work.prefill_worker) for work in served)

    eventually(serves, what=f"{victim} serves again")


def test_streams_go_on_beside_a_store_that_hangs(start: Callable[..., LocalCluster], path: Path) -> None:
    cluster = start(1, 1, **HUNG)
    streams = Streams(cluster)
    before = streams.start(LONG[:300], 300)
    eventually(lambda: len(streams.seen[0]) > 10, what="the stream under way")
    with hung(cluster.pids["store-0"]):
        new = streams.start(LONG[300:500], 20)
        new.result(DEADLINE)
        before.result(DEADLINE)
        eventually(listed(cluster, "store-0", "stuck"), what="the store is stuck")
        assert workload.ask(cluster.address, LONG[500:700], 20).token_ids == expected(path, LONG[500:700], 20)
    assert streams.seen[0] == expected(path, LONG[:300], 300)
    assert streams.seen[1] == expected(path, LONG[300:500], 20)
    eventually(listed(cluster, "store-0", "live"), what="the store is live again")

    def fetched() -> bool:
        return workload.ask(cluster.address, fresh(), 2).work.pages_fetched > 0

    eventually(fetched, what="hand-off through the store")
    eventually(lambda: at_rest(cluster), what="everything freed")
