"""Prefill workers of a node that compute one prompt together, in virtual time."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from deploy.load.workload import Lengths
from engine.step.ring import RingChunk
from router.requests.explain import RequestRecord
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults
from simulator.workloads import Random, Wishes
from tests.simulator.simulated import cluster, request, serve, timing

pytestmark = pytest.mark.slow

LAYERS = timing(layers=32)
LONG = 40_000  # tokens: 4 s of a worker


def lone(
    workers: int, event: Callable[[SimulatedCluster, RequestRecord], None] | None = None
) -> tuple[float, RequestRecord]:
    """Serve one long prompt on a node with so many prefill workers. Something may happen half a second after it came.
    Return the time to its first token."""
    world = cluster(f"{workers}P+1D", per_node=workers + 1, model=LAYERS, checked=True, router__disaggregation="always")

    def record() -> RequestRecord:
        return world.router.state.recent(1)[0]

    if event is not None:
        world.agenda.at(2.5, lambda: event(world, record()))
    measures = serve(world, [request(0.0, LONG, 5, range(80))])
    assert measures.ends == {"finished": 1}
    return measures.report()["ttft"]["mean"], record()


@cache
def ttft(workers: int) -> float:
    return lone(workers)[0]


@pytest.mark.parametrize("workers", [2, 4])
def test_more_workers_bring_the_first_token_sooner_as_predicted(workers: int) -> None:
    took, record = lone(workers)
    (attempt,) = record.attempts
    assert len(attempt.placement.helpers) == workers - 1
    assert took == pytest.approx(ttft(1) / workers, rel=0.25)
    assert took == pytest.approx(attempt.placement.predicted.total, rel=0.12)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_death_costs_chunks_and_no_token(place: int) -> None:
    def dies(world: SimulatedCluster, record: RequestRecord) -> None:
        plan = record.attempts[0].placement
        victim = (plan.prefill, *plan.helpers)[place]
        world.end_worker(next(name for name, worker in world.workers.items() if worker.peer.incarnation == victim))

    took, record = lone(3, dies)
    assert len(record.attempts) == 1 + (place == 0)
    assert any("is gone" in note for note in record.attempts[0].notes) == (place > 0)
    assert ttft(3) < took < ttft(1), "no worker waits for the dead"


def test_without_rings_results_are_the_same_to_the_last_digit() -> None:
    load = Random(3.0, Lengths("uniform", 200, 20_000), Lengths("uniform", 5, 20), groups=4, prefix=1_024)

    def report(**more: Any) -> dict[str, Any]:
        world = cluster("4P+2D", per_node=6, **more)
        return serve(world, load.arrivals(30, Wishes(max_tokens=100), 1)).report()

    plain = report()
    assert report(model=LAYERS, router__pipeline_prompts=False) == plain
    assert report(model=LAYERS) != plain


def run_crowded(seed: int) -> None:
    load = Random(2.0, Lengths("uniform", 2_000, 20_000), Lengths("uniform", 5, 20), groups=4, prefix=1_024)
    world = cluster("6P+2D", per_node=4, seed=seed, model=LAYERS, checked=True, store__host_cache_bytes="60MB")
    Faults(worker_deaths=20, store_deaths=5, loss=0.01, calm=2.5).inject(world, seed)
    assert serve(world, load.arrivals(30, Wishes(max_tokens=100), seed)).ends == {"finished": 30}


@pytest.mark.parametrize("seed", [1, 2])
def test_no_step_reads_a_wrong_page(seed: int) -> None:
    run_crowded(seed)


def test_a_page_that_was_not_taken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingChunk, "takes", ())
    with pytest.raises(AssertionError, match="a wrong page was read"):
        run_crowded(1)
