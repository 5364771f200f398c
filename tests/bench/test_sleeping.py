"""The sleeping engine: it sleeps as long as the timing model says, and returns a token for each sequence that needs
one."""

from __future__ import annotations

import pytest

from bench import sleeping
from engine.step.batch import Chunk, Sampled, TokenDraw
from simulator.timing import StepTimes


def test_it_sleeps_and_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    times = StepTimes(fixed=1.0, token=0.1, pair=0.01, row=2.0, context=0.5, mixed=4.0)
    engine = object.__new__(sleeping.sleeping(times))
    chunks = [Chunk([5, 6, 7], 4, [0]), Chunk([9], 9, [1], TokenDraw())]
    assert engine.step(chunks) == [None, Sampled(1)]
    assert slept == [pytest.approx(1.0 + 3 * 0.1 + (5 + 6 + 7) * 0.01 + 2.0 + 10 * 0.5 + 4.0)]
