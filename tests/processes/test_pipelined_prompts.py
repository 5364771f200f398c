"""A lone prompt on several prefill workers, layer behind layer: the same tokens, and a death costs its chunks."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from baton.client import Client, Generated
from baton.operator_api import ExplainedAttempt
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, expected, start
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, process
from tests.support.eventually import eventually

__all__ = ["start"]  # a fixture

_RNG = random.Random(23)
OUTPUT, TRIES = 12, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts take long enough that two helpers are worth it."""
    wide = {"hidden_size": 512, "intermediate_size": 1_536, "num_hidden_layers": 8}
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **wide)


@pytest.mark.technique("Long prompts over several prefill workers")
@pytest.mark.parametrize("victim", [None, 0, 2], ids=["", "the first", "a helper"])
def test_several_workers_compute_a_prompt(start: Callable[..., LocalCluster], path: Path, victim: int | None) -> None:
    """`victim`: the place of the worker that is killed. Another helper waits for the one at place 2."""
    cluster = start(
        1, 1, **{"prefill.max_num_batched_tokens": 2 * workload.PAGE, "prefill.step_ms": 5, "model.native": True}
    )
    for name in ("prefill-1", "prefill-2"):  # each measures its speed without the others
        cluster.start(name)
        cluster.wait_live([name])
    streams, prompts = Streams(cluster), list[list[int]]()
    with Client(cluster.address, cluster.operator) as client:

        def begin() -> tuple[Future[Generated], str, Sequence[ExplainedAttempt], list[str]]:
            prompts.append([_RNG.randrange(3, checkpoints.VOCAB) for _ in range(2_000)])
            enough = pages_known(cluster) + 8
            future = streams.start(prompts[-1], OUTPUT)
            eventually(lambda: pages_known(cluster) >= enough, what="sealed pages")
            name = client.requests(timeout=DEADLINE)[0].request_id
            attempts = client.explain(name, timeout=DEADLINE).attempts
            return future, name, attempts, ring_of(attempts[-1])

        future, name, before, places = begin()
        while len(places) < (3 if len(prompts) < TRIES else 2) and len(prompts) < 2 * TRIES:
            future.result(DEADLINE)
            future, name, before, places = begin()
        assert places[:1] == [before[-1].prefill_worker], before
        if victim is not None:
            cluster.kill(places[min(victim, len(places) - 1)])
        future.result(DEADLINE)
        attempts = client.explain(name, timeout=DEADLINE).attempts
    if victim == 0:
        assert (attempts[len(before)].predicted.cached_tokens or 0) > 0, "pages that were sealed are not computed again"
    else:
        ends = [each.ended_because for each in attempts[len(before) - 1 : -1]]
        assert all("the rest of its prompt" in each for each in ends), "the prefill worker goes on alone, or hands over"
    assert streams.seen == [expected(path, prompt, OUTPUT) for prompt in prompts]
    eventually(lambda: at_rest(cluster), what="everything freed")


def pages_known(cluster: LocalCluster) -> int:
    return 0 if (store := process(cluster, "store-0")) is None else store.pages_known


def ring_of(attempt: ExplainedAttempt) -> list[str]:
    """The workers that compute its prompt, in their places. On a slow machine two or none may be what promises most."""
    notes = [each for each in attempt.notes if " compute chunks of 2 pages in turn" in each]
    return notes[0].partition(" compute")[0].replace(" and ", ", ").split(", ") if notes else []
