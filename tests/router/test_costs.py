"""What work costs: the formulas, and how their coefficients are learned."""

from __future__ import annotations

import pytest

from router.costs import PrefillCost, StepCost

PREFILL = PrefillCost(fixed=0.01, token=1e-4, pair=1e-8)


def test_a_prompt_costs_its_steps_its_tokens_and_its_pairs() -> None:
    assert PREFILL.seconds(1_000) == pytest.approx(0.01 + 0.1 + 500_500e-8)
    assert PREFILL.seconds(1_000, context=2_000) == pytest.approx(0.01 + 0.1 + 2_500_500e-8)
    assert PREFILL.seconds(1_000, chunk=256) == pytest.approx(4 * 0.01 + 0.1 + 500_500e-8)
    assert PREFILL.seconds(0, context=2_000) == 0


def test_a_decode_step_costs_its_rows_and_their_contexts() -> None:
    assert StepCost(fixed=0.01, row=1e-3, context=1e-6).seconds(8, 4_000) == pytest.approx(0.022)
