"""The fit of step times: what it learns, what it ignores, what it does not forget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pace import StepPace

STEPS = st.tuples(st.integers(0, 4_096), st.integers(0, 256), st.floats(1e-6, 1e3), st.integers(0, 10**8))


def machine(tokens: int, rows: int, pairs: int = 0) -> float:
    """Seconds, as some machine takes them."""
    return 0.004 + 150e-6 * tokens + 400e-6 * rows + 30e-9 * pairs


def taught(steps: int, draw: Callable[[random.Random], tuple[int, int, int]], noise: float = 0.0) -> StepPace:
    rng, pace = random.Random(0), StepPace()
    for _ in range(steps):
        tokens, rows, pairs = draw(rng)
        pace.observe(tokens, rows, machine(tokens, rows, pairs) * rng.uniform(1 - noise, 1 + noise), pairs)
    return pace


def mixed(rng: random.Random) -> tuple[int, int, int]:
    tokens = rng.choice([0, 16, 128, 512])
    return tokens, rng.randrange(1, 33), tokens * rng.randrange(4_000)


def test_it_learns_what_each_part_costs() -> None:
    pace = taught(200, mixed, noise=0.05)
    for tokens, rows, pairs in [(512, 0, 0), (0, 32, 0), (256, 8, 256 * 2_000), (16, 1, 0)]:
        assert pace.seconds(tokens, rows, pairs) == pytest.approx(machine(tokens, rows, pairs), rel=0.1)
    assert pace.tokens_within(machine(300, 8), 8) == pytest.approx(300, rel=0.1)
    assert pace.tokens_within(machine(300, 8, 300 * 3_000), 8, context=3_000) == pytest.approx(300, rel=0.1)


def test_nothing_is_known_at_first() -> None:
    pace = StepPace()
    assert pace.seconds(512, 8) == 0
    assert pace.tokens_within(1.0) is None
    pace.observe(0, 8, 0.01)
    assert pace.seconds(0, 8) == pytest.approx(0.01, rel=0.05)
    assert pace.tokens_within(1.0) is None  # no prompt yet
    pace.observe(512, 8, 0.1)
    assert pace.seconds(512, 8) == pytest.approx(0.1, rel=0.05)
    assert pace.tokens_within(0.001) == 0


def test_steps_of_one_size_tell_about_that_size() -> None:
    pace = taught(20, lambda _: (512, 0, 0))
    assert pace.seconds(512) == pytest.approx(machine(512, 0), rel=0.01)
    assert 0 < pace.seconds(16) < machine(512, 0)


def test_a_process_that_stood_still_moves_nothing() -> None:
    pace = taught(100, mixed, noise=0.05)
    before = pace.seconds(512, 8)
    pace.observe(512, 8, 30.0)
    pace.observe(0, 8, 5.0)
    assert pace.seconds(512, 8) == pytest.approx(before, rel=0.05)


def test_a_slow_first_step_is_soon_outweighed() -> None:
    pace = StepPace()
    pace.observe(512, 0, 5.0)
    for _ in range(30):
        pace.observe(512, 0, machine(512, 0))
    assert pace.seconds(512) == pytest.approx(machine(512, 0), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.4, 2.5, 10.0])
def test_a_machine_that_changes_for_good_is_followed(factor: float) -> None:
    rng, pace = random.Random(1), taught(300, mixed)
    for _ in range(90):
        tokens, rows, pairs = mixed(rng)
        pace.observe(tokens, rows, factor * machine(tokens, rows, pairs), pairs)
    assert pace.seconds(512, 8) == pytest.approx(factor * machine(512, 8), rel=0.1)


def test_what_prompts_cost_is_not_forgotten_without_prompts() -> None:
    pace = taught(100, mixed)
    for _ in range(5_000):
        pace.observe(0, 8, machine(0, 8))
    assert pace.seconds(512, 8) == pytest.approx(machine(512, 8), rel=0.1)


def test_a_larger_step_than_any_before_is_believed() -> None:
    pace = taught(200, lambda _: (16, 0, 0))
    for _ in range(5):
        pace.observe(512, 0, machine(512, 0))
    assert pace.seconds(512) == pytest.approx(machine(512, 0), rel=0.1)


@given(st.lists(STEPS, min_size=1, max_size=30), st.floats(0, 10), st.integers(0, 64), st.integers(0, 10**5))
def test_whatever_is_measured_more_work_never_takes_less_time(
    steps: list[tuple[int, int, float, int]], within: float, rows: int, context: int
) -> None:
    pace = StepPace()
    for tokens, decoding, seconds, pairs in steps:
        pace.observe(tokens, decoding, seconds, pairs if tokens else 0)
    assert math.isfinite(pace.seconds(512, 8, 1_000))
    assert 0 <= pace.seconds(0) <= pace.seconds(16) <= pace.seconds(512) <= pace.seconds(512, 8) + 1e-12
    if (count := pace.tokens_within(within, rows, context)) is not None:
        assert count >= 0
        assert count == 0 or pace.seconds(count, rows, count * context) <= within * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_teaches_nothing(seconds: float) -> None:
    pace = StepPace()
    pace.observe(16, 0, seconds)
    pace.observe(0, 0, 0.1)
    assert pace.tokens_within(1.0) is None
