"""The rest of a long prompt is computed by another prefill worker, behind the pages that the first one has sealed."""

from collections.abc import Callable, Sequence

import pytest

from deploy.load.workload import Lengths
from router.requests.explain import RequestRecord
from simulator.cluster import SimulatedCluster
from simulator.workloads import Arrival, Random, Wishes
from tests.simulator.simulated import cluster, request, serve

pytestmark = pytest.mark.slow

LONG = 40_000  # tokens: 4 s of a worker
FROM, TO = "prefill-0000", "prefill-0001"


def long(first: int, at: float = 0.0, tokens: int = LONG) -> Arrival:
    return request(at, tokens, 5, range(first, first + 80))


def run(
    load: Sequence[Arrival],
    *,
    move: bool,
    event: Callable[[SimulatedCluster], None] | None = None,
    at: float = 3.0,
    checked: bool = True,
) -> tuple[SimulatedCluster, list[float]]:
    """Serve these. If `checked`, the cluster notices a wrong page or token. Return the times to the first tokens."""
    world = cluster(
        "2P+2D", runs=not checked, checked=checked,
        router__move_prompts=move, router__disaggregation="always", router__explain_requests=100,
    )  # fmt: skip
    ttft: dict[str, float] = {}
    world.measures.watch = lambda name, tenant, seconds: ttft.__setitem__(name, seconds)
    if event is not None:
        world.agenda.at(at, event, world)
    measures = serve(world, load)
    assert measures.ends == {"finished": len(load)}
    return world, [ttft[name] for name in sorted(ttft)]


def _moved(world: SimulatedCluster) -> list[RequestRecord]:
    records = world.router.state.recent(100)
    return [one for one in records if any("the rest of its prompt" in each.end_reason for each in one.attempts)]


def test_an_idle_worker_computes_the_rest() -> None:
    load = [long(100, tokens=10_000), long(200, 0.01), long(300, 0.02), long(400, 0.03)]
    _, stayed = run(load, move=False)
    world, moved = run(load, move=True)
    assert world.router.state.stats().counts.prompts_moved == 1
    assert max(moved) < 0.9 * max(stayed), (stayed, moved)
    assert all(there < here + 0.3 for here, there in zip(stayed, moved, strict=True)), (stayed, moved)
    ((first, second),) = [each.attempts for each in _moved(world)]
    assert first.prefill != second.prefill
    assert second.cached > 5_000, "the pages that were sealed are not computed again"


def test_a_prompt_leaves_a_worker_that_became_slow() -> None:
    load = [long(100), long(200, 0.01, 5_000)]
    stayed, moved = (run(load, move=move, event=lambda world: world.slow_down(FROM, 5.0)) for move in (False, True))
    assert moved[0].router.state.stats().counts.prompts_moved == 1
    assert max(moved[1]) < 0.7 * max(stayed[1]), (stayed[1], moved[1])


def test_a_worker_that_comes_takes_its_part() -> None:
    def ends(world: SimulatedCluster) -> None:
        world.end_worker(TO)
        world.agenda.after(1.0, world.start_worker, TO)

    load = [long(100, 1.0), long(200, 1.01)]
    stayed, moved = (run(load, move=move, event=ends, at=2.5) for move in (False, True))
    assert moved[0].router.state.stats().counts.prompts_moved == 1
    assert max(moved[1]) < 0.8 * max(stayed[1]), (stayed[1], moved[1])


@pytest.mark.parametrize("place", [0, 1])
def test_a_death_costs_the_chunks_of_the_one_that_died(place: int) -> None:
    """The first worker dies after the move, or the second one does."""
    load = [long(100, tokens=10_000), long(200, 0.01), long(300, 0.02), long(400, 0.03)]

    def dies(world: SimulatedCluster) -> None:
        if moved := _moved(world):
            world.agenda.after(0.5, world.end_worker, moved[0].attempts[place].prefill)
        else:
            world.agenda.after(0.1, dies, world)

    world, _ = run(load, move=True, event=dies)
    (record,) = _moved(world)
    begun = [each.cached for each in record.attempts]
    assert len(begun) == 2 + place, "no attempt of a live worker is lost"
    assert begun == sorted(set(begun)), "each attempt begins behind the one before"


def test_moves_make_the_mean_of_random_loads_no_worse() -> None:
    load = Random(0.6, Lengths("uniform", 1_000, LONG), Lengths("uniform", 5, 20))
    loads = [list(load.arrivals(50, Wishes(), seed)) for seed in (1, 2, 3)]
    stayed, moved = (sum(sum(run(each, move=move, checked=False)[1]) for each in loads) for move in (False, True))
    assert moved <= stayed


@pytest.mark.parametrize("layout", ["1P+2D", "3D"])
def test_nothing_is_moved_where_there_is_no_other(layout: str) -> None:
    world = cluster(layout)
    serve(world, Random(0.3, Lengths("uniform", 1_000, LONG), Lengths("uniform", 5, 20)).arrivals(30, Wishes(), 1))
    assert world.router.state.stats().counts.prompts_moved == 0
