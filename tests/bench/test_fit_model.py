"""The fit of a timing model: what went in comes out, noise and outliers or not."""

from dataclasses import astuple
from random import Random

import pytest

from baton.step_cost_model import StepCoefficients
from bench.engine.fit_model import Step, errors, fit, grid

_TRUE = StepCoefficients(fixed=0.01, token=2e-4, pair=3e-8, row=5e-4, context=1e-6, mixed=4e-3)


def test_steps_in_numbers() -> None:
    step = Step(tokens=3, behind=10, rows=2, context=7)
    assert step.features == [1, 3, 36, 2, 14, 1], "pairs: 11 + 12 + 13"
    assert Step(tokens=3).features[-1] == Step(rows=2).features[-1] == 0
    assert [(chunk.start, len(chunk.tokens), chunk.pages) for chunk in step.chunks()] == [
        (10, 3, range(1)),
        (6, 1, range(1, 2)),
        (6, 1, range(2, 3)),
    ]


def test_exact_times_give_exact_coefficients() -> None:
    steps, _ = grid()
    coefficients = fit(steps, [_TRUE.of(*step.amounts) for step in steps])
    assert astuple(coefficients) == pytest.approx(astuple(_TRUE), rel=1e-6)


def test_outliers_and_noise_move_little() -> None:
    steps, checked = grid()
    random = Random(3)
    seconds = [_TRUE.of(*step.amounts) * random.uniform(0.98, 1.02) for step in steps]
    seconds[5] *= 4
    seconds[-3] *= 3
    coefficients = fit(steps, seconds)
    assert max(map(abs, errors(coefficients, checked, [_TRUE.of(*step.amounts) for step in checked]))) < 0.03
