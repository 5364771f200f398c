"""A lone prompt on several prefill workers, layer behind layer: the same tokens, and a death costs its chunks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.client import Client
from deploy.local import LocalCluster
from tests.processes.test_failures import DEADLINE, expected, start
from tests.support import checkpoints, workload
from tests.support.cluster import Streams, at_rest, process
from tests.support.eventually import eventually

__all__ = ["start"]  # a fixture

_RNG = random.Random(23)
PROMPT = [_RNG.randrange(3, checkpoints.VOCAB) for _ in range(2_000)]
OUTPUT = 12


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
        3, 1, **{"prefill.max_num_batched_tokens": 2 * workload.PAGE, "prefill.step_ms": 5, "model.native": True}
    )
    streams = Streams(cluster)
    future = streams.start(PROMPT, OUTPUT)
    eventually(lambda: (store := process(cluster, "store-0")) and store.pages_known >= 8, what="sealed pages")
    with Client(cluster.address, cluster.operator) as client:
        (request,) = client.requests(timeout=DEADLINE)
        before = client.explain(request.request_id, timeout=DEADLINE).attempts
        attempt = before[-1]  # on a slow machine a worker may have lost patience with the others
        (note,) = (each for each in attempt.notes if " compute chunks of 2 pages in turn" in each)
        places = note.partition(" compute")[0].replace(" and ", ", ").split(", ")
        assert (len(places), places[0]) == (3, attempt.prefill_worker), note
        if victim is not None:
            cluster.kill(places[victim])
        future.result(DEADLINE)
        attempts = client.explain(request.request_id, timeout=DEADLINE).attempts
    if victim == 0:
        assert (attempts[len(before)].predicted.cached_tokens or 0) > 0, "pages that were sealed are not computed again"
    else:
        assert len(attempts) == len(before), "the prefill worker goes on alone"
    assert streams.seen == [expected(path, PROMPT, OUTPUT)]
    eventually(lambda: at_rest(cluster), what="everything freed")
