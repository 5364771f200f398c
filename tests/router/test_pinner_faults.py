"""Whatever links and processes do, every wish is answered once, what counts as pinned is pinned, and nothing leaks."""

import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import initialize, invariant, rule

from baton.config import StoreConfig
from baton.errors import PinNotFound
from baton.operator_api import NewPin
from router.events import Cancelled, ClientGone, Failed
from router.prefix_pinning.pin import PinPhase
from tests.router.cluster import Cluster
from tests.router.model import CONFIG, PAGE_BYTES
from tests.router.test_state_faults import ClusterFaults, break_process
from tests.support.thorough import automaton

pytestmark = pytest.mark.slow

FAULTS = ("dies", "restarts", "is replaced", "stops", "is full", "is stuck", "hangs", "fails")
SMALL = msgspec.structs.replace(CONFIG, store=StoreConfig(pin_bytes=msgspec.convert(12 * PAGE_BYTES, int)))  # type: ignore[arg-type]


class Faults(ClusterFaults):
    """The same while wishes and requests come, stores evict, and processes die, stop, wake up, refuse and fail."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(SMALL)

    @initialize(prefillers=st.integers(1, 3), nodes=st.integers(1, 2), seed=st.integers(0, 2**16))
    def begin(self, prefillers: int, nodes: int, seed: int) -> None:
        self.cluster.random.seed(seed)
        self.cluster.start("decode", "decode-0", "a", slots=2)
        for node in "ab"[:nodes]:
            self.cluster.start("store", f"store-{node}", node)
        for i in range(prefillers):
            self.cluster.start("prefill", f"prefill-{i}", "ab"[i % nodes], slots=2)
        self.cluster.run(0.2)

    # --- clients ---

    @rule(
        pin=st.sampled_from("pqrs"),
        pages=st.integers(1, 7),
        seed=st.integers(0, 3),
        ttl=st.sampled_from([0.5, 3.0, 60.0, 600.0]),
        deadline=st.none() | st.floats(0.1, 5.0),
    )
    def wish(self, pin: str, pages: int, seed: int, ttl: float, deadline: float | None) -> None:
        at = None if deadline is None else self.cluster.now + deadline
        self.cluster.pin_prefix(pin, pages, ttl, seed * 25, deadline=at)

    @rule(pin=st.sampled_from("pqrs"))
    def unwish(self, pin: str) -> None:
        known = any(prefix.pin == pin for prefix in self.cluster.prefixes())
        if known:
            self.cluster.unpin_prefix(pin)
        else:
            with pytest.raises(PinNotFound):
                self.cluster.unpin_prefix(pin)

    @rule(index=st.integers(0, 50))
    def leaves(self, index: int) -> None:
        if names := list(self.cluster.wishes):
            self.cluster.tell(ClientGone(names[index % len(names)]))

    @rule(prompt=st.integers(1, 60), max_tokens=st.integers(1, 30), seed=st.integers(0, 99))
    def request(self, prompt: int, max_tokens: int, seed: int) -> None:
        name = f"r{len(self.cluster.requests)}"
        self.cluster.submit(name, prompt, max_tokens, seed=seed)

    # --- processes ---

    @rule(index=st.integers(0, 10), fault=st.sampled_from(FAULTS))
    def goes_wrong(self, index: int, fault: str) -> None:
        if process := self._pick(index):
            break_process(self.cluster, process, fault)

    @rule(node=st.sampled_from("ab"), role=st.sampled_from(["store", "prefill"]))
    def joins(self, node: str, role: Any) -> None:
        if len(self.cluster.processes) < 8:
            name = f"store-{node}" if role == "store" else f"prefill-{self.cluster.births}"
            self.cluster.start(role, name, node, slots=2)

    @rule()
    def evicts(self) -> None:
        self.cluster.evict()

    # --- links and time ---

    @rule(seconds=st.floats(0.05, 3.0), paused=st.booleans())
    def time_passes(self, seconds: float, paused: bool) -> None:
        self.cluster.advance(seconds, paused=paused)

    @rule()
    def everything_settles(self) -> None:
        self.cluster.finish()

    @invariant()
    def what_counts_as_pinned_is_pinned(self) -> None:
        for prefix in self.cluster.prefixes():
            if prefix.phase is PinPhase.PINNED and self.cluster.now < prefix.expires:
                self.cluster.pin_of(prefix)

    def teardown(self) -> None:
        self.cluster.finish()
        self.cluster.run(1)
        for pin in {prefix.pin for prefix in self.cluster.prefixes()}:
            self.cluster.unpin_prefix(pin)
        self.cluster.finish()
        assert not self.cluster.prefixes()


Faults.TestCase.settings = automaton(count=60, steps=30)
TestFaults = Faults.TestCase


def cluster_of(nodes: str = "a", prefillers: int = 1, **settings: Any) -> Cluster:
    cluster = Cluster(msgspec.structs.replace(CONFIG, **settings))
    cluster.start("decode", "decode-0", "a")
    for node in nodes:
        cluster.start("store", f"store-{node}", node)
        for i in range(prefillers):
            cluster.start("prefill", f"prefill-{node}{i}", node)
    cluster.run(0.2)
    return cluster


def test_without_faults_every_prefix_takes_one_attempt_and_survives_eviction() -> None:
    cluster = cluster_of("ab", 2)
    names = [cluster.pin_prefix(f"p{i}", pages=1 + i, seed=i) for i in range(10)]
    for _ in range(100):
        cluster.round()
        cluster.evict()
    assert all(isinstance(cluster.answers[name], NewPin) for name in names)
    assert all(prefix.attempts == 1 and cluster.pin_of(prefix) for prefix in cluster.prefixes())
    cluster.finish()
    cluster.run(70)
    assert not cluster.prefixes()
    cluster.evict()
    assert not any(store.pins or store.pages for store in cluster.stores)


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_cluster_survives_random_faults(seed: int) -> None:
    dice = random.Random(seed)
    cluster = cluster_of("ab", 2)
    cluster.random.seed(seed)
    loss, lag = dice.choice([(0.0, 0.0), (0.01, 0.2), (0.1, 0.5)])
    for turn in range(500):
        if dice.random() < 0.1 and len(cluster.wishes) - len(cluster.answers) < 10:
            cluster.pin_prefix(
                dice.choice("abcdefgh"), dice.randint(1, 20), dice.choice([1.0, 30.0]), dice.randint(0, 99)
            )
        if dice.random() < 0.1:
            name = f"r{len(cluster.requests)}"
            cluster.submit(name, dice.randint(1, 80), dice.randint(1, 20), seed=dice.randint(0, 99))
        if dice.random() < 0.03:
            break_process(cluster, dice.choice(list(cluster.processes.values())), dice.choice(FAULTS))
        if dice.random() < 0.1:
            cluster.evict()
        if turn % 100 == 99:  # the supervisor repairs the cluster now and then
            for role, name, node in [("prefill", "prefill-a0", "a"), ("store", "store-a", "a")]:
                for old in cluster.named(name):
                    cluster.kill(old)
                cluster.start(role, name, node)
        cluster.round(loss=loss, lag=lag)
    cluster.finish()
    pins = [answer for answer in cluster.answers.values() if isinstance(answer, NewPin)]
    assert pins
    assert all(isinstance(answer, NewPin | Failed | Cancelled) for answer in cluster.answers.values())
