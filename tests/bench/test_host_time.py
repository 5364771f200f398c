"""The benchmark of the host's work runs, and its rows decode."""

from __future__ import annotations

import json

import pytest

from bench.host_time import main


def test_every_part_has_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--cases", "3x40"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = {line["case"].removeprefix("3 x 40: "): line["value"] for line in lines}
    assert set(cases) == {
        "tick", "prepare", "schedule", "batch", "draw", "done", "messages", "heartbeat", "sum",
    }  # fmt: skip
    assert cases["sum"] > cases["batch"] > 0


@pytest.mark.parametrize("cases", ["3", "3x", "axb", "3x4x5"])
def test_a_wrong_case_is_refused(cases: str) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", cases])
