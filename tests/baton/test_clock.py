"""Clocks and pauses."""

import pytest

from baton.clock import PauseDetector
from baton.monotonic_clock import MonotonicClock
from baton.timeline import Timeline
from tests.support.virtual_clock import VirtualClock


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.advance(2.5) == clock.now() == 7.5
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)


def test_the_real_clock_never_runs_back() -> None:
    clock = MonotonicClock()
    assert clock.now() <= clock.now()


def test_a_pause_is_told_once_and_in_full() -> None:
    pauses = PauseDetector(tolerance=1.0)
    assert [pauses.tick(now) for now in (0.0, 0.5, 10.5, 11.0)] == [0.0, 0.0, 10.0, 0.0]


def test_a_loop_that_is_always_late_still_sees_time_pass() -> None:
    pauses = PauseDetector(tolerance=1.0)
    assert sum(pauses.tick(2.0 * turn) for turn in range(12)) == 12.0  # of 22 seconds


def test_latencies_are_differences_of_instants() -> None:
    timeline = Timeline(received=1.0, first_token=1.5, ended=2.5)
    assert timeline.ttft == 0.5
    assert timeline.tpot(5) == 0.25
    assert timeline.tpot(1) is None
    assert timeline.between("placed", "ended") is None
