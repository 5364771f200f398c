"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE = 60.0  # seconds: ten times what the slowest condition takes on a slow machine


def eventually(condition: Callable[[], object], seconds: float = DEADLINE, what: str = "the condition") -> float:
    """Wait until it holds; returns how long that took, seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what} did not come true within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - start
