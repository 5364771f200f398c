"""The soak's short version: the same code for some seconds, with a fixed seed."""

from __future__ import annotations

from pathlib import Path

from tests.soak import soak


def test_twenty_seconds_of_deaths_and_stops(tmp_path: Path) -> None:
    result = soak(20.0, seed=11, folder=tmp_path)
    assert result["requests"]
    assert result["faults"]
