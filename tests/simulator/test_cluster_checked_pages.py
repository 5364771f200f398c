"""Whole clusters in virtual time whose pages have contents: no step reads a wrong page, whatever dies."""

import pytest

from baton.errors import ConfigError
from baton.messages import LOWEST_CLASS
from deploy.load.workload import Lengths
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults
from simulator.timing import DiskTimes
from simulator.transport import Parcel, SimulatedTransport
from simulator.workloads import Random, Wishes
from tests.kvstore.test_state_mutations import Mutation, a_page_is_sealed_when_it_is_reserved
from tests.simulator.simulated import PAGE, cluster, serve, timing

pytestmark = pytest.mark.slow

LOAD = Random(6.0, Lengths("uniform", 200, 2_500), Lengths("uniform", 5, 20), groups=4, prefix=1_024)


def crowded(layout: str, seed: int, routers: int = 1, groups: WindowGroups = NO_GROUPS) -> SimulatedCluster:
    """A cluster whose arenas are too small for its load."""
    return cluster(
        layout, per_node=2, seed=seed, routers=routers, checked=True, groups=groups, store__host_cache_bytes="12MB"
    )


def run(world: SimulatedCluster, seed: int) -> None:
    Faults(worker_deaths=40, store_deaths=20, loss=0.01, calm=2.5).inject(world, seed)
    measures = serve(world, LOAD.arrivals(40, Wishes(max_tokens=100), seed))
    assert measures.ends == {"finished": 40}


@pytest.mark.parametrize(("layout", "routers"), [("3P+3D", 1), ("2P+2D", 2), ("4D", 1)])
def test_no_step_reads_a_wrong_page(layout: str, routers: int) -> None:
    world = crowded(layout, 1, routers)
    run(world, 1)
    assert world.ends > 3
    if "P" in layout:
        assert sum(store.state.stats(world.agenda.now).evictions for store in world.stores.values())


@pytest.mark.parametrize("groups", [WindowGroups(2, 700, PAGE), WindowGroups(2, 2, PAGE, states=True)])
@pytest.mark.parametrize("layout", ["3P+3D", "4D"])
def test_no_step_reads_a_wrong_page_of_a_group(layout: str, groups: WindowGroups) -> None:
    world = crowded(layout, 1, groups=groups)
    run(world, 1)
    assert world.ends > 3


@pytest.mark.technique("A quantum of service for runaways")
@pytest.mark.parametrize("layout", ["2P+2D", "2D"])
def test_requests_that_yield_go_on_with_the_same_tokens(layout: str) -> None:
    """Every token of the checked cluster is compared with what the request would have got alone."""
    settings: dict[str, object] = {"router__service_quantum": {0: 8, LOWEST_CLASS: 4}, "decode__kv_cache_bytes": "12MB"}
    world = cluster(layout, seed=1, checked=True, **settings)
    wishes = Wishes(max_tokens=100, priorities=((0, 1.0), (LOWEST_CLASS, 1.0)))
    load = Random(30.0, Lengths("uniform", 200, 2_500), Lengths("uniform", 20, 60), groups=4, prefix=1_024)
    measures = serve(world, load.arrivals(40, wishes, 1))
    assert measures.ends == {"finished": 40}
    (router,) = world.routers.values()
    assert router.state.stats().counts.yielded > 10


def pages_of_a_transfer_are_swapped(patch: pytest.MonkeyPatch) -> None:
    arrive = SimulatedTransport.arrive

    def swapped(self: SimulatedTransport, parcel: Parcel) -> None:
        parcel.contents.reverse()
        arrive(self, parcel)

    patch.setattr(SimulatedTransport, "arrive", swapped)


@pytest.mark.parametrize("mutate", [pages_of_a_transfer_are_swapped, a_page_is_sealed_when_it_is_reserved])
def test_a_wrong_page_is_noticed(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="a wrong page was read"):
        run(crowded("3P+3D", 1), 1)


def test_a_disk_has_no_contents() -> None:
    with pytest.raises(ConfigError, match="no disk"):
        cluster("2D", model=timing(DiskTimes(read=1e9, write=1e9, latency=0.001)), checked=True)
