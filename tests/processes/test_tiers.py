"""A disk below the arena, with real processes: what it saves survives any death, and its failures cost no request."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.store_deaths import store_deaths


def test_a_store_killed_three_times_under_load(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    result = store_deaths(3, seed, tmp_path, checkpoint("llama"))
    print(result)
    assert result["pages_from_disk"], "the disk was never read from while the store lived"
