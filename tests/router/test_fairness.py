"""Virtual token counters: equal service for tenants that wait, and little credit for tenants that did not."""

from collections import Counter, deque

import hypothesis.strategies as st
from hypothesis import given, settings

from router.queueing.fairness import OTHER, TenantFairness, TokensServed, TokenWeights


def even(tenant: str) -> float:
    return 1.0


def test_prices() -> None:
    assert TokenWeights().prompt(100, 0) == 100
    assert TokenWeights(cached=0.25).prompt(100, 80) == 40


def test_a_newly_waiting_tenant_has_no_credit() -> None:
    fairness = TenantFairness(even)
    fairness.start_waiting("busy")
    fairness.charge("busy", 1_000)
    fairness.start_waiting("fresh")
    assert fairness.counter("fresh") == 1_000


def test_or_what_it_may_have_saved_up_of_its_share() -> None:
    fairness = TenantFairness({"busy": 1.0, "fresh": 1.0, "rich": 3.0}.__getitem__)
    fairness.start_waiting("busy")
    fairness.charge("busy", 1_000)
    fairness.start_waiting("fresh", 100)
    assert fairness.counter("fresh") == 950, "half of it: two have equal weights"
    fairness.start_waiting("rich", 100)
    assert fairness.counter("rich") == 980, "of five parts it has three, and each token counts a third"


def test_what_was_saved_up_is_used_once() -> None:
    fairness = TenantFairness(even)
    fairness.start_waiting("busy")
    fairness.charge("busy", 1_000)
    for _ in range(10):  # it asks again and again, and is always served at once
        fairness.start_waiting("sly", 100)
        fairness.charge("sly", 10)
        fairness.stop_waiting("sly")
    assert fairness.counter("sly") == 1_050, "950 when it began"
    fairness.charge("busy", 500)
    fairness.start_waiting("sly", 100)
    assert fairness.counter("sly") == 1_450, "and there again, since it has not asked for more for so long"


def test_a_newly_waiting_tenant_keeps_its_debt() -> None:
    fairness = TenantFairness(even)
    fairness.start_waiting("busy")
    fairness.charge("idle", 500)
    fairness.start_waiting("idle")
    assert fairness.counter("idle") == 500


def test_an_idle_queue_keeps_the_last_counter() -> None:
    fairness = TenantFairness(even)
    fairness.start_waiting("a")
    fairness.charge("a", 1_000)
    fairness.stop_waiting("a")
    fairness.start_waiting("b")
    assert fairness.counter("b") == 1_000


def test_tenants_beyond_their_share() -> None:
    """The weights are 1, 1 and 2: 800 tokens would bring all three to where "a" is."""
    fairness = TenantFairness(WEIGHTS.__getitem__)
    fairness.start_waiting("a")
    assert fairness.over_served(0) == frozenset(), "there is nobody to be ahead of"
    fairness.start_waiting("b")
    fairness.start_waiting("c")
    fairness.charge("a", 200)
    assert fairness.over_served(799) == {"a"}
    assert fairness.over_served(800) == frozenset()
    fairness.stop_waiting("a")
    assert fairness.over_served(0) == frozenset()


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    fairness = TenantFairness(even)
    for i in range(1_000):
        fairness.start_waiting(f"t{i}")
        fairness.charge(f"t{i}", 10)
        fairness.stop_waiting(f"t{i}")
        fairness.validate()
    assert len(fairness._counters) <= 1


def test_labels_are_bounded() -> None:
    served = TokensServed(most=2)
    for tenant in "abcda":
        served.add_tokens(tenant, "output", 1)
    assert served.tokens == {("a", "output"): 2, ("b", "output"): 1, (OTHER, "output"): 2}


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5}


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 8),
    backlogged=st.sets(st.sampled_from("abcd"), min_size=2),
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=4, max_size=12),
    before=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5_000)), max_size=6),
    visits=st.lists(st.sampled_from("abcd"), max_size=40),
    saving=st.sampled_from([0.0, 500.0]),
)
def test_backlogged_tenants_are_served_alike(
    slots: int,
    backlogged: set[str],
    sizes: list[tuple[int, int]],
    before: list[tuple[str, int]],
    visits: list[str],
    saving: float,
) -> None:
    """The bound of the paper's theorem, by weight: what the requests that run at once can differ by, twice."""
    prices = TokenWeights()
    fairness = TenantFairness(WEIGHTS.__getitem__)
    for tenant, cost in before:
        fairness.charge(tenant, cost)
    waiting: dict[str, deque[tuple[int, int]]] = {tenant: deque() for tenant in WEIGHTS}
    served: Counter[str] = Counter()
    running: list[tuple[str, int]] = []
    for turn in range(300):
        for tenant in [*sorted(backlogged), *visits[turn : turn + 1]]:
            if tenant not in backlogged or not waiting[tenant]:
                waiting[tenant].append(sizes[(turn + len(tenant)) % len(sizes)])
                fairness.start_waiting(tenant, saving)
        if turn == 0:  # a tenant with debt pays it first: service is measured once the counters are even
            level = max(fairness.counter(tenant) for tenant in backlogged)
            for tenant in backlogged:
                fairness.charge(tenant, (level - fairness.counter(tenant)) * WEIGHTS[tenant])
        while len(running) < slots and any(waiting.values()):
            tenant = min((t for t in waiting if waiting[t]), key=lambda t: (fairness.counter(t), t))
            prompt, output = waiting[tenant].popleft()
            if tenant in backlogged:
                waiting[tenant].append(sizes[turn % len(sizes)])
                fairness.start_waiting(tenant)
            fairness.stop_waiting(tenant)
            fairness.charge(tenant, prices.prompt(prompt, 0))
            served[tenant] += prompt
            running.append((tenant, output))
        for tenant, _ in running:
            fairness.charge(tenant, prices.output)
            served[tenant] += 2
        running = [(tenant, left - 1) for tenant, left in running if left > 1]
        fairness.validate()
        once = max(prompt + 2 * output for prompt, output in sizes) * slots
        shares = [served[tenant] / WEIGHTS[tenant] for tenant in backlogged]
        assert max(shares) - min(shares) <= 2 * once / min(WEIGHTS[tenant] for tenant in backlogged)
