"""Which role changes are advised, and that none is taken back for the same load."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.step_costs import DecodeCost
from router.placement.utilization import (
    HOLD,
    OfferedLoad,
    PoolCapacity,
    RoleAdvice,
    UtilizationMonitor,
    advise,
    utilization,
)

STEP = DecodeCost(fixed=0.01, row=0.001, context=1e-6)
SIDES = PoolCapacity(prefill=4, decode=4, step=STEP, pool=100_000)

shares = st.floats(0, 100)
demands = st.builds(OfferedLoad, prompts=shares, tokens=st.floats(0, 1e5), context=st.floats(0, 1e5))
steps = st.builds(DecodeCost, fixed=st.floats(0, 0.1), row=st.floats(0, 0.01), context=st.floats(0, 1e-4))
sides = st.builds(
    PoolCapacity, st.integers(0, 8), st.integers(0, 8), steps, st.floats(1, 1e6), st.none() | st.floats(1e-3, 1.0)
)


def moved(before: PoolCapacity, advice: RoleAdvice) -> PoolCapacity:
    more = 1 if advice.role == "prefill" else -1
    return replace(before, prefill=before.prefill + more, decode=before.decode - more)


def test_a_decode_worker_can_do_what_a_full_batch_can() -> None:
    # 100 sequences of 1,000 tokens fit: a step takes 10 + 100 · 2 ms, so 2.1 ms a token.
    assert utilization(OfferedLoad(2.0, 1_000, 1_000), SIDES).decode == pytest.approx(1_000 * 0.0021 / 4)
    assert utilization(OfferedLoad(2.0, 1_000, 1_000), SIDES).prefill == pytest.approx(0.5)
    # 40 sequences keep 90 ms: 2.25 ms a token.
    bound = replace(SIDES, tpot=0.09)
    assert utilization(OfferedLoad(2.0, 1_000, 1_000), bound).decode == pytest.approx(1_000 * 0.00225 / 4)


def test_one_more_of_the_side_that_has_too_much() -> None:
    prompts = advise(OfferedLoad(3.6, 400, 1_000), SIDES)
    assert (prompts.role, prompts.now.prefill, prompts.then.prefill) == ("prefill", 0.9, 0.72)
    tokens = advise(OfferedLoad(1.0, 1_900, 1_000), SIDES)
    assert tokens.role == "decode"


def test_nothing_where_it_would_not_help() -> None:
    assert advise(OfferedLoad(3.6, 1_700, 1_000), SIDES) is None, "both sides are as busy"
    assert advise(OfferedLoad(1.2, 0, 0), SIDES) is None, "nobody is busy"
    assert advise(OfferedLoad(0.0, 0, 0), SIDES) is None


@given(demands, sides)
def test_a_side_is_never_left_empty(demand: OfferedLoad, before: PoolCapacity) -> None:
    if (advice := advise(demand, before)) is not None:
        after = moved(before, advice)
        assert min(after.prefill, after.decode) >= 1
        assert advice.then == utilization(demand, after)
        assert advice.then.busiest < advice.now.busiest


@given(demands, sides)
def test_a_constant_load_comes_to_rest(demand: OfferedLoad, before: PoolCapacity) -> None:
    roles: list[str] = []
    while (advice := advise(demand, before)) is not None:
        roles.append(advice.role)
        before = moved(before, advice)
        assert len(roles) <= 16
    assert len(set(roles)) <= 1, "a change was taken back"


def test_a_change_must_be_worth_it_for_a_while() -> None:
    watch, now = UtilizationMonitor(), 100.0
    first = None
    for _ in range(200):
        watch.prompt(3.6)
        watch.generated(400, 1_000)
        now += 1.0
        advice = watch.assess(SIDES, now)
        first = first or (now if advice else None)
    assert first is not None
    assert first >= 100 + HOLD
    assert watch.now.prefill == pytest.approx(0.9, rel=0.05)
    assert watch.assess(replace(SIDES, prefill=5, decode=3), now + 1) is None, "it has been carried out"
    for _ in range(200):
        now += 1.0
        assert watch.assess(SIDES, now + 1) is None or now < 300 + 2 * HOLD
    assert watch.now.prefill < 0.01


def test_a_burst_changes_nothing() -> None:
    watch, now = UtilizationMonitor(), 0.0
    for second in range(120):
        watch.prompt(20.0 if second == 40 else 0.5)
        now += 1.0
        assert watch.assess(SIDES, now) is None
