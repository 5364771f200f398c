"""What a case costs at least, worked out by hand for a small model; and what is told of runs beside it."""

import math

import pytest

from bench import models
from bench.engine import roofline, speed
from bench.engine.roofline import Limits, Shape
from bench.engine.turns import Run, Turn, quiet
from bench.peers.cases import BY_NAME, Case
from engine.models.config import parse_spec
from engine.models.weights import expected_tensors

SMALL = Shape(layers=1_000, head=500, attention=8, kv_bytes=32, width=2)


def test_the_shape_is_that_of_the_checkpoint() -> None:
    shape = Shape.of(models.LLAMA_100M, width=2)
    tensors = expected_tensors(parse_spec(models.LLAMA_100M))
    assert shape.layers + shape.head == sum(math.prod(size) for size in tensors.values() if len(size) == 2)
    assert shape.kv_bytes == 12 * 2 * 4 * 64 * 2
    assert shape.attention == 12 * 4 * 12 * 64


def test_a_step_is_bound_by_what_takes_longer() -> None:
    reading = Limits(read=1e3, compute=1e12)
    assert roofline.decode_step(2, 10, SMALL, reading) == pytest.approx((1_500 * 2 + 2 * 10 * 32) / 1e3)
    computing = Limits(read=1e12, compute=1e3)
    assert roofline.decode_step(2, 10, SMALL, computing) == pytest.approx(2 * (2 * 1_500 + 8 * 10) / 1e3)


def test_prefill_needs_the_head_for_the_last_token_only() -> None:
    case = Case("prefill", sequences=3, prompt=4, output=1)
    computing = Limits(read=1e12, compute=1e3)
    operations = 3 * (2 * 1_000 * 4 + 2 * 500 + 8 * (1 + 2 + 3 + 4))
    assert roofline.seconds(case, SMALL, computing) == pytest.approx(operations / 1e3)
    assert roofline.rate(case, SMALL, computing) == pytest.approx(12 / (operations / 1e3))


def test_prefill_counts_as_time_of_a_decode_case() -> None:
    reading = Limits(read=1e3, compute=1e12)
    case = Case("decode", sequences=1, prompt=4, output=3)
    steps = [3_000, 3_000 + 5 * 32, 3_000 + 6 * 32]  # the first token comes from the prompt's step
    assert roofline.seconds(case, SMALL, reading) == pytest.approx(sum(steps) / 1e3)
    assert roofline.rate(case, SMALL, reading) == pytest.approx(3 / (sum(steps) / 1e3))


def test_a_ratio_is_the_median_of_each_run_with_its_own_limits() -> None:
    case = BY_NAME["decode-1"]
    limits = [Limits(80e9, 1e12), Limits(40e9, 1e12), Limits(80e9, 1e12)]
    shape = Shape.of(models.LLAMA_100M, 2)
    shares = [0.9, 0.8, 0.5]
    runs = [
        Run(roofline.seconds(case, shape, limit) / share, limit, 0.0)
        for limit, share in zip(limits, shares, strict=True)
    ]
    turns = [Turn({speed.OWN: run}, {}) for run in runs]
    results = {result.case: result for result in speed.results({case: turns}, shape)}
    assert results["decode-1, baton"].ratio == pytest.approx(0.8)
    assert results["decode-1, baton"].ok
    assert results["limit: memory read"].value == 80e9
    assert results["limit: large product"].value == 1e12


def test_turns_that_others_disturbed_do_not_count_unless_most_were() -> None:
    def turns(*others: float) -> list[Turn]:
        return [Turn({"a": Run(1.0, Limits(1, 1), one)}, {}) for one in others]

    assert [turn.others for turn in quiet(turns(0.9, 0.0, 0.05, 0.8))] == [0.0, 0.05]
    assert [turn.others for turn in quiet(turns(0.9, 0.5, 0.6, 0.8))] == [0.5, 0.6]
