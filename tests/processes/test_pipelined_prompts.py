"""A lone prompt on two prefill workers at a time, layer behind layer: the same tokens, and a death costs its chunks."""

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
    """A model whose prompts take long enough that help is worth it."""
    wide = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **wide)


@pytest.mark.technique("Long prompts over several prefill workers")
@pytest.mark.parametrize("victim", ["", "prefill-0", "prefill-1"])
def test_two_workers_compute_a_prompt(start: Callable[..., LocalCluster], path: Path, victim: str) -> None:
    cluster = start(
        2, 1, **{"prefill.max_num_batched_tokens": 2 * workload.PAGE, "prefill.step_ms": 5, "model.native": True}
    )
    streams = Streams(cluster)
    future = streams.start(PROMPT, OUTPUT)
    eventually(lambda: (store := process(cluster, "store-0")) and store.pages_known >= 8, what="sealed pages")
    if victim:
        cluster.kill(victim)
    future.result(DEADLINE)
    with Client(cluster.address, cluster.operator) as client:
        (request,) = client.requests(timeout=DEADLINE)
        attempts = client.explain(request.request_id, timeout=DEADLINE).attempts
    note = f"computes every second chunk of 2 pages beside {attempts[0].prefill_worker}"
    assert any(note in each for each in attempts[0].notes), attempts[0].notes
    if victim == attempts[0].prefill_worker:
        assert (attempts[1].predicted.cached_tokens or 0) > 0, "the pages that were sealed are not computed again"
    else:
        assert len(attempts) == 1, "the prefill worker goes on alone"
    assert streams.seen == [expected(path, PROMPT, OUTPUT)]
    eventually(lambda: at_rest(cluster), what="everything freed")
