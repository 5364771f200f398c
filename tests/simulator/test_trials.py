"""What a load demands, by sums done by hand; and what counts as served."""

from math import nan

import numpy as np
import pytest

from baton.errors import InvalidRequest
from simulator.advice import Objectives, Trial
from simulator.cluster import Layout
from simulator.trials import Setting, demand, judged, serve
from simulator.workloads import Arrival
from tests.simulator.simulated import PAGE, STEP, request, timing


def setting(load: list[Arrival], ttft: float = 2.0, tpot: float = 0.05) -> Setting:
    model = timing()
    return Setting(load, model, model.configuration(PAGE, {}), Objectives(ttft, tpot), seed=1)


def test_prompts_are_counted_once_and_tokens_at_the_largest_batch_that_keeps_the_objective() -> None:
    load = [request(0.0, 2_000, 100, blocks=(1, 2, 3, 4)), request(10.0, 2_000, 100, blocks=(1, 2, 3, 5))]
    work = demand(setting(load))
    new = 2_000 + 2_000 - 3 * 512
    assert work.prefill == pytest.approx(2 * STEP.fixed + STEP.token * new)
    each = STEP.row + STEP.context * 2_050
    batch = (0.05 - STEP.fixed) / each
    assert work.decode == pytest.approx(200 * 0.05 / batch)
    assert (work.span, work.within) == (10.0, 1.0)


def test_a_side_without_time_left_sets_the_speed() -> None:
    work = demand(setting([request(0.0, 2_000, 100), request(10.0, 2_000, 100, blocks=(5, 6, 7, 8))]))
    assert work.speed(Layout(0, 2)) == pytest.approx(20 / (work.prefill + work.decode))
    assert work.speed(Layout(1, 99)) == pytest.approx(10 / work.prefill)
    assert work.speed(Layout(99, 1)) == pytest.approx(10 / work.decode)


def test_some_requests_meet_no_objective_even_alone() -> None:
    load = [request(0.0, 2_000, 100), request(1.0, 30_000, 100, blocks=range(10, 70))]
    assert demand(setting(load, ttft=1.0)).within == 0.5
    assert demand(setting(load, tpot=0.005)).within == 0.0


@pytest.mark.parametrize("load", [[], [request(0.0, 10, 10)], [request(5.0, 10, 10)] * 20])
def test_what_comes_at_once_has_no_speed(load: list[Arrival]) -> None:
    with pytest.raises(InvalidRequest, match="no speed"):
        demand(setting(load))


def test_requests_that_count_as_served() -> None:
    """Ten requests, one a second, of which the first two warm up."""
    table = {
        "arrived": np.arange(10.0),
        "ttft": np.array([9.0, 9.0, 1.0, 1.0, 3.0, nan, 1.0, 1.0, 1.0, 1.0]),
        "tpot": np.array([0.9, 0.9, 0.02, 0.08, 0.08, nan, nan, 0.02, 0.02, 0.02]),
        "finished": np.array([1.0, 1, 1, 1, 1, 0, 1, 1, 1, 1]),
        "prompt": np.full(10, 100.0),
        "cached": np.full(10, 25.0),
    }
    got = judged(table, Objectives(2.0, 0.05), {"decode": 0.5, "network": 0.1})
    assert got.rate == pytest.approx(1.0)
    assert (got.late, got.slow) == (pytest.approx(2 / 8), pytest.approx(1 / 8))
    assert got.goodput == got.attained == pytest.approx(5 / 8)
    assert (got.hits, got.busy) == (0.25, {"decode": 0.5})
    assert got.ttft[0] == 1.0


def test_a_trial_is_the_same_every_time() -> None:
    load = [request(i / 4, 1_000, 20, blocks=(2 * i, 2 * i + 1)) for i in range(20)]
    trial = Trial(Layout(1, 1), 3)
    once = serve(setting(load), trial)
    assert once == serve(setting(load), trial)
    assert once.rate == pytest.approx(4 * trial.speed)
    assert once.attained == 1.0
    assert 0 < once.busy["prefill"] < 1
