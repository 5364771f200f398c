"""Figures computed from outcomes that are known by heart."""

from __future__ import annotations

import json

import pytest

from bench import overhead
from bench.figures import Objectives, Outcome, errors, figures, percentile
from bench.report import Result, judged, median_of
from bench.workload import Lengths, Workload


def outcome(sent: float = 0.0, *tokens: float, failed: str = "", cached: int = 0) -> Outcome:
    """A request of 10 prompt tokens that ends with its last token."""
    return Outcome(sent, sent, tokens[-1] if tokens else sent, tokens, failed, 10, cached)


def by_name(outcomes: list[Outcome], objectives: Objectives | None = None) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures(outcomes, objectives or Objectives())}


def test_percentiles_lie_between_values() -> None:
    values = [float(n) for n in range(101)]
    assert [percentile(values, q) for q in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([3.0], 99) == 3.0


def test_latencies_are_as_defined() -> None:
    one = outcome(1.0, 1.5, 1.6, 1.6, 2.1)
    assert one.ttft == 0.5
    assert one.gaps == pytest.approx([0.1, 0.0, 0.5])  # two tokens came in one message
    assert one.tpot == pytest.approx(0.2)
    assert one.e2e == pytest.approx(1.1)


def test_a_request_of_one_token_has_no_tpot() -> None:
    assert outcome(0.0, 1.0).tpot is None
    assert outcome(0.0).ttft is None


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    quick, slow_start = outcome(0.0, 0.1, 0.2), outcome(0.0, 0.9, 1.0)
    slow_tokens, failed = outcome(0.0, 0.1, 2.0), outcome(0.0, 0.1, 0.2, failed="overloaded")
    single = outcome(0.0, 0.1)
    everybody = [quick, slow_start, slow_tokens, failed, single]
    assert [Objectives(0.5, 0.5).met(one) for one in everybody] == [True, False, False, False, True]
    assert [Objectives(ttft=0.5).met(one) for one in everybody] == [True, False, True, False, True]
    assert by_name(everybody, Objectives(0.5, 0.5))["goodput"] == pytest.approx(2 / 2.0)  # in two seconds
    assert "goodput" not in by_name(everybody)


def test_rates_and_shares() -> None:
    told = by_name([outcome(0.0, 0.5, 1.0, cached=5), outcome(1.0, 1.5, 4.0), outcome(2.0, failed="overloaded")])
    assert told["requests"] == pytest.approx(2 / 4)
    assert told["output tokens"] == pytest.approx(4 / 4)
    assert told["cached prompt tokens"] == pytest.approx(5 / 20)
    assert told["errors"] == 1
    assert told["ttft p50"] == pytest.approx(500)


def test_what_can_not_be_computed_is_left_out() -> None:
    assert by_name([]) == {"errors": 0}
    told = by_name([outcome(0.0, failed="unavailable"), outcome(0.0, failed="unavailable")])
    assert not any(name.startswith(("ttft", "itl", "tpot", "e2e", "cached")) for name in told)
    assert errors([outcome(0.0, failed="unavailable"), outcome(0.0, 1.0)]) == {"unavailable": 1}


def test_a_result_is_one_line_without_what_does_not_apply() -> None:
    result = median_of("serve", "a case", "ms", [3.0, 1.0, 2.000_001])
    assert json.loads(result.line()) == {
        "bench": "serve", "case": "a case", "value": 2.0, "unit": "ms", "runs": [3.0, 1.0, 2.0],
    }  # fmt: skip
    assert "runs" not in json.loads(median_of("serve", "a case", "ms", [3.0]).line())


def test_a_target_is_met_on_its_better_side() -> None:
    result = Result("b", "c", 11.0, "ms", limit=10.0, ratio=1.1)
    assert judged(result, 1.15, better="low").ok is True
    assert judged(result, 0.9, better="high").ok is True
    assert judged(result, 1.05, better="low").ok is False


def test_a_machine_that_slows_down_does_not_change_the_overhead() -> None:
    """Bare steps grow from 10 to 40 ms while the cluster always takes a tenth more than bare does at that moment."""
    bare, through = [10.0, 20.0, 30.0, 40.0], [16.5, 27.5, 38.5]
    assert overhead.ratios(through, bare) == pytest.approx([1.1, 1.1, 1.1])


def test_sides_take_turns_and_the_bare_engine_frames_them() -> None:
    turns: list[str] = []

    def side(name: str, gap: float) -> overhead.Gaps:
        def gaps(request: object) -> list[float]:
            turns.append(name)
            return [gap, gap, 3 * gap]

        return gaps

    workload = Workload(Lengths.parse("8"), Lengths.parse("4"), vocab=100)
    rounds = overhead.alternate({"bare": side("bare", 0.010), "1P+1D": side("1P+1D", 0.012)}, workload, count=2)
    assert turns == ["bare", "1P+1D", "bare", "1P+1D", "bare"]
    told = {result.case: result for result in overhead.results(rounds, threads=1)}
    judged_median = told["1P+1D ITL p50, threads=1"]
    assert (judged_median.value, judged_median.limit, judged_median.ok) == (12.0, 10.0, False)
    assert judged_median.ratio == pytest.approx(1.2)
    inside, outside = overhead.parts(rounds, step=0.018, threads=1)  # of a mean gap of 20 ms
    assert inside.ratio == pytest.approx(18 / (50 / 3))
    assert outside.value == pytest.approx(2.0)
