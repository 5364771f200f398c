"""Heartbeats within every bound of their types whose figures no process has: they cost no router its life."""

import numpy as np
import pytest

from baton.messages import Heartbeat, LoadReport, StepSample, TierSpeed
from router.placement.prediction_error import PredictionErrors
from tests.router.lab import Lab

LARGEST = 2**63 - 1


@pytest.mark.parametrize("rate", [5e-324, 1e-200, 1e12])
@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e9])
@pytest.mark.parametrize("size", [0, 1, LARGEST])
def test_requests_are_placed_whatever_a_worker_says_of_its_speed(
    lab: Lab, decode: str, prefill: str, store: str, rate: float, seconds: float, size: int
) -> None:
    steps = tuple(StepSample(size, size, size, size, seconds) for _ in range(3))
    tiers = (TierSpeed("disk", seconds, 1e-3), TierSpeed("remote", seconds, 1e15))
    with np.errstate(all="raise"):
        for worker in (prefill, decode):
            load = LoadReport(pages_free=1_000, pages_total=1_000, prefill_rate=rate, steps=steps)
            lab.say(worker, Heartbeat(lab.counts[worker], load, step=len(steps)))
        lab.report(store, LoadReport(pages_free=1_000, pages_total=1_000, tiers=tiers))
        for number in range(4):
            lab.submit(f"r-{number}", prompt=200)
            lab.advance(0.3)


def test_a_prediction_and_its_outcome_may_be_as_far_apart_as_numbers_are() -> None:
    errors = PredictionErrors()
    errors.add_pair("ttft", 1e300, 5e-324)
    errors.add_pair("ttft", 5e-324, 1e300)
    assert errors.summaries()["ttft"].count == 2
