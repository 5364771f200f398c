"""Two routers on the same workers: each request has one owner, and only its owner's death takes it along. An adversary
chooses the order of all messages, turns and deaths."""

from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.request import RequestPhase
from simulator.worker import SimulatedWorker
from tests.kvstore.test_state_mutations import Mutation
from tests.simulator.adversarial import ROUTERS, Crowd
from tests.simulator.test_cluster_checked_pages import pages_of_a_transfer_are_swapped
from tests.support.thorough import automaton

TTL = 3.0  # seconds that pins last
ONE, TWO = ROUTERS


def busy(seed: int = 0, requests: int = 6) -> Crowd:
    crowd = Crowd(seed=seed)
    crowd.submit_some(requests)
    return crowd


def test_both_are_served_and_know_of_each_others_load() -> None:
    crowd = busy()
    members = {name: router.state._members.with_role("decode") for name, router in crowd.cluster.routers.items()}
    seen: set[str] = set()
    for _ in range(200):
        crowd.cluster.advance(0.02)
        seen |= {name for name, workers in members.items() if any(worker.other_routers_requests for worker in workers)}
    assert seen == set(ROUTERS)
    crowd.settle()
    assert not any(worker.other_routers_requests for workers in members.values() for worker in workers)


@pytest.mark.parametrize("moment", range(0, 60, 10))
def test_the_death_of_one_takes_nothing_from_the_other(moment: int) -> None:
    crowd = Crowd()
    crowd.wild(late=0.0, standstill=0.0)  # a late heartbeat may cost an attempt; a death of another router may not
    crowd.submit_some(6)
    cluster = crowd.cluster
    cluster.advance(0.02 * moment)
    survivor = cluster.routers[ONE]
    running = {
        r.name: r.history.attempts
        for r in survivor.state._manager
        if r.attempt is not None and r.attempt.phase is RequestPhase.RUNNING
    }
    dead = cluster.routers[TWO].incarnation
    crowd.replace_router(TWO)
    cluster.advance(2.5)
    for worker in cluster.workers.values():
        assert not worker.state.heartbeat(0, dead).attempts, "what the dead one owned is held still"
    crowd.submit(TWO, 30, 10)
    crowd.settle()
    assert cluster.measures.resends
    for name, attempts in running.items():
        summary = survivor.state.explain(name).summary
        assert summary.served.attempts == attempts


def test_a_router_that_reaches_half_the_workers_loses_no_request() -> None:
    crowd = busy()
    crowd.cluster.advance(0.4)
    cut = crowd.cluster.workers["decode-0000"]
    crowd.cluster.network.cuts.add((TWO, cut.peer.name))
    crowd.cluster.advance(4.0)
    assert not cut.state.heartbeat(0, crowd.cluster.routers[TWO].incarnation).attempts
    crowd.settle()


def test_both_pin_the_same_prefix_and_neither_ends_the_others() -> None:
    crowd = Crowd("1P+1D")
    for router in ROUTERS:
        crowd.pin(router, 10, 600.0)
    crowd.cluster.advance(4.0)
    (store,) = crowd.cluster.stores.values()
    stats = store.state.stats(crowd.cluster.agenda.now)
    assert (stats.pins, stats.pinned_bytes) == (2, 10 * stats.page_bytes)
    crowd.unpin(TWO)
    crowd.cluster.advance(2.0)
    assert store.state.stats(crowd.cluster.agenda.now).pins == 1
    assert [pin.node for pin in crowd.cluster.routers[ONE].state.pins(crowd.cluster.agenda.now)] == ["node-0000"]
    crowd.settle()


def test_a_router_with_little_to_do_is_not_kept_out_by_one_with_much() -> None:
    """Workers are full at all times, and the one that fills them hears first of whatever room there is."""
    crowd = Crowd()
    routers = crowd.cluster.routers
    for _ in range(200):
        for router, most in ((ONE, 10), (TWO, 2)):
            stats = routers[router].state.stats()
            for _ in range(most - stats.queued - stats.running):
                crowd.submit(router, crowd.dice.randrange(5, 60), crowd.dice.randrange(20, 40))
        crowd.cluster.advance(0.02)
    one, two = (sum(routers[name].state.stats().counts.finished.values()) for name in ROUTERS)
    assert two >= one / 4 > 0
    crowd.settle()


def wild_run(seed: int) -> None:
    """Serve requests while processes die."""
    crowd = Crowd("2P+2D", seed, per_node=2)
    for _ in range(10):
        crowd.submit_some(2)
        crowd.wild(0.2, 0.05, 0.02)
        crowd.fault()
        crowd.events(150)
    crowd.settle()


def partial_pages_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedWorker, "duplicate_page", lambda *_: None)


@pytest.mark.parametrize("mutate", [partial_pages_are_not_copied, pages_of_a_transfer_are_swapped])
def test_the_adversary_finds_a_wrong_page(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    wild_run(0)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="a wrong page was read"):
        deque(map(wild_run, range(20)), maxlen=0)


@pytest.mark.parametrize("seed", [4, 24, 30])
def test_calls_for_a_lost_store_do_not_reach_the_next_one(seed: int) -> None:
    """A store that gets such a call drops its worker. With these seeds a store is replaced during a step."""
    wild_run(seed)


class Shared(RuleBasedStateMachine):
    """Requests come to both, routers, workers and stores die, links are cut. The adversary chooses the order of all
    events, loses messages and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.crowd = Crowd()

    @initialize(
        seed=st.integers(0, 2**16), layout=st.sampled_from(["1P+2D", "2P+2D", "3D"]), per_node=st.integers(2, 4)
    )
    def begin(self, seed: int, layout: str, per_node: int) -> None:
        self.crowd = Crowd(layout, seed, per_node)

    @rule(router=st.sampled_from(ROUTERS), tokens=st.integers(1, 60), output=st.integers(1, 30))
    def comes(self, router: str, tokens: int, output: int) -> None:
        self.crowd.submit(router, tokens, output)

    @rule(router=st.sampled_from(ROUTERS), pages=st.integers(1, 8))
    def is_warmed(self, router: str, pages: int) -> None:
        self.crowd.pin(router, pages, TTL)

    @rule(router=st.sampled_from(ROUTERS))
    def router_is_replaced(self, router: str) -> None:
        self.crowd.replace_router(router)

    @rule(index=st.integers(0, 6), router=st.sampled_from(ROUTERS), cut=st.booleans())
    def link_changes(self, index: int, router: str, cut: bool) -> None:
        cluster = self.crowd.cluster
        names = [*cluster.workers, *(store.peer.name for store in cluster.stores.values())]
        pair = (router, names[index % len(names)])
        (cluster.network.cuts.add if cut else cluster.network.cuts.discard)(pair)

    @rule(index=st.integers(0, 3))
    def worker_is_replaced(self, index: int) -> None:
        names = sorted(self.crowd.cluster.workers)
        self.crowd.replace_worker(names[index % len(names)])

    @rule(index=st.integers(0, 2))
    def store_is_replaced(self, index: int) -> None:
        nodes = sorted(self.crowd.cluster.stores)
        self.crowd.replace_store(nodes[index % len(nodes)])

    @rule(
        count=st.integers(1, 400),
        late=st.sampled_from([0.0, 0.1, 0.5]),
        standstill=st.sampled_from([0.0, 0.02, 0.2]),
        loss=st.sampled_from([0.0, 0.05, 0.3]),
    )
    def goes_on(self, count: int, late: float, standstill: float, loss: float) -> None:
        self.crowd.wild(late, standstill, loss)
        self.crowd.events(count)

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.crowd.cluster.advance(seconds)

    @invariant()
    def all_states_are_valid(self) -> None:
        self.crowd.check()

    def teardown(self) -> None:
        self.crowd.settle()


Shared.TestCase.settings = automaton(count=30, steps=20)
TestShared: Any = Shared.TestCase
