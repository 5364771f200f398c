"""A decode worker that is live and ten times slower than others: requests leave it, and come back with its speed."""

from collections.abc import Callable
from itertools import pairwise, product

import pytest

from deploy.load.workload import Lengths
from simulator.cluster import SimulatedCluster
from simulator.workloads import Random, Wishes
from tests.simulator.simulated import cluster, serve

pytestmark = pytest.mark.slow

VICTIM = "decode-0001"
BEGIN, SLOW, HEALTHY, END = 2.0, 7.0, 22.0, 40.0  # seconds: first request, and the worker's state from then on
LEFT, BACK = 4.0, 8.0  # seconds until placement has left it, and until it has its share again
RATE = 6.0  # requests per second
LOAD = Random(RATE, Lengths("uniform", 600, 1_500), Lengths("uniform", 10, 50))

Ailment = Callable[[SimulatedCluster, str], None]


def stopped(seconds: float, period: float) -> Ailment:
    return lambda world, name: world.stop_repeatedly(name, seconds, period)


def well(world: SimulatedCluster, name: str) -> None:
    world.slow_down(name, 1.0)
    world.stop_repeatedly(name, 0.0, 1.0)


AILMENTS: dict[str, Ailment] = {
    "900 of 1000 ms": stopped(0.9, 1.0),
    "90 of 100 ms": stopped(0.09, 0.1),
    "45 of 50 ms": stopped(0.045, 0.05),
    "steps": lambda world, name: world.slow_down(name, 10.0),
}


def run(layout: str, ailment: Ailment, *names: str, checked: bool = False) -> SimulatedCluster:
    """Every request must end once; where the cluster is checked, with its tokens."""
    world = cluster(layout, runs=False, checked=checked, router__explain_requests=10_000)
    for name in names:
        world.agenda.at(SLOW, ailment, world, name)
        world.agenda.at(HEALTHY, well, world, name)
    count = int((END - BEGIN) * RATE)
    measures = serve(world, LOAD.arrivals(count, Wishes(max_tokens=100), 1))
    assert measures.ends == {"finished": count}
    return world


def shares(world: SimulatedCluster, *bounds: float) -> list[float]:
    """Which part of the attempts placed between two of these times went to the victim."""
    attempts = [each for record in world.router.state.recent(10_000) for each in record.attempts]
    result: list[float] = []
    for start, end in pairwise(bounds):
        there = [each.decode == VICTIM for each in attempts if start <= (each.timeline.placed or 0.0) < end]
        result.append(sum(there) / len(there))
    return result


@pytest.mark.parametrize(
    ("layout", "ailment"), [*product(["2P+3D"], AILMENTS), ("3D", "900 of 1000 ms"), ("2P+2D", "steps")]
)
def test_requests_leave_a_slow_worker_and_come_back(layout: str, ailment: str) -> None:
    world = run(layout, AILMENTS[ailment], VICTIM, checked=ailment == "900 of 1000 ms")
    before, _, slow, _, after = shares(world, BEGIN, SLOW, SLOW + LEFT, HEALTHY, HEALTHY + BACK, END)
    print(ailment, layout, before, slow, after, world.router.state.stats().counts.moved)
    assert before > 0.2
    assert slow < 0.08
    assert after > 0.2
    assert not world.router.state.stats().lost


@pytest.mark.parametrize("ailment", ["900 of 1000 ms", "steps"])
def test_no_worker_is_slower_than_others_where_all_are(ailment: str) -> None:
    names = [f"decode-{i:04}" for i in range(3)]
    world = run("2P+3D", AILMENTS[ailment], *names)
    assert world.router.state.stats().counts.moved == 0
    (share,) = shares(world, SLOW + LEFT, HEALTHY)
    assert 0.2 < share < 0.5


@pytest.mark.parametrize("ailment", ["45 of 50 ms", "steps"])
def test_a_lone_decode_worker_is_no_outlier(ailment: str) -> None:
    world = run("1P+1D", AILMENTS[ailment], "decode-0000")
    assert world.router.state.stats().counts.moved == 0


def test_nothing_is_moved_in_a_healthy_cluster() -> None:
    world = run("2P+3D", well, VICTIM)
    assert world.router.state.stats().counts.moved == 0
