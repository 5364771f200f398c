"""Load or recompute, case by case."""

import pytest

from baton.messages import TierSpeed
from baton.store_protocol import TierPages
from kvstore import load_or_recompute as costs

PAGE_BYTES, PAGE_SIZE, RATE = 1_000_000, 16, 1_600.0  # a page is computed in 10 ms
QUICK = TierSpeed("disk", 0.001, 1e9, measured=True)  # a page in 1 ms
SLOW = TierSpeed("remote", 0.005, 5e7, measured=True)  # in 20 ms
EVEN = TierSpeed("remote", 0.0, 1e8, measured=True)  # in 10 ms
LATE = TierSpeed("remote", 0.0451, 1e9, measured=True)


@pytest.mark.parametrize(
    ("runs", "on_device", "pages"),
    [
        ([], 0, 0),
        ([TierPages(QUICK, 10)], 0, 10),
        ([TierPages(SLOW, 10)], 0, 0),
        ([TierPages(QUICK, 10), TierPages(SLOW, 5)], 0, 10),
        ([TierPages(SLOW, 2), TierPages(QUICK, 10)], 0, 12),  # the second run pays for the first
        ([TierPages(SLOW, 10), TierPages(QUICK, 2)], 0, 0),
        ([TierPages(EVEN, 5)], 0, 0),
        ([TierPages(LATE, 5)], 0, 0),
        ([TierPages(LATE, 6)], 0, 6),
        ([TierPages(QUICK, 10)], 9, 0),  # one page is not worth bringing ten
        ([TierPages(QUICK, 10)], 20, 0),
    ],
)
@pytest.mark.technique("Load or recompute, whichever is sooner")
def test_loads_stop_where_computing_is_as_quick(runs: list[TierPages], on_device: int, pages: int) -> None:
    choice = costs.choose_load_length(runs, PAGE_BYTES, PAGE_SIZE, RATE, on_device)
    assert choice.pages == pages
    if not pages:
        assert (choice.load_seconds, choice.compute_seconds) == (0.0, 0.0)
    else:
        assert choice.load_seconds < choice.compute_seconds


def test_before_anything_is_measured_the_defaults_count() -> None:
    run = TierPages(costs.DEFAULT_SPEEDS["disk"], 10)
    choice = costs.choose_load_length([run], PAGE_BYTES, PAGE_SIZE, 0.0)
    assert choice.load_seconds == costs.load_seconds(run, PAGE_BYTES) == pytest.approx(0.012)
    assert choice.compute_seconds == pytest.approx(10 * PAGE_SIZE / costs.DEFAULT_PREFILL_RATE)


def test_measurements_replace_the_defaults_and_are_then_averaged() -> None:
    meter = costs.SpeedMeter("remote")
    assert not meter.speed.measured
    meter.loaded(0.1, 1.1, 10, 100)
    assert meter.speed == TierSpeed("remote", 0.1, 1_000.0, measured=True)
    meter.loaded(0.2, 1.2, 20, 100)
    assert meter.speed.latency == pytest.approx(0.12)
    assert meter.speed.bytes_per_second == pytest.approx(1_200)


def test_pages_that_come_all_at_once_are_measured_alike() -> None:
    meter = costs.SpeedMeter("disk")
    meter.loaded(1.0, 1.0, 10, 100)
    assert meter.speed == TierSpeed("disk", 1.0, 10_000.0, measured=True)


def test_a_load_that_takes_no_time_at_all_is_measured_too() -> None:
    meter = costs.SpeedMeter("disk")
    meter.loaded(0.0, 0.0, 10, 100)
    assert meter.speed.latency > 0
    assert meter.speed.bytes_per_second > 0


@pytest.mark.parametrize(
    ("pages", "seconds", "regret"), [(10, 0.02, 0.0), (10, 0.3, 0.2), (5, 0.3, 0.25), (0, 0.3, 0.3)]
)
def test_regret_is_the_time_that_computing_would_have_saved(pages: int, seconds: float, regret: float) -> None:
    runs = [TierPages(QUICK, 10)]
    loading = costs.LoadInProgress(costs.choose_load_length(runs, PAGE_BYTES, PAGE_SIZE, RATE), runs, began=5.0)
    loading.end(pages, 5.0 + seconds)
    assert loading.regret == pytest.approx(regret)
    assert loading.predicted == pytest.approx(0.011)


def test_a_load_is_of_the_tier_that_it_came_from() -> None:
    runs = [TierPages(QUICK, 10), TierPages(SLOW, 50)]
    assert costs.LoadInProgress(costs.choose_load_length(runs, PAGE_BYTES, PAGE_SIZE, RATE), runs, 0.0).tier == "disk"


@pytest.mark.parametrize(
    ("runs", "page_size", "on_device", "pages"),
    [
        ([SLOW], 16, 0, 32),  # 512 tokens
        ([SLOW], 1_024, 0, 1),
        ([SLOW], 16, 1, 0),  # what is on the device need not be loaded to be there
        ([QUICK, SLOW], 16, 0, 40 + 32),
    ],
)
def test_a_little_of_a_tier_that_was_never_measured_is_loaded_whatever_it_is_said_to_take(
    runs: list[TierSpeed], page_size: int, on_device: int, pages: int
) -> None:
    runs = [*runs[:-1], TierSpeed(runs[-1].tier, runs[-1].latency, runs[-1].bytes_per_second)]
    choice = costs.choose_load_length(
        [TierPages(speed, 40) for speed in runs], PAGE_BYTES, page_size, RATE * page_size / 16, on_device
    )
    assert choice.pages == pages
