"""Costs of work: the formulas, the source of a worker's coefficients, and the error of predictions."""

import math

import pytest

from baton.messages import LoadReport, StepSample
from baton.step_cost_model import StepCoefficients, pairs
from kvstore.load_or_recompute import DEFAULT_PREFILL_RATE
from router.placement.prediction_error import PredictionErrors
from router.placement.step_costs import DecodeCost, FittedCosts, PrefillCost

PREFILL = PrefillCost(fixed=0.01, token=1e-4, pair=1e-8)
MACHINE = StepCoefficients(fixed=0.01, token=1e-4, pair=1e-8, row=1e-3, context=1e-6)
PROMPTS = [(256, pairs(256), 0, 0), (512, pairs(512, 2_000), 4, 9_000), (512, pairs(512), 0, 0), (16, pairs(16), 0, 0)]
STEPS = [(0, 0, 8, 4_000), (0, 0, 1, 3_000), *PROMPTS]


def ran(count: int, factor: float = 1.0) -> list[StepSample]:
    sizes = [STEPS[number % len(STEPS)] for number in range(count)]
    return [StepSample(*size, factor * MACHINE.of(*size)) for size in sizes]


def test_a_prompt_costs_its_steps_its_tokens_and_its_pairs() -> None:
    assert PREFILL.seconds(1_000) == pytest.approx(0.01 + 0.1 + 500_500e-8)
    assert PREFILL.seconds(1_000, context=2_000) == pytest.approx(0.01 + 0.1 + 2_500_500e-8)
    assert PREFILL.seconds(1_000, chunk=256) == pytest.approx(4 * 0.01 + 0.1 + 500_500e-8)
    assert PREFILL.seconds(0, context=2_000) == 0


def test_a_decode_step_costs_its_rows_and_their_contexts() -> None:
    assert DecodeCost(fixed=0.01, row=1e-3, context=1e-6).seconds(8, 4_000) == pytest.approx(0.022)


def test_of_a_worker_that_told_nothing_something_is_known_and_steps_teach_the_rest() -> None:
    costs = FittedCosts(PredictionErrors())
    costs.join("d", "decode", ())
    assert costs.prefill("d").token == pytest.approx(1 / DEFAULT_PREFILL_RATE)
    costs.observe("d", 0, LoadReport(prefill_rate=500.0))
    assert costs.prefill("d").token == pytest.approx(1 / 500)
    for step in range(16, 481, 16):
        costs.observe("d", step, LoadReport(steps=tuple(ran(16))))
    assert costs.prefill("d").seconds(512, 2_000) == pytest.approx(PREFILL.seconds(512, 2_000), rel=0.05)
    assert costs.step("d").seconds(8, 4_000) == pytest.approx(0.022, rel=0.05)


def test_a_calibration_counts_before_any_work_and_others_of_the_role_before_that() -> None:
    costs = FittedCosts(PredictionErrors())
    costs.join("slow", "decode", ran(16, factor=2.0))
    assert costs.step("slow").seconds(8, 4_000) == pytest.approx(0.044, rel=0.05)
    costs.join("fresh", "decode", ())
    assert costs.step("fresh").seconds(8, 4_000) == pytest.approx(0.044, rel=0.05)
    costs.join("fast", "decode", ran(16))
    assert costs.step("fast").seconds(8, 4_000) == pytest.approx(0.022, rel=0.1)
    costs.join("other", "prefill", ())
    assert costs.prefill("other").token == min(costs.prefill(name).token for name in ("slow", "fresh", "fast"))


def test_a_worker_that_has_not_worked_yet_does_not_look_slow() -> None:
    costs = FittedCosts(PredictionErrors())
    costs.join("p", "prefill", ())
    costs.join("d", "decode", ())
    costs.observe("d", 1, LoadReport(prefill_rate=50_000.0))
    assert costs.prefill("p") == costs.prefill("d") == PrefillCost(0.0, 1 / 50_000, 0.0)


def test_heartbeats_that_repeat_steps_or_overtake_each_other_teach_them_once() -> None:
    scores = PredictionErrors()
    costs = FittedCosts(scores)
    costs.join("d", "decode", ran(16))
    for step, last in ((4, 4), (4, 4), (2, 2), (6, 6), (6, 6), (100, 8)):
        costs.observe("d", step, LoadReport(steps=tuple(ran(last))))
    assert sum(score.count for score in scores.summaries().values()) == 4 + 2 + 8
    costs.forget("d")
    costs.forget("d")


def test_scores_are_of_the_last_predictions_whichever_way_they_were_wrong() -> None:
    scores = PredictionErrors()
    assert scores.summaries() == {}
    scores.add_pair("ttft", 0.0, 1.0)
    scores.add_pair("ttft", 1.0, 0.0)
    assert scores.summaries() == {}
    for number in range(1_000):
        scores.add_pair("ttft", 1.0, 2.0 if number % 2 else 0.5)
        scores.add_pair("step", 1.0, 10.0 if number % 5 == 0 else 1.0)
    summaries = scores.summaries()
    assert summaries["ttft"].median == summaries["ttft"].p90 == pytest.approx(math.log(2))
    assert (summaries["step"].median, summaries["step"].p90) == (0, pytest.approx(math.log(10)))
