"""One sample for each of the last seconds: rates, queues and latencies, from which the page draws its charts."""

# pyright: strict

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct, convert

from router.dashboard.latency_sketch import LatencySketch
from router.events import Finished, RequestEnded
from router.views import RouterStats

CAPACITY = 300
"""Samples; a sample is of about a second."""


class Sample(Struct, frozen=True, array_like=True):
    """One second. Rates are per second, latencies milliseconds over the last five seconds (none: there was no such
    request). `COLUMNS` names the fields for the page."""

    sequence: int
    at_ms: int  # Unix time
    finished: float
    failed: float
    cancelled: float
    generated_tokens: float
    prompt_tokens: float  # of requests that finished
    cached_tokens: float  # of these
    queued: int
    running: int
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    pages_stored: float  # by prefill workers
    pages_fetched: float  # by decode workers
    pages_found: float  # by prefill workers, in a cache
    pages_on_device: float  # found there by decode workers


COLUMNS: Sequence[str] = Sample.__struct_fields__


class Samples:
    """The samples of the last minutes."""

    def __init__(self) -> None:
        self.newest = deque[Sample](maxlen=CAPACITY)
        self._ttft, self._itl = LatencySketch(), LatencySketch()
        self._before: tuple[float, tuple[int, ...]] | None = None  # time, totals
        self.sequence = 0  # of the last sample; 0 before the first

    def gap(self, seconds: float) -> None:
        """Two tokens came so far apart."""
        self._itl.add_duration(seconds)

    def request_ended(self, end: RequestEnded) -> None:
        if isinstance(end.outcome, Finished) and (ttft := end.summary.timeline.ttft) is not None:
            self._ttft.add_duration(ttft)

    def take_sample(self, stats: RouterStats, now: float, at_ms: int) -> None:
        """Add the sample of the second that ends now. `at_ms`: the same instant as Unix time."""
        self._ttft.turn()
        self._itl.turn()
        totals = _totals(stats)
        then, before = self._before or (now - 1, totals)
        elapsed = max(now - then, 1e-3)
        self._before = (now, totals)
        self.sequence += 1
        rates = [max(0.0, round((new - old) / elapsed, 2)) for new, old in zip(totals, before, strict=True)]
        latencies = [_ms(span) for sketch in (self._ttft, self._itl) for span in sketch.quantiles(0.5, 0.95, 0.99)]
        requests, pages = rates[:6], rates[6:]
        values = (self.sequence, at_ms, *requests, stats.queued, stats.running, *latencies, *pages)
        self.newest.append(convert(values, Sample))


def _totals(stats: RouterStats) -> tuple[int, ...]:
    """What only grows, in the order of the fields of `Sample`."""
    counts, pages = stats.counts, stats.counts.pages.values()
    return (
        sum(counts.finished.values()),
        sum(counts.failed.values()),
        counts.cancelled,
        counts.generated_tokens,
        counts.prompt_tokens,
        counts.cached_tokens,
        sum(each.stored for each in pages),
        sum(each.fetched for each in pages),
        sum(each.hits for each in pages),
        sum(each.on_device for each in pages),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1_000, 2)
