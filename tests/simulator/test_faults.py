"""Whatever dies in a simulated cluster, every request ends once, and well."""

import pytest

from deploy.load.workload import Lengths
from simulator.cluster import SimulatedCluster
from simulator.faults import Faults
from simulator.timing import DiskTimes
from simulator.workloads import Random, Wishes
from tests.simulator.simulated import PAGE, cluster, request, serve, timing

pytestmark = pytest.mark.slow

LOAD = Random(4.0, Lengths("uniform", 200, 3_000), Lengths("uniform", 5, 120), groups=5, prefix=1_024)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["3P+3D", "4D"])
def test_no_request_is_lost_when_processes_die(layout: str, seed: int) -> None:
    world = cluster(layout, per_node=2, seed=seed)
    Faults(worker_deaths=20, store_deaths=8, calm=2.5).inject(world, seed)
    measures = serve(world, LOAD.arrivals(100, Wishes(max_tokens=200), seed))
    assert measures.ends == {"finished": 100}
    assert world.ends > 3
    assert measures.table()["attempts"].max() > 1


def test_lost_messages_cost_time_only() -> None:
    world = cluster("2P+2D", per_node=2)
    Faults(loss=0.02).inject(world, 1)
    measures = serve(world, LOAD.arrivals(60, Wishes(max_tokens=200), 1))
    assert measures.ends == {"finished": 60}
    assert world.network.lost > 10


def test_what_a_worker_had_said_before_it_died_is_kept() -> None:
    world = cluster("2D")
    world.agenda.at(2.0 + 1.0, world.end_worker, "decode-0000")
    measures = serve(world, [request(0.0, 100, 150)])
    row = {name: values[0] for name, values in measures.table().items()}
    assert (row["attempts"], row["output"]) == (2, 150)
    assert row["tbt"] < 0.2, "the store of its node told of its death at once"


def test_a_store_finds_its_disk_again() -> None:
    disk = DiskTimes(read=1e9, write=1e9, latency=0.001, max_bytes="10GB")
    world = cluster("1P+1D", per_node=2, model=timing(disk), disk__admit_after=1)
    world.agenda.at(12.0, world.end_store, "node-0000")
    world.agenda.at(12.5, world.end_worker, "decode-0000")
    world.agenda.at(12.6, world.end_worker, "prefill-0000")
    world.agenda.at(13.0, world.start_store, "node-0000")
    world.agenda.at(13.5, world.start_worker, "decode-0000")
    world.agenda.at(13.5, world.start_worker, "prefill-0000")
    measures = serve(world, [request(at, 4 * PAGE + 1, 3, (1, 2, 3, 4, 5)) for at in (0.0, 15.0)])
    assert list(measures.table()["cached"]) == [0, 4 * PAGE]


def test_pages_come_from_other_nodes() -> None:
    world = cluster("1P+1D")
    measures = serve(world, [request(0.0, 3 * PAGE + 1, 3)])
    assert measures.ends == {"finished": 1}
    assert world.network.bytes == 3 * PAGE * 1_000


def two_routers(layout: str, seed: int) -> SimulatedCluster:
    return cluster(layout, per_node=2, seed=seed, routers=2)


def nobody_is_left(world: SimulatedCluster) -> None:
    """When all is quiet again, no worker has anything of anybody's, and each says so."""
    world.network.cuts.clear()
    quiet = world.agenda.now + 30.0  # seconds: longer than silence, and than the start of a process
    world.agenda.run(lambda: world.agenda.now > quiet)
    for worker in world.workers.values():
        assert not any(worker.state.heartbeat(0, router.incarnation).attempts for router in world.routers.values())
        assert not worker.state.heartbeat(0).load.running
        assert not worker.state.heartbeat(0).load.waiting
        assert not worker.state.leases
    for router in world.routers.values():
        router.state.validate()
        assert router.state.stats().running == router.state.stats().queued == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", ["3P+3D", "4D"])
def test_clients_of_a_router_that_dies_are_served_by_another(layout: str, seed: int) -> None:
    world = two_routers(layout, seed)
    Faults(worker_deaths=8, router_deaths=12, calm=2.5).inject(world, seed)
    measures = serve(world, LOAD.arrivals(100, Wishes(max_tokens=200), seed))
    assert measures.ends == {"finished": 100}
    assert measures.resends > 3
    nobody_is_left(world)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", ["3P+3D", "4D"])
def test_a_split_between_routers_loses_nothing(layout: str, seed: int) -> None:
    world = two_routers(layout, seed)
    Faults(splits=20, split_seconds=5, worker_deaths=4, store_deaths=4, calm=2.5).inject(world, seed)
    measures = serve(world, LOAD.arrivals(100, Wishes(max_tokens=200), seed))
    assert measures.ends == {"finished": 100}
    assert world.network.lost > 100
    nobody_is_left(world)


def test_two_routers_share_the_workers() -> None:
    world = two_routers("3P+3D", 1)
    measures = serve(world, LOAD.arrivals(80, Wishes(max_tokens=200), 1))
    assert measures.ends == {"finished": 80}
    assert [sum(router.state.stats().counts.finished.values()) for router in world.routers.values()] == [40, 40]
    nobody_is_left(world)
