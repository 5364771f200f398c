"""The benchmark of the prefix map, in small: that it runs and says what it is to say."""

from __future__ import annotations

import json

import pytest

from bench import prefix_map


def test_it_prints_every_figure_with_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pages", "3000", "--holders", "4", "--events", "1024", "--runs", "2"]
    assert prefix_map.main(sizes) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    figures = {result["case"].removeprefix("3000 pages, 4 holders: "): result for result in told}
    assert {result["bench"] for result in told} == {"prefix_map"}
    targets = {name: result["target"] for name, result in figures.items() if "target" in result}
    assert targets == {
        "restore from snapshots": 5,
        "match of 128k tokens": 0.002,
        "events in batches, stored": 300_000,
        "events in batches, stored where another has them": 300_000,
        "events in batches, removed where another has them": 300_000,
        "events in batches, removed": 300_000,
        "removal of a holder": 1,
        "memory a page (tracemalloc)": 300,
    }
    assert len([name for name in figures if name.startswith("single-page events")]) == 4
    assert all(len(result["runs"]) == 2 for name, result in figures.items() if "events" in name)


def test_sizes_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefix_map.parse(["--holders", "1"])
    assert "two holders" in capsys.readouterr().err
