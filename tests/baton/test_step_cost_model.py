"""The fit of step times: what it learns, what it ignores, what it does not forget."""

import math
import random
from collections.abc import Callable
from dataclasses import astuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.messages import StepSample
from baton.step_cost_model import StepCoefficients, StepCostModel, pairs

MACHINE = StepCoefficients(fixed=0.004, token=150e-6, pair=30e-9, row=400e-6, context=1e-6, mixed=0.003)
SIZES = [(512, pairs(512), 0, 0), (0, 0, 32, 8_000), (256, pairs(256, 2_000), 8, 4_000), (16, pairs(16), 1, 500)]

Draw = Callable[[random.Random], tuple[int, int, int, int]]


def mixed(rng: random.Random) -> tuple[int, int, int, int]:
    tokens = rng.choice([0, 16, 128, 512])
    alone = tokens and rng.random() < 0.5  # prompts without sequences: one in 33 would say too little of those
    rows = 0 if alone else rng.randrange(1, 33)
    return tokens, pairs(tokens, rng.randrange(4_000)), rows, rows * rng.randrange(1, 2_000)


def decoding(rng: random.Random) -> tuple[int, int, int, int]:
    return 0, 0, 8, 8 * rng.randrange(100, 2_000)


def teach(
    pace: StepCostModel,
    steps: int,
    draw: Draw = mixed,
    cost: StepCoefficients = MACHINE,
    noise: float = 0.0,
    seed: int = 0,
) -> StepCostModel:
    """Steps whose times scatter by a factor of about 1 ± noise."""
    rng = random.Random(seed)
    for _ in range(steps):
        size = draw(rng)
        pace.observe(StepSample(*size, cost.of(*size) * math.exp(rng.gauss(0, noise))))
    return pace


def times(factor: float, cost: StepCoefficients = MACHINE) -> StepCoefficients:
    return StepCoefficients(*(factor * coefficient for coefficient in astuple(cost)))


def agrees(pace: StepCostModel, cost: StepCoefficients, rel: float) -> None:
    for size in SIZES:
        assert pace.seconds(*size) == pytest.approx(cost.of(*size), rel=rel), size


def test_pairs_are_counted_token_by_token() -> None:
    assert pairs(3) == 1 + 2 + 3
    assert pairs(3, 10) == 11 + 12 + 13


def test_it_learns_what_each_part_costs() -> None:
    agrees(teach(StepCostModel(), 200, noise=0.05), MACHINE, rel=0.05)


coefficient = st.floats(0.1, 1)


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[coefficient] * 6), st.integers(-6, 3), st.floats(0, 0.1), st.integers(0, 1_000))
@example((1.0, 0.5, 1.0, 1.0, 1.0, 0.5), 0, 0.0, 28)  # many outliers among the last steps
def test_it_finds_the_costs_of_any_machine_in_spite_of_noise_and_gross_outliers(
    drawn: tuple[float, ...], magnitude: int, noise: float, seed: int
) -> None:
    units = (1, 256, 256_000, 16, 10_000, 1)
    machine = StepCoefficients(*(10.0**magnitude * c / unit for c, unit in zip(drawn, units, strict=True)))
    rng, pace = random.Random(seed), StepCostModel()
    for _ in range(300):
        size = mixed(rng)
        stood_still = rng.uniform(3, 100) if rng.random() < 0.05 else 1.0
        pace.observe(StepSample(*size, machine.of(*size) * math.exp(rng.gauss(0, noise)) * stood_still))
    agrees(pace, machine, rel=0.15 + 3 * noise)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-6, 1e3), st.integers(0, 100))
def test_the_unit_of_time_makes_no_difference(factor: float, seed: int) -> None:
    here = teach(StepCostModel(), 60, noise=0.1, seed=seed)
    there = teach(StepCostModel(), 60, cost=times(factor), noise=0.1, seed=seed)
    for size in SIZES:
        assert there.seconds(*size) == pytest.approx(factor * here.seconds(*size), rel=1e-6)


def test_nothing_is_known_at_first() -> None:
    pace = StepCostModel()
    assert pace.seconds(512, rows=8) == 0
    assert pace.tokens_within(1.0) is None
    pace.observe(StepSample(0, 0, 8, 800, 0.01))
    assert pace.seconds(rows=8, context=800) == pytest.approx(0.01, rel=0.05)
    assert pace.tokens_within(1.0) is None  # no prompt yet
    pace.observe(StepSample(512, pairs(512), 8, 800, 0.1))
    assert pace.seconds(512, pairs(512), 8, 800) == pytest.approx(0.1, rel=0.05)
    assert pace.tokens_within(0.0) == 0


def test_steps_that_took_what_was_expected_are_learned_from_together() -> None:
    pace, size = teach(StepCostModel(), 200), (512, pairs(512), 0, 0)
    pace.calibrate()
    for late in (1.01, 1.04):
        before, step = pace.cost, StepSample(*size, late * MACHINE.of(*size))
        for _ in range(31):
            pace.observe(step)
            assert pace.cost == before
        pace.observe(step)
        assert pace.cost != before
    before = pace.cost
    pace.observe(StepSample(*size, 1.2 * MACHINE.of(*size)))
    assert pace.cost != before


def test_how_many_prompt_tokens_fit() -> None:
    pace = teach(StepCostModel(), 200)
    assert pace.tokens_within(300 * MACHINE.token) == pytest.approx(300, rel=0.05)
    assert pace.tokens_within(0.1, context=3_000) == pytest.approx(
        0.1 / (MACHINE.token + 3_000 * MACHINE.pair), rel=0.05
    )
    beside_rows = (0.1 - MACHINE.mixed) / MACHINE.token
    assert pace.tokens_within(0.1, rows=8) == pytest.approx(beside_rows, rel=0.05)
    assert pace.tokens_within(0.5 * MACHINE.mixed, rows=8) == 0


def test_what_both_take_more_than_their_sum_is_learned_from_steps_that_have_both() -> None:
    pace = teach(StepCostModel(), 200, lambda rng: size if 0 in (size := mixed(rng))[::2] else (0, 0, *size[2:]))
    assert pace.cost.mixed == 0
    teach(pace, 200)
    assert pace.cost.mixed == pytest.approx(MACHINE.mixed, rel=0.1)


def test_steps_of_one_size_tell_about_that_size() -> None:
    size = (512, pairs(512), 0, 0)
    pace = teach(StepCostModel(), 1_000, lambda _: size)
    assert pace.seconds(*size) == pytest.approx(MACHINE.of(*size), rel=0.01)
    assert 0 < pace.seconds(16, pairs(16)) < MACHINE.of(*size)


def test_steps_of_one_size_leave_what_was_known_of_others() -> None:
    pace = teach(StepCostModel(), 200)
    teach(pace, 1_000, lambda _: (128, pairs(128, 700), 4, 2_000))
    agrees(pace, MACHINE, rel=0.02)


def test_a_process_that_stood_still_moves_nothing() -> None:
    pace = teach(StepCostModel(), 100, noise=0.05)
    before = pace.seconds(512, pairs(512), 8, 4_000)
    pace.observe(StepSample(512, pairs(512), 8, 4_000, 30.0))
    pace.observe(StepSample(0, 0, 8, 4_000, 5.0))
    assert pace.seconds(512, pairs(512), 8, 4_000) == pytest.approx(before, rel=0.05)


def test_a_slow_first_step_is_soon_outweighed() -> None:
    pace, size = StepCostModel(), (512, pairs(512), 0, 0)
    pace.observe(StepSample(*size, 5.0))
    teach(pace, 10, lambda _: size)
    assert pace.seconds(*size) == pytest.approx(MACHINE.of(*size), rel=0.1)


@pytest.mark.parametrize(("factor", "steps"), [(0.1, 150), (0.4, 60), (0.8, 200), (1.25, 200), (2.0, 60), (10.0, 60)])
def test_a_machine_that_changes_for_good_is_followed(factor: float, steps: int) -> None:
    pace = teach(StepCostModel(), 300, noise=0.05)
    teach(pace, steps, cost=times(factor), noise=0.03, seed=1)
    agrees(pace, times(factor), rel=0.1)


def test_what_prompts_cost_is_not_forgotten_without_prompts() -> None:
    pace = teach(StepCostModel(), 100)
    teach(pace, 5_000, decoding, noise=0.1)
    size = (512, pairs(512), 8, 4_000)
    assert pace.seconds(*size) == pytest.approx(MACHINE.of(*size), rel=0.1)


def test_a_larger_step_than_any_before_is_believed() -> None:
    pace = teach(StepCostModel(), 200, lambda _: (16, pairs(16), 0, 0))
    teach(pace, 5, lambda _: (512, pairs(512), 0, 0))
    assert pace.seconds(512, pairs(512)) == pytest.approx(MACHINE.of(512, pairs(512)), rel=0.1)


def test_an_heir_begins_with_what_others_know_and_soon_knows_better() -> None:
    elders = [teach(StepCostModel(), 100, cost=times(factor)) for factor in (0.9, 1.1)]
    heir = StepCostModel.from_peers(elders)
    agrees(heir, MACHINE, rel=0.12)
    assert heir.largest == 512
    teach(heir, 30, cost=times(1.3))
    agrees(heir, times(1.3), rel=0.1)
    agrees(elders[0], times(0.9), rel=0.01)


SAMPLES = st.builds(
    StepSample, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 256), st.integers(0, 10**8),
    st.floats(0, 1e6),
)  # fmt: skip


@given(st.lists(SAMPLES, min_size=1, max_size=30), st.floats(0, 10), st.integers(0, 10**5))
def test_whatever_is_measured_more_work_never_takes_less_time(
    steps: list[StepSample], within: float, context: int
) -> None:
    pace = StepCostModel()
    for step in steps:
        pace.observe(step)
    cost = pace.cost
    assert all(0 <= each < math.inf for each in astuple(cost)), cost
    if (count := pace.tokens_within(within, context)) is not None:
        assert 0 <= count * (cost.token + context * cost.pair) <= within * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_teaches_nothing(seconds: float) -> None:
    pace = StepCostModel()
    pace.observe(StepSample(16, pairs(16), 0, 0, seconds))
    pace.observe(StepSample(0, 0, 0, 0, 0.1))
    assert pace.cost == StepCoefficients()
