"""Load or recompute: which cached pages are worth bringing in from a lower tier. One pure function.

The router predicts with it, the worker decides with it, from the same figures: how fast the tier has brought pages
lately, and how fast the worker computes prompts. It is about *cached* prefixes only; a hand-off is always delivered.

A prefix is loaded up to some page and computed from there on, so the choice is where to stop. Both costs are linear in
pages, so only the ends of runs need be compared:

    time(stop at run i) = Σ over runs before i of (latency + pages · bytes / rate)  +  tokens left / prefill rate

A tier that was never used is only supposed to be so fast. Where that is too slow, a little of it is loaded all the
same: or its speed would never be known, and what it has would be computed for ever.
"""

# pyright: strict

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.messages import LowerTier, TierSpeed
from baton.store_protocol import TierPages

DEFAULT_SPEEDS: Mapping[LowerTier, TierSpeed] = {
    "disk": TierSpeed("disk", latency=0.002, bytes_per_second=1e9),
    "remote": TierSpeed("remote", latency=0.005, bytes_per_second=1e9),
}
"""Used until a tier has been measured: a plain NVMe drive, a ten-gigabit link."""

DEFAULT_PREFILL_RATE = 2_000.0
"""Tokens per second, until a worker has computed a prompt."""

_TRIAL = 512  # tokens of a tier that has not been measured: so many pages, or one, take a few milliseconds to compute

_WEIGHT = 0.2  # of the newest measurement


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Load the first `pages` of what lower tiers have. Predicted seconds of doing so, and of computing those pages
    instead; both 0 where nothing is loaded."""

    pages: int
    load_seconds: float
    compute_seconds: float


def choose_load_length(
    runs: Sequence[TierPages], page_bytes: int, page_size: int, prefill_rate: float, on_device: int = 0
) -> LoadChoice:
    """Return how far to load. `runs` lie one after the other in the chain, `page_size` is in tokens, `prefill_rate`
    in tokens per second (0: not measured). The first `on_device` pages need not be computed, whatever is loaded.
    Ties go to computing, which depends on no other process. Of a tier that has not been measured, a few pages are
    chosen in any case."""
    seconds_per_page = page_size / (prefill_rate or DEFAULT_PREFILL_RATE)
    best, chosen = LoadChoice(0, 0.0, 0.0), 0
    pages, load = 0, 0.0
    for count, run in enumerate(runs, 1):
        pages += run.pages
        load += load_seconds(run, page_bytes)
        compute = max(0, pages - on_device) * seconds_per_page
        if load - compute < best.load_seconds - best.compute_seconds:
            best, chosen = LoadChoice(pages, load, compute), count
    if chosen < len(runs) and not runs[chosen].speed.measured and best.pages >= on_device:
        few = TierPages(runs[chosen].speed, min(runs[chosen].pages, max(1, _TRIAL // page_size)))
        compute = best.compute_seconds + few.pages * seconds_per_page
        return LoadChoice(best.pages + few.pages, best.load_seconds + load_seconds(few, page_bytes), compute)
    return best


def load_seconds(run: TierPages, page_bytes: int) -> float:
    """Seconds until the last page of a run is here."""
    return run.speed.latency + run.pages * page_bytes / run.speed.bytes_per_second


class SpeedMeter:
    """Measures one tier: an exponential average over loads, starting from the defaults."""

    def __init__(self, tier: LowerTier) -> None:
        self.speed = DEFAULT_SPEEDS[tier]

    def loaded(self, first_seconds: float, seconds: float, pages: int, page_bytes: int) -> None:
        """A load brought `pages` in `seconds`, of which `first_seconds` passed before the first one was here. The rate
        is that of what came after it; of pages that came all at once, of all alike."""
        old = self.speed
        latency = max(first_seconds, 1e-6)
        rate = pages * page_bytes / max(seconds - first_seconds, seconds / pages, 1e-6)
        if old.measured:
            latency = old.latency + _WEIGHT * (latency - old.latency)
            rate = old.bytes_per_second + _WEIGHT * (rate - old.bytes_per_second)
        self.speed = TierSpeed(old.tier, latency, rate, measured=True)

    def at_least(self, seconds: float, size: int) -> None:
        """`size` bytes came within `seconds`, for part of which they may have waited to be made: the tier is no slower
        than that, and nothing is said about how much faster."""
        old, rate = self.speed, size / seconds
        if rate > old.bytes_per_second:
            rate = old.bytes_per_second + _WEIGHT * (rate - old.bytes_per_second)
            self.speed = TierSpeed(old.tier, old.latency, rate, old.measured)


class LoadInProgress:
    """One load that was chosen, until it has ended: what it was to take, and what it took."""

    def __init__(self, choice: LoadChoice, runs: Sequence[TierPages], began: float) -> None:
        self._choice, self.predicted = choice, choice.load_seconds
        self._began = began
        self.tier: LowerTier = _most_of(runs, choice.pages)
        """Where most of it came from."""
        self.seconds = 0.0
        self.regret = 0.0
        """Seconds lost, where computing would have been quicker than the load was."""

    def end(self, pages: int, now: float) -> None:
        """`pages` of it came. Those that did not save nothing."""
        self.seconds = now - self._began
        saved = self._choice.compute_seconds * min(1.0, pages / self._choice.pages)
        self.regret = max(0.0, self.seconds - saved)


class LoadRegret:
    """Seconds lost to loads that took longer than computing would have, by tier."""

    def __init__(self) -> None:
        self.seconds: dict[LowerTier, float] = dict.fromkeys(DEFAULT_SPEEDS, 0.0)

    def load_ended(self, load: LoadInProgress, pages: int, now: float) -> None:
        """`pages` of this load came."""
        load.end(pages, now)
        self.seconds[load.tier] += load.regret


def _most_of(runs: Sequence[TierPages], pages: int) -> LowerTier:
    """The tier that most of the first `pages` of these runs are on."""
    on: dict[LowerTier, int] = {}
    for run in runs:
        part = min(run.pages, pages)
        on[run.speed.tier] = on.get(run.speed.tier, 0) + part
        pages -= part
    return max(on, key=lambda tier: on[tier])
