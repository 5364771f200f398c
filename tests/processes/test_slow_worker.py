"""A decode worker that is stopped for most of each second: live, and ten times slower than the others."""

import random
from collections.abc import Callable
from pathlib import Path

from baton.client import Client
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, expected, start
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, load
from tests.support.eventually import eventually
from tests.support.hung_thread import stuttering

__all__ = ["start"]  # a fixture

_RNG = random.Random(13)
PATIENT = {"cluster.heartbeat_ms": 250, "cluster.heartbeat_timeout_ms": 60_000}  # it never counts as gone
OUTPUT = 200  # tokens: far too many for a second of a worker that is stopped


def fresh() -> list[int]:
    """A prompt that no cache has."""
    return [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(60)]


def test_a_worker_that_stands_still_most_of_the_time_is_left(start: Callable[..., LocalCluster], path: Path) -> None:
    cluster = start(1, 3, **PATIENT)
    workload.ask_all(cluster.address, [fresh() for _ in range(6)], 40)  # the router has seen all at work
    streams, prompts = Streams(cluster), [fresh() for _ in range(6)]
    futures = [streams.start(prompt, OUTPUT) for prompt in prompts]
    eventually(lambda: all(len(seen) > 3 for seen in streams.seen), what="all streams under way")
    victim = max((f"decode-{i}" for i in range(3)), key=lambda name: load(cluster, name).running)

    def left() -> bool:
        """Whether the next requests go elsewhere: some still went there when the router had seen too little."""
        workers = [workload.ask(cluster.address, fresh(), 4).work.decode_workers for _ in range(6)]
        return all(victim not in each for each in workers)

    with stuttering(cluster.pids[victim], 0.9, 1.0):
        finished = [future.result(DEADLINE) for future in futures]
        eventually(left, what="placement leaves the worker")
        answers = [workload.ask(cluster.address, fresh(), 4) for _ in range(30)]
    assert sum(victim in answer.work.decode_workers for answer in answers) <= 3
    for prompt, seen in zip(prompts, streams.seen, strict=True):
        assert seen == expected(path, prompt, OUTPUT), "those that were moved have the same tokens"
    moved = [one for one in finished if victim in one.work.decode_workers[:-1]]
    assert moved, [one.work.decode_workers for one in finished]
    with Client(cluster.address, cluster.operator) as client:
        explained = client.explain(moved[0].request_id, timeout=DEADLINE)
    assert any(f"{victim} is slow" in attempt.ended_because for attempt in explained.attempts)

    def back() -> bool:
        answers = workload.ask_all(cluster.address, [fresh() for _ in range(6)], 40)
        return any(victim in answer.work.decode_workers for answer in answers)

    eventually(back, what="the worker has its share again")
    eventually(lambda: at_rest(cluster), what="everything freed")
