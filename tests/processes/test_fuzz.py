"""The fuzzer's short version: every target for a while, in one cluster, with a fixed seed."""

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS
from tests.support import checkpoints
from tests.support.thorough import cases

SECONDS = 60.0

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", cases([11, 12], [11]), ids=str)
def test_no_socket_has_a_failure_a_hang_or_a_leak(tmp_path: Path, seed: int) -> None:
    path = checkpoints.make("llama", tmp_path / "model")
    result = fuzz(SECONDS, seed, tmp_path / "cluster", path)
    assert result["honest_requests"]
    counts = result["cases"]
    assert isinstance(counts, dict)
    assert counts.keys() == TARGETS.keys()
    assert all(counts.values()), counts
