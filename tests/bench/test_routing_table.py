"""The table of policies: what is there is not run again, and what it says follows from the results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.routing_table import CLUSTERS, Cell, Result, append, cells, main, missing, read, render
from router.policies import POLICIES
from simulator.mooncake import TraceLine


def _result(policy: str, goodput: tuple[float, ...], speed: float = 1.0, cluster: str = "8P+8D") -> Result:
    return Result(
        cell=Cell("talk", speed, cluster, policy),
        commit="abc",
        requests=100,
        finished=99,
        seconds=1_872.0,
        goodput=goodput,
        ttft=(1.0, 2.0, 3.0),
        tpot=(0.02, 0.03, 0.04),
        hit_rate=0.375,
        busy={"prefill": 0.9, "decode": 0.2},
        wall=60.0,
    )


def test_cells_that_are_there_are_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    assert read(path) == []
    one, two = _result("baton", (3.0, 3.0, 3.0)), _result("llm_d", (2.0, 2.0, 2.0))
    append(path, one)
    append(path, two)
    assert read(path) == [one, two]
    other = Cell("talk", 2.0, "8P+8D", "baton")
    assert missing([one.cell, other, two.cell], read(path)) == [other]


def test_a_line_cut_short_costs_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    one, two = _result("baton", (3.0, 3.0, 3.0)), _result("llm_d", (2.0, 2.0, 2.0))
    append(path, one)
    path.write_bytes(path.read_bytes() + b'\n{"cell":{"trace":"ta')
    append(path, two)
    assert read(path) == [one, two]


def test_best_and_near_best_are_marked() -> None:
    results = [
        _result("random", (1.0, 2.0, 2.5)),
        _result("baton", (2.95, 3.0, 3.0)),
        _result("llm_d", (3.0, 2.0, 2.92)),
    ]
    lines = list(render(results))
    assert lines[0] == "Baton is best or within 3% of it in 3 of 3 comparisons;"
    assert lines[1] == "at its worst it has 98.3% of the best (talk, a800_70b, 8P+8D, 1×, 100 ms). Commits: abc."
    assert lines[2] == "The 3 cells took 3 minutes of a core, 60 to 60 s each."
    beside = "| talk, a800_70b, 8P+8D, 1× | llm_d, 3.00/s | 98.3% / 150.0% / 102.7% |"
    assert f"{beside} 1.00 / 2.00 / 3.00 | 1.00 / 2.00 / 3.00 |" in lines
    assert "**talk, a800_70b, 8P+8D, 1×**: 100 requests in 1,872 s" in lines
    assert lines[-3:] == [
        "| baton | 2.950 ~ | **3.000** | **3.000** | 1.00 / 2.00 / 3.00 | 20 / 30 / 40 | 37.5% |",
        "| llm_d | **3.000** | 2.000 | 2.920 ~ | 1.00 / 2.00 / 3.00 | 20 / 30 / 40 | 37.5% |",
        "| random | 1.000 | 2.000 | 2.500 | 1.00 / 2.00 / 3.00 | 20 / 30 / 40 | 37.5% |",
    ]


def test_what_baton_loses_is_counted() -> None:
    results = [
        _result("baton", (0.9, 1.0, 1.0)),
        _result("llm_d", (1.0, 1.0, 1.0)),
        _result("baton", (0.8, 0.0, 0.0), cluster="16D"),
        _result("llm_d", (1.0, 0.0, 0.0), cluster="16D"),
        _result("llm_d", (1.0, 1.0, 1.0), speed=2.0),
    ]
    verdict = " ".join(list(render(results))[:2])
    assert "in 4 of 6" in verdict
    assert "80.0% of the best (talk, a800_70b, 16D, 1×, 100 ms)" in verdict


def test_the_table_has_every_cell_once() -> None:
    whole = cells(["talk", "code"], POLICIES, quick=False)
    assert len(whole) == len(set(whole)) == 2 * 4 * 2 * len(POLICIES)
    assert len(cells(["talk", "code"], POLICIES, quick=True)) == 6


def test_a_small_table_from_trace_to_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three requests, of which the second begins like the first; once more, and nothing is run."""
    lines = [
        TraceLine(0, 2_000, 3, (1, 2, 3, 4)),
        TraceLine(9_000, 1_500, 3, (1, 2, 5)),
        TraceLine(9_500, 600, 3, (6, 7)),
    ]
    talk, into = tmp_path / "talk.jsonl", tmp_path / "cells.jsonl"
    talk.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    asked = [str(talk), "--quick", "--into", str(into), "--jobs", "1"]
    assert main(asked) == 0
    results = read(into)
    assert {result.cell.cluster for result in results} == set(CLUSTERS)
    for result in results:
        assert (result.requests, result.finished) == (3, 3), result
        assert result.seconds == pytest.approx(4.75), "9.5 s at twice the speed"
        assert result.goodput == pytest.approx((3 / 4.75,) * 3)
        if result.cell.policy == "baton":
            assert result.hit_rate == pytest.approx(1_024 / 4_100)
    table = capsys.readouterr().out
    assert main(asked) == 0
    assert capsys.readouterr().out == table
    assert read(into) == results
