"""The benchmark of the dashboard: a turn with the page open is compared with the closed ones beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from bench import dashboard
from bench.dashboard import Turn


def turn(seconds: float) -> Turn:
    return Turn(seconds, seconds / 2, seconds / 10, seconds, 0.0)


def test_a_machine_that_slows_down_does_not_change_what_the_page_costs() -> None:
    opened = False
    speed = 1.0

    @contextlib.contextmanager
    def opening() -> Iterator[None]:
        nonlocal opened
        opened = True
        yield
        opened = False

    def side() -> Turn:
        nonlocal speed
        speed *= 1.2
        return turn(speed * (1.1 if opened else 1.0))

    paired = dashboard.alternate(side, {"page": opening}, rounds=5)
    assert len(paired["page"]) == 5  # the first round warms up
    told = {result.case: result for result in dashboard.results(paired)}
    assert told["page: a request p50"].ratio == pytest.approx(1.1, rel=0.02)
    assert told["page: a request p50"].ok is False
    assert told["page: router's CPU"].ratio == pytest.approx(1.1, rel=0.02)


def test_the_router_that_a_snapshot_is_made_of_has_served_every_request() -> None:
    shown = dashboard.busy_monitor().snapshot(2.0, 0, None)
    assert shown.totals.finished == 1_000
    assert len(shown.processes) == 64
    assert {tag for row in shown.requests for tag in row.tags} == {"newest", "slowest"}
