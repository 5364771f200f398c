"""The benchmark of placement runs, and places everything that there is room for."""

from __future__ import annotations

from bench.router.placement import measure


def test_decisions_are_timed() -> None:
    for workers in (2, 24):
        taken = measure(workers, 20)
        assert len(taken) == 18
        assert min(taken) > 0
