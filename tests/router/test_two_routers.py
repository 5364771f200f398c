"""Two routers on the same workers: each request has one owner, and only its owner's death takes it along."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.events import Finished
from router.request import RequestPhase
from tests.rig import VOCAB
from tests.router.shared_model import World
from tests.support.thorough import automaton

TTL = 3.0  # seconds that pins last


def prompt_of(dice: random.Random, tokens: int) -> list[int]:
    """Prompts begin alike, so that requests of both routers share pages."""
    start = [7] * min(tokens, 4 * dice.randrange(0, 6))
    return start + [dice.randrange(1, VOCAB) for _ in range(tokens - len(start))]


def busy_world(seed: int = 0, requests: int = 6) -> World:
    """Two decode workers and a prefill worker, and as many requests for each router."""
    world = World(seed)
    for role in ("decode", "decode", "prefill"):
        world.start_worker(role)
    world.run(0.2)
    dice = random.Random(seed)
    for _ in range(requests):
        for name in world.routers:
            world.submit(name, prompt_of(dice, dice.randrange(5, 60)), dice.randrange(20, 40))
    return world


def all_finished(world: World, name: str) -> bool:
    router = world.routers[name]
    outcomes = [end.outcome for end in router.ended.values()]
    return len(outcomes) == len(router.submitted) and all(isinstance(outcome, Finished) for outcome in outcomes)


def test_both_are_served_and_know_of_each_others_load() -> None:
    world = busy_world()
    members = {name: router.state._members.with_role("decode") for name, router in world.routers.items()}
    seen: set[str] = set()
    for _ in range(200):
        world.round()
        seen |= {name for name, workers in members.items() if any(worker.other_routers_requests for worker in workers)}
    assert seen == {"one", "two"}
    world.settle()
    assert all_finished(world, "one")
    assert all_finished(world, "two")
    assert not any(worker.other_routers_requests for workers in members.values() for worker in workers)


@pytest.mark.parametrize("moment", range(0, 60, 10))
def test_the_death_of_one_takes_nothing_from_the_other(moment: int) -> None:
    world = busy_world()
    for _ in range(moment):
        world.round()
    requests = world.routers["one"].state._manager
    running = {
        r.name: r.history.attempts
        for r in requests
        if r.attempt is not None and r.attempt.phase is RequestPhase.RUNNING
    }
    world.start_router("two")  # in place of the one that dies
    world.run(2.5)
    for process in world.workers:
        owners = {each.owner for each in getattr(process.body.state, "_sequences", {}).values()}
        assert owners <= {world.routers["one"].incarnation}, "what the dead one owned is held still"
    world.submit("two", [3] * 30, 10)
    world.settle()
    assert all_finished(world, "one")
    assert all_finished(world, "two")
    ended = world.routers["one"].ended
    assert all(ended[name].summary.served.attempts == attempts for name, attempts in running.items())


def test_a_router_that_reaches_half_the_workers_loses_no_request() -> None:
    world = busy_world()
    world.run(0.4)
    lost, *_ = world.workers
    world.cut(lost, "two")
    world.run(4.0)
    assert lost.lost == {world.routers["two"].incarnation}
    world.settle()
    assert all_finished(world, "one")
    assert all_finished(world, "two")


def test_both_pin_the_same_prefix_and_neither_ends_the_others() -> None:
    world = World()
    world.start_worker("decode")
    world.start_worker("prefill")
    world.run(0.5)
    for name in world.routers:
        world.pin_prefix(name, "p", [7] * 40, 600.0)
    world.run(4.0)
    (store,) = world.rig.stores.values()
    assert (world.kept("one"), world.kept("two")) == (1, 1)
    stats = store.state.stats(world.rig.now)
    assert (stats.pins, stats.pinned_bytes) == (2, 10 * stats.page_bytes)
    world.unpin_prefix("two")
    world.run(1.0)
    assert store.state.stats(world.rig.now).pins == 1
    assert [pin.node for pin in world.routers["one"].state.pins("", world.rig.now)] == ["a"]
    world.settle()


def test_a_router_with_little_to_do_is_not_kept_out_by_one_with_much() -> None:
    """Workers are full at all times, and the one that fills them hears first of whatever room there is."""
    world = busy_world(requests=0)
    dice = random.Random(2)
    one, two = world.routers["one"], world.routers["two"]
    for _ in range(200):
        for router, most in ((one, 10), (two, 2)):
            while len(router.submitted) - len(router.ended) < most:
                world.submit(router.name, prompt_of(dice, dice.randrange(5, 60)), dice.randrange(20, 40))
        world.round()
    assert len(two.ended) >= len(one.ended) / 4
    world.settle()


class Shared(RuleBasedStateMachine):
    """Requests come to both, routers and workers die, links are cut, lose, repeat and delay."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.dice = random.Random(0)

    @initialize(seed=st.integers(0, 2**16), nodes=st.sampled_from(["a", "ab"]))
    def begin(self, seed: int, nodes: str) -> None:
        self.world = World(seed, nodes)
        self.dice.seed(seed)
        for index, role in enumerate(("decode", "decode", "prefill")):
            self.world.start_worker(role, nodes[index % len(nodes)])
        self.world.run(0.1)

    @rule(name=st.sampled_from(["one", "two"]), tokens=st.integers(1, 60), count=st.integers(1, 30))
    def comes(self, name: str, tokens: int, count: int) -> None:
        self.world.submit(name, prompt_of(self.dice, tokens), count)

    @rule(name=st.sampled_from(["one", "two"]), pages=st.integers(1, 8))
    def is_warmed(self, name: str, pages: int) -> None:
        self.world.pin_prefix(name, "p", [7] * (4 * pages), TTL)

    @rule(name=st.sampled_from(["one", "two"]))
    def dies(self, name: str) -> None:
        self.world.start_router(name)

    @rule(index=st.integers(0, 3), name=st.sampled_from(["one", "two"]), cut=st.booleans())
    def link_changes(self, index: int, name: str, cut: bool) -> None:
        processes = list(self.world.processes.values())
        self.world.cut(processes[index % len(processes)], name, cut)

    @rule(index=st.integers(0, 2))
    def worker_is_replaced(self, index: int) -> None:
        process = self.world.workers[index]
        self.world.kill_worker(process)
        self.world.start_worker(process.peer.role, process.peer.node)

    @rule(node=st.sampled_from("ab"))
    def store_is_replaced(self, node: str) -> None:
        if node in self.world.rig.stores:
            self.world.restart_store(node)

    @rule(rounds=st.integers(1, 40), loss=st.sampled_from([0.0, 0.05, 0.3]), lag=st.sampled_from([0.0, 0.3, 0.7]))
    def goes_on(self, rounds: int, loss: float, lag: float) -> None:
        for _ in range(rounds):
            self.world.round(loss=loss, lag=lag)

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.world.round(seconds)

    @invariant()
    def nobody_hears_a_wrong_token(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


Shared.TestCase.settings = automaton(count=30, steps=20)
TestShared: Any = Shared.TestCase
