"""Search the best number of workers of each role with few simulations, and phrase the result.

Clusters are compared by their goodput at the breaking point, as in DistServe (OSDI'24). The load is sped up until fewer
requests than the attainment (90 % by default) meet both objectives. The goodput is the rate of requests that meet both,
at the highest speed that reached the attainment.

Speeds are rungs of a ladder, each 5 % above the one below. The breaking point of a cluster is bracketed from a
predicted rung, then bisected. One simulation tells whether another split beats the best one so far: at the first rung
where the best one fails. The search starts at the predicted split and moves to a neighbour as long as that is better.
Its steps begin at an eighth of the workers and end at one. It assumes that a higher speed never helps, and that goodput
over splits has one peak.
"""

# pyright: strict

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from simulator.cluster import Layout

RUNG = 1.05  # times the speed of the rung below
_STRIDES = (4, 8, 16, 32)  # rungs, while only one end of a bracket is known
_BUSY = 0.9  # of the time: a role above this share counts as saturated


@dataclass(frozen=True)
class Objectives:
    """Seconds to the first token, seconds for each later one, and the share of requests that must meet both."""

    ttft: float
    tpot: float
    attainment: float = 0.9


@dataclass(frozen=True)
class Trial:
    """A cluster, and the speed of the load."""

    layout: Layout
    rung: int

    @property
    def speed(self) -> float:
        """The multiple of the load's own speed."""
        return RUNG**self.rung


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial. TTFT and TPOT are median and 99th percentile of finished requests, in seconds."""

    rate: float  # arriving requests a second
    late: float  # share of them without a first token in time, rejected ones included
    slow: float  # share of them with the first token in time, but later tokens too far apart
    ttft: tuple[float, float] | None
    tpot: tuple[float, float] | None
    hits: float  # share of prompt tokens that came from caches
    busy: Mapping[str, float]  # by role: the share of the time that its workers spent in steps

    @property
    def attained(self) -> float:
        """The share of requests that met both objectives."""
        return 1 - self.late - self.slow

    @property
    def goodput(self) -> float:
        """Requests a second that met both objectives."""
        return self.rate * self.attained


Evaluate: TypeAlias = Callable[[Sequence[Trial]], Iterable[TrialResult]]
"""Simulates each of several trials, possibly in parallel."""


class Bracket:
    """The two rungs between which a cluster breaks."""

    def __init__(self, start: int) -> None:
        self.passed: int | None = None  # the highest rung that reached the attainment
        self.failed: int | None = None  # the lowest rung that did not
        self._start = start
        self._strides = iter(_STRIDES)
        self.next: int | None = start  # the rung to try; None: the search is over

    def note(self, rung: int, passed: bool) -> None:
        """Take the result of a rung and set the next one."""
        if passed:
            self.passed = rung
        else:
            self.failed = rung
        if self.passed is None or self.failed is None:
            stride = next(self._strides, 0)
            self.next = rung + (stride if passed else -stride) if stride else None
            if not passed and stride and self._start < rung:  # the first rung tried was not the predicted one
                self.next = min(self._start, rung - stride)
        elif self.failed - self.passed > 1:
            self.next = (self.passed + self.failed) // 2
        else:
            self.next = None


@dataclass(frozen=True)
class Break:
    """A cluster's breaking point: the fastest trial that reached the attainment, and the slowest that did not.

    Each is None if the search found none.
    """

    layout: Layout
    best: Trial | None
    served: TrialResult | None
    beyond: TrialResult | None

    @property
    def goodput(self) -> float:
        return self.served.goodput if self.served else 0.0


class Search:
    """Searches the best split of `workers` workers, and the breaking points of that split and of the colocated cluster.

    It simulates no trial twice. `served` holds all trials in order.
    """

    def __init__(
        self, workers: int, predict: Callable[[Layout], float], attainment: float, evaluate: Evaluate
    ) -> None:  # fmt: skip
        """Prepare the search. `predict` returns the multiple of the load's speed at which a cluster should break."""
        self._workers, self._predict = workers, predict
        self._attainment, self._evaluate = attainment, evaluate
        self._brackets: dict[Layout, Bracket] = {}
        self.served: dict[Trial, TrialResult] = {}

    def run(self) -> tuple[Break, list[Break]]:
        """Return the colocated cluster, and splits ordered from best to worst; no splits if there is only one
        worker."""
        colocated = Layout(0, self._workers)
        splits = [Layout(count, self._workers - count) for count in range(1, self._workers)]
        if not splits:
            self._settle([colocated])
            return self._break(colocated), []
        best = max(splits, key=self._predict)
        self._settle([colocated, best])
        step = max(1, self._workers // 8)
        while step:
            better = self._better(best, self._beside(best, step))
            if better is None:
                step //= 2
            else:
                best = better
        self._settle(self._beside(best, 1))
        tried = [self._break(layout) for layout in splits if layout in self._brackets]
        return self._break(colocated), sorted(tried, key=lambda each: each.goodput, reverse=True)

    def _beside(self, layout: Layout, step: int) -> list[Layout]:
        counts = (layout.prefill - step, layout.prefill + step)
        return [Layout(count, self._workers - count) for count in counts if 0 < count < self._workers]

    def _better(self, best: Layout, others: list[Layout]) -> Layout | None:
        """Return the best of the others that reach the attainment at the first rung where `best` fails, or None."""
        bracket = self._brackets[best]
        if bracket.failed is None:
            return None  # it did not fail at any rung of the search
        self._try([Trial(other, bracket.failed) for other in others if other not in self._brackets])
        winners = [other for other in others if self._passes(other, bracket.failed)]
        self._settle(winners)
        return max(winners, key=lambda layout: self._break(layout).goodput, default=None)

    def _passes(self, layout: Layout, rung: int) -> bool:
        passed = self._brackets[layout].passed
        return passed is not None and passed >= rung

    def _settle(self, layouts: Iterable[Layout]) -> None:
        """Find the breaking point of each of these."""
        brackets = {layout: self._bracket(layout) for layout in layouts}
        while trials := [Trial(each, it.next) for each, it in brackets.items() if it.next is not None]:
            self._try(trials)

    def _try(self, trials: Sequence[Trial]) -> None:
        for trial, served in zip(trials, self._evaluate(trials), strict=True):
            self.served[trial] = served
            self._bracket(trial.layout).note(trial.rung, served.attained >= self._attainment)

    def _bracket(self, layout: Layout) -> Bracket:
        if layout not in self._brackets:
            self._brackets[layout] = Bracket(math.floor(math.log(self._predict(layout), RUNG)))
        return self._brackets[layout]

    def _break(self, layout: Layout) -> Break:
        bracket = self._brackets[layout]
        best = None if bracket.passed is None else Trial(layout, bracket.passed)
        beyond = None if bracket.failed is None else self.served[Trial(layout, bracket.failed)]
        return Break(layout, best, self.served[best] if best else None, beyond)


# --- in words ---------------------------------------------------------------------------------------------------------


def name(layout: Layout) -> str:
    """Return a name such as `5P+3D` or `8 colocated`."""
    return f"{layout.prefill}P+{layout.decode}D" if layout.prefill else f"{layout.decode} colocated"


def breaks_by(layout: Layout, beyond: TrialResult | None) -> str:
    """Return the first bottleneck, judged by a trial that did not reach the attainment."""
    if beyond is None:
        return "nothing, at the speeds tried"
    if beyond.slow > beyond.late:
        return "tokens come too slowly" + (" from decode" if layout.prefill else "")
    if not layout.prefill:
        return "first tokens come too late"
    side = "prefill has no time left" if beyond.busy["prefill"] >= _BUSY else "decode takes no more"
    return f"first tokens come too late: {side}"


def pays(colocated: Break, split: Break) -> bool:
    """Whether the split is better by at least one rung; less is no difference."""
    return split.goodput >= colocated.goodput * RUNG and split.goodput > 0


def sentence(colocated: Break, splits: Sequence[Break], objectives: Objectives) -> str:
    """Return the advice in one sentence."""
    ours = name(colocated.layout)
    if not splits:
        return f"One worker can't be split: it serves {colocated.goodput:.2f} requests a second within both objectives."
    split = splits[0]
    if not colocated.goodput and not split.goodput:
        return "No cluster that was tried meets the objectives for enough requests, at any speed: relax an objective."
    theirs = name(split.layout)
    figures = f"{split.goodput:.2f} against {colocated.goodput:.2f} requests a second within both objectives"
    if pays(colocated, split):
        if not colocated.goodput:
            return f"Split: {theirs} serves {split.goodput:.2f} requests a second, and {ours} workers never enough."
        how = f"{split.goodput / colocated.goodput:.2f} times"
        why = breaks_by(colocated.layout, colocated.beyond)
        return f"Split: {theirs} serves {how} what {ours} workers do ({figures}), where {why}."
    if not split.goodput:
        return f"Splitting does not pay here: no split meets the objectives, and {ours} workers do."
    return (
        f"Splitting does not pay here: the best split, {theirs}, serves {split.goodput / colocated.goodput:.2f} times "
        f"what {ours} workers do ({figures}), because {_because(colocated, split, objectives)}."
    )


def _because(colocated: Break, split: Break, objectives: Objectives) -> str:
    beyond, why = colocated.beyond, breaks_by(split.layout, split.beyond)
    if beyond is not None and beyond.tpot is not None and beyond.tpot[1] <= objectives.tpot:
        tpot = f"TPOT {beyond.tpot[1] * 1_000:.0f} ms at p99, {objectives.tpot * 1_000:.0f} allowed"
        return (
            f"the colocated cluster keeps the tokens' objective even where it breaks ({tpot}) and none of its workers "
            f"waits for another; in the split, {why}"
        )
    return f"what {name(split.layout)} gains between tokens it loses elsewhere: {why}"
