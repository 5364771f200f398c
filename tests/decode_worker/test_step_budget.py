"""Time for prompts and copies between two tokens of the decoding sequences."""

from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import DecodeConfig
from baton.messages import AttemptName, StepSample
from baton.step_cost_model import pairs
from decode_worker.step_budget import DecodeRows, StepBudget
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes

GRAIN = 16


def plan(rows: int, tokens: int = 0) -> ScheduledBatch:
    chunks = {AttemptName(f"d{i}", 1): Chunk([1], 50, [0] * 4) for i in range(rows)}
    return chunks | ({AttemptName("p", 1): Chunk([1] * tokens, 0, [0] * (tokens // GRAIN + 1))} if tokens else {})


def measured(mixed: float = 0.0, **config: Any) -> StepBudget:
    """Of a device that takes 10 ms for a step, 0.5 ms for a sequence and 0.2 ms for a prompt token, and `mixed` seconds
    more where there are both."""
    pace = WorkerStepTimes()
    for _ in range(30):
        for rows, tokens in ((8, 0), (4, 0), (0, 512), (8, 128), (2, 64)):
            both = mixed if rows and tokens else 0.0
            pace.stepped(plan(rows, tokens), 0.010 + 0.0005 * rows + 0.0002 * tokens + both)
    return StepBudget(DecodeConfig(**config), pace)


def rows(count: int) -> DecodeRows:
    return DecodeRows(count, count * 51)


def tails(tokens: int, context: int, seconds: float, beside: int = 8) -> StepSample:
    """A step of so many tokens of a prompt's tail."""
    return StepSample(tokens, pairs(tokens, context), beside, beside * 51, seconds)


def test_a_step_with_prompts_takes_eight_times_one_without_unless_told_otherwise() -> None:
    assert measured(max_num_batched_tokens=2_048).prompt_tokens(rows(8), 0, GRAIN) == pytest.approx(
        (8 - 1) * 14 / 0.2, rel=0.1
    )
    assert measured(itl_ms=20).prompt_tokens(rows(8), 0, GRAIN) == pytest.approx((20 - 14) / 0.2, rel=0.2)


def test_what_a_step_of_both_takes_more_leaves_less_for_prompts() -> None:
    less = measured(mixed=0.008, itl_ms=50).prompt_tokens(rows(8), 0, GRAIN)
    assert less == pytest.approx((50 - 14 - 8) / 0.2, rel=0.1)


def test_prompts_always_get_two_grains() -> None:
    assert measured(itl_ms=1).prompt_tokens(rows(8), 0, GRAIN) == 2 * GRAIN
    assert measured(max_num_batched_tokens=8).prompt_tokens(rows(8), 0, GRAIN) == 2 * GRAIN


def test_where_nothing_decodes_only_the_configuration_bounds_a_step() -> None:
    assert measured().prompt_tokens(rows(0), 0, GRAIN) == 512


def test_unmeasured_prompts_get_little_of_a_step() -> None:
    assert StepBudget(DecodeConfig(), WorkerStepTimes()).prompt_tokens(rows(8), 0, GRAIN) == 64
    assert StepBudget(DecodeConfig(), WorkerStepTimes()).prompt_tokens(rows(0), 0, GRAIN) == 512


def test_prompt_tails_come_in_bounded_parts() -> None:
    """What they cost is learned apart for those with little and with much before them."""
    tempo = measured()
    assert tempo.short_prompt_tokens(rows(0), 0, GRAIN) == 512
    assert (
        tempo.short_prompt_tokens(rows(8), 48, GRAIN) == tempo.short_prompt_tokens(rows(8), 2_000, GRAIN) == 4
    )  # unknown yet
    for context, each in ((48, 0.0004), (2_000, 0.003)):
        for _ in range(30):
            tempo.observe_step(tails(4, context, 0.014 + 4 * each))
    assert tempo.short_prompt_tokens(rows(8), 48, GRAIN) == pytest.approx(0.3 * 14 / 0.4, abs=2)
    assert tempo.short_prompt_tokens(rows(8), 2_000, GRAIN) == 4
    for _ in range(30):
        tempo.observe_step(tails(4, 2_000, 0.014))
    assert tempo.short_prompt_tokens(rows(8), 2_000, GRAIN) > GRAIN


def test_what_tails_cost_is_seen_beside_the_steps_before_them() -> None:
    """Whatever all steps so far would have it, those of now take half as long again."""
    tempo = measured()
    for _ in range(30):
        tempo.observe_step(StepSample(0, 0, 8, 8 * 51, 0.021))
        tempo.observe_step(tails(4, 48, 0.021 * (1 + 4 * 0.045)))
    assert tempo.short_prompt_tokens(rows(8), 48, GRAIN) == 6


def test_a_process_that_stood_still_says_little_about_tails() -> None:
    tempo = measured()
    for _ in range(30):
        tempo.observe_step(tails(8, 48, 0.014 + 8 * 0.0002))
    before = tempo.short_prompt_tokens(rows(8), 48, GRAIN)
    tempo.observe_step(tails(8, 48, 5.0))
    assert before > tempo.short_prompt_tokens(rows(8), 48, GRAIN) > before / 5
    tempo.observe_step(tails(8, 48, 5.0, beside=0))  # no decoding sequence was delayed
    assert tempo.short_prompt_tokens(rows(8), 48, GRAIN) > before / 5


def test_what_passed_between_two_steps_is_measured_by_a_step() -> None:
    assert measured().delays_too_long(rows(8), 0.004)
    assert not measured().delays_too_long(rows(8), 0.002)
    assert not measured().delays_too_long(rows(0), 1.0)  # no sequence decodes
    assert not StepBudget(DecodeConfig(), WorkerStepTimes()).delays_too_long(rows(8), 1.0)


def test_copies_take_a_share_of_a_step() -> None:
    tempo = measured(copy_share=0.5, copies_per_step=1_000)
    assert tempo.copies(rows(8)) == 1_000
    for _ in range(30):
        tempo.observe_copies(50, 50 * 100e-6)
    assert tempo.copies(rows(8)) == pytest.approx(0.5 * 14e-3 / 100e-6, rel=0.1)
    assert tempo.copies(rows(0)) == 1_000
    tempo.observe_copies(1, 3.0)  # we stood still
    assert tempo.copies(rows(8)) > 30
    for _ in range(30):
        tempo.observe_copies(1, 1.0)
    assert tempo.copies(rows(8)) == 1


def test_waiting_for_the_store_takes_less_than_copies_do() -> None:
    assert measured(copy_share=0.5).patience(rows(8)) == pytest.approx(0.25 * 14e-3, rel=0.1)
    assert StepBudget(DecodeConfig(), WorkerStepTimes()).patience(rows(8)) == 0


SECONDS = st.floats(1e-7, 1e4)
STEPS = st.builds(plan, st.integers(0, 30), st.integers(0, 600)).filter(bool)


@given(
    steps=st.lists(st.tuples(STEPS, SECONDS, st.integers(1, 9)), max_size=60),
    copies=st.lists(st.tuples(st.integers(0, 64), SECONDS)),
    context=st.integers(0, 100_000),
)
def test_whatever_was_measured_there_is_a_plan(
    steps: list[tuple[ScheduledBatch, float, int]], copies: list[tuple[int, float]], context: int
) -> None:
    config, pace = DecodeConfig(), WorkerStepTimes()
    tempo = StepBudget(config, pace)
    for step, seconds, times in steps:
        for _ in range(times):
            tempo.observe_step(pace.stepped(step, seconds))
    for pages, seconds in copies:
        tempo.observe_copies(pages, seconds)
    for beside in (rows(0), rows(1), rows(30)):
        most = tempo.prompt_tokens(beside, context, GRAIN)
        assert 2 * GRAIN <= most <= config.max_num_batched_tokens
        assert 1 <= tempo.short_prompt_tokens(beside, context, GRAIN) <= most
        assert 1 <= tempo.copies(beside) <= config.copies_per_step
        assert isfinite(tempo.longest_step(beside))
        assert tempo.patience(beside) >= 0
    assert isfinite(pace.rate(context))
    assert pace.rate(context) >= 0
