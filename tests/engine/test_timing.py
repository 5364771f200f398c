"""A worker's steps, as it plans with them and reports them."""

import pytest

from baton.messages import MAX_STEP_SAMPLES, AttemptName, StepSample
from baton.step_cost_model import pairs
from engine.step.batch import Chunk
from engine.step.timing import WorkerStepTimes, sample_of

PAGES = range(100)
ROW, LONG, TAIL = Chunk([1], 50, PAGES), Chunk([1] * 256, 512, PAGES), Chunk([1] * 5, 16, PAGES)


def test_a_step_is_told_by_its_prompts_and_rows() -> None:
    assert sample_of([ROW, ROW], 0.5) == StepSample(0, 0, 2, 102, 0.5)
    assert sample_of([ROW, LONG, TAIL], 0.5) == StepSample(261, pairs(256, 512) + pairs(5, 16), 1, 51, 0.5)


def test_the_last_steps_are_reported_one_by_one() -> None:
    pace = WorkerStepTimes()
    for number in range(40):
        pace.stepped({AttemptName("a", 1): ROW}, 0.01 * (number + 1))
    assert len(pace.last) == MAX_STEP_SAMPLES
    assert pace.last[-2:] == (StepSample(0, 0, 1, 51, 0.39), StepSample(0, 0, 1, 51, 0.4))


def test_the_rate_of_computing_prompts_is_known_from_the_calibration_and_falls_with_the_context() -> None:
    assert WorkerStepTimes().rate() == 0
    sizes = [(tokens, pairs(tokens, context)) for tokens in (64, 256) for context in (0, 999)]
    pace = WorkerStepTimes([StepSample(*size, 0, 0, 0.01 + 1e-4 * size[0] + 1e-8 * size[1]) for size in sizes] * 4)
    assert pace.last == ()
    assert pace.rate() == pytest.approx(256 / (0.01 + 0.0256 + 1e-8 * pairs(256)), rel=0.02)
    assert pace.rate(4_000) < 0.9 * pace.rate()


@pytest.mark.parametrize(("plan", "steps"), [(LONG, 1), (ROW, 5), (ROW, 99)])
def test_steps_are_learned_from_together_until_there_are_some_or_one_of_another_kind(plan: Chunk, steps: int) -> None:
    pace = WorkerStepTimes()
    for _ in range(3):
        pace.stepped({AttemptName("a", 1): ROW}, 0.01)
    assert not pace.knows_anything
    pace.add_steps([sample_of([plan], 0.01)] * steps)
    assert pace.knows_anything
    pace.calibrate()
    assert pace.seconds(rows=1, context=51) == pytest.approx(0.01, rel=0.1)


def test_steps_that_are_all_alike_are_learned_from_as_well() -> None:
    pace = WorkerStepTimes()
    for _ in range(20):
        pace.stepped({AttemptName("a", 1): ROW}, 0.01)
    pace.calibrate()
    assert pace.seconds(rows=1, context=51) == pytest.approx(0.01, rel=0.1)


def test_prompts_may_seem_to_cost_nothing() -> None:
    pace = WorkerStepTimes()
    for rows in (1, 4, 8) * 20:  # as when a machine was slow while there was no prompt
        pace.observe(StepSample(0, 0, rows, 0, 0.01 * rows))
        pace.observe(StepSample(64, pairs(64), rows, 0, 0.005 * rows))
    assert pace.seconds(64, pairs(64)) == 0
    assert pace.rate() == 0
