"""Figures computed from outcomes that are known by heart."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.cluster import overhead
from bench.cluster.overhead import Round, Turn
from bench.report import Result, judged, median_of
from deploy.load.figures import Objectives, Outcome, errors, figures, percentile
from deploy.load.workload import Lengths, Planned, Workload


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
    assert one.gaps == pytest.approx([0.1, 0.5])  # two tokens came in one message
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
    values = by_name([outcome(0.0, 0.5, 1.0, cached=5), outcome(1.0, 1.5, 4.0), outcome(2.0, failed="overloaded")])
    assert values["requests"] == pytest.approx(2 / 4)
    assert values["output tokens"] == pytest.approx(4 / 4)
    assert values["cached prompt tokens"] == pytest.approx(5 / 20)
    assert values["errors"] == 1
    assert values["ttft p50"] == pytest.approx(500)


def test_figures_are_shown_with_units_that_a_person_reads() -> None:
    shown = {
        figure.name: str(figure)
        for figure in figures([outcome(0.0, 0.5, 1.0, cached=5), outcome(1.0, 1.5, 2.0)], Objectives(ttft=1.0))
    }
    assert shown["requests"] == shown["goodput"] == "1 requests/s"
    assert shown["output tokens"] == "2 tokens/s"
    assert shown["cached prompt tokens"] == "25.0%"
    assert shown["errors"] == "0"
    assert shown["ttft p50"] == "500 ms"


def test_what_can_not_be_computed_is_left_out() -> None:
    assert by_name([]) == {"errors": 0}
    values = by_name([outcome(0.0, failed="unavailable"), outcome(0.0, failed="unavailable")])
    assert not any(name.startswith(("ttft", "itl", "tpot", "e2e", "cached")) for name in values)
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
    """Bare steps grow from 10 to 80 ms while the cluster always takes a fifth more than bare does at that moment."""
    bare = [turn(seconds) for seconds in (0.010, 0.020, 0.040, 0.080)]
    between = [turn(1.2 * (a.median + b.median) / 2) for a, b in pairwise(bare)]
    rounds = [Round(a, {"1P+1D": t, "1D": t}, b) for (a, b), t in zip(pairwise(bare), between, strict=True)]
    results = {result.case: result for result in overhead.results(rounds, threads=1)}
    median = results["1P+1D ITL p50, threads=1"]
    assert median.ratio == pytest.approx(1.2)
    assert median.ok is False


def test_only_the_quietest_rounds_count() -> None:
    def one(seconds: float, others: float) -> Round:
        return Round(turn(0.010), {"1P+1D": turn(seconds, others), "1D": turn(0.010)}, turn(0.010))

    rounds = [one(0.030, 1.5), one(0.011, 0.1), one(0.030, 0.9), one(0.010, 0.2), one(0.030, 2.0), one(0.030, 0.5)]
    assert [one.others for one in overhead.quietest(rounds)] == [0.1, 0.2]
    results = {result.case: result for result in overhead.results(rounds, threads=1)}
    median = results["1P+1D ITL p50, threads=1"]
    assert (median.value, median.limit, median.ok) == (pytest.approx(10.5), pytest.approx(10.0), True)


def test_the_mean_gap_is_the_step_and_the_rest_of_the_turn() -> None:
    gaps = Turn.of([0.010, 0.010, 0.040], cpu=0.012, step=0.018)
    assert (gaps.median, gaps.mean) == (0.010, pytest.approx(0.020))
    results = {r.case: r for r in overhead.results([Round(turn(0.015), {"1P+1D": gaps, "1D": gaps}, turn(0.015))], 1)}
    assert results["1P+1D engine step, mean, threads=1"].ratio == pytest.approx(18 / 15)
    assert results["1P+1D CPU of the loop for a token, threads=1"].ratio == pytest.approx(12 / 15)
    assert results["1P+1D ITL outside the step, mean, threads=1"].value == pytest.approx(2.0)


def test_sides_take_turns_and_the_bare_engine_frames_them() -> None:
    turns: list[str] = []
    prompts: set[tuple[int, ...]] = set()

    def side(name: str) -> overhead.Side:
        def generate(request: Planned) -> Turn:
            turns.append(name)
            prompts.add(request.prompt)
            return turn(0.010)

        return generate

    workload = Workload(Lengths.parse("8"), Lengths.parse("4"), vocab=100)
    rounds = overhead.alternate(side("bare"), {"1P+1D": side("1P+1D")}, workload, count=2)
    assert turns == ["bare", *["1P+1D", "bare"] * 3]  # the first round warms up
    assert len(rounds) == 2
    assert len(prompts) == len(turns)  # nothing is found in a cache


def turn(seconds: float, others: float = 0.0) -> Turn:
    """A turn whose gaps are all of that length."""
    return replace(Turn.of([seconds] * 3, cpu=seconds), others=others)
