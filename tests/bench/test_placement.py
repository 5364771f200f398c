"""The benchmark of placement runs, and places everything that there is room for."""

from bench.router.placement import measure


def test_decisions_are_timed() -> None:
    for workers in (2, 24):
        seconds = measure(workers, 20)
        assert len(seconds) == 18
        assert min(seconds) > 0
