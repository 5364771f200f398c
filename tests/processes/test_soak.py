"""The soak's short version: the same code for some seconds, with a fixed seed."""

from pathlib import Path

import pytest

from tests.soak.deaths import expected_of, soak
from tests.soak.hostile_clients import hostile
from tests.soak.requests import requests
from tests.support import checkpoints
from tests.support.thorough import cases


def test_ten_seconds_of_deaths_and_stops(tmp_path: Path) -> None:
    path = checkpoints.make("llama", tmp_path / "model")
    result = soak(10.0, 11, tmp_path / "cluster", path, expected_of(path, 11, tmp_path / "reference"))
    assert result["requests"]
    assert result["faults"]


@pytest.mark.parametrize("prefill", cases([0, 1], [1]), ids=str)
def test_requests_of_mixed_length_leave_every_pool_empty(tmp_path: Path, prefill: int) -> None:
    path = checkpoints.make("llama", tmp_path / "model")
    result = requests(400, 11, tmp_path / "cluster", prefill, path)
    assert result["cancelled"]
    assert result["evictions"]


@pytest.mark.alone  # it compares gaps of streams with the machine's own standstills
def test_honest_streams_beside_hostile_clients_and_hung_processes(tmp_path: Path) -> None:
    path = checkpoints.make("llama", tmp_path / "model")
    result = hostile(12.0, 11, tmp_path / "cluster", path)
    assert result["requests"]
    assert result["hangs"]
