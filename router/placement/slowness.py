"""Which workers are slower than the others of their role, as this router sees it: outlier detection.

A process that is stopped for a part of each second, or that gets too little of its CPU, is live and slow. Its own
measurements miss that, because most of its steps take as long as ever. So the router compares when messages come with
when they are due:

    delay      how much later than due heartbeats come, on average: so long an order waits until it is read
    pace       time between a decode worker's tokens / time that its steps take by the fit of what it reports
    slowdown   the same by its calibration: this also shows a worker whose steps have become slow

All are of the last seconds and relative to the (lower) median of the role, so at most half of the workers are outliers.
A lone worker is none, and a busy machine slows all. Placement multiplies a worker's predicted times by `pace` and adds
`delay`. A factor below 2 counts as 1, and so does one that no token has confirmed for 5 s: then the worker gets a few
requests again, which tell. Where they tell the same, it holds for 10 s and then for 20 s. Heartbeats tell of delays
also without requests.

Pure.
"""

# pyright: strict

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf

from baton.messages import Delta, Role

_WINDOW = 3.0  # seconds of heartbeats; tokens that are older by so much count a third
_JITTER = 0.02  # seconds by which heartbeats of a healthy process are late
_TURN = 0.25  # seconds that a main loop spends outside steps without a turn
_OUTLIER = 2.0  # times the median
_TRUSTED, _LONGEST = 5.0, 20.0  # seconds for which a factor holds without another token, at first and at most
_ENOUGH = 0.25  # seconds of waiting for tokens that a factor is taken from


@dataclass(slots=True)
class _Observed:
    role: Role
    beat_at: float | None = None  # when the last heartbeat came, seconds
    period: float = inf  # of its heartbeats
    beats: deque[tuple[float, float, float]] = field(default_factory=deque[tuple[float, float, float]])
    """When each of the last ones came, seconds since the one before, seconds that it was late."""
    delay: float = 0.0  # mean over these, weighted by time
    owed: tuple[str, int] | None = None  # an attempt whose next token is due
    owed_since: float = 0.0
    last_tokens: float = -inf  # when tokens that were owed last came
    hold: float = _TRUSTED  # seconds for which a factor holds without another token
    took: float = 0.0  # decaying sum of the times for which tokens were owed, seconds
    by_fit: float = 0.0  # and of what their steps take by the fit,
    by_calibration: float = 0.0  # and by the calibration


class Slowness:
    """What this router observes of each live worker."""

    def __init__(self) -> None:
        self._workers: dict[str, _Observed] = {}  # by incarnation

    def join(self, incarnation: str, role: Role) -> None:
        self._workers[incarnation] = _Observed(role)

    def forget(self, incarnation: str) -> None:
        self._workers.pop(incarnation, None)

    def extend(self, seconds: float) -> None:
        """This router itself stood still for so long."""
        for worker in self._workers.values():
            worker.owed_since += seconds
            if worker.beat_at is not None:
                worker.beat_at += seconds

    def beat(self, incarnation: str, period: float, loop_age: float, now: float) -> None:
        """A heartbeat has come, and the next is due after `period`. `loop_age`: seconds since the main loop last
        turned; 0 while a step runs."""
        worker = self._workers[incarnation]
        if worker.beat_at is not None:
            late = max(0.0, now - worker.beat_at - worker.period - _JITTER, loop_age - _TURN)
            worker.beats.append((now, max(0.0, now - worker.beat_at), late))
            while worker.beats[0][0] < now - _WINDOW:
                worker.beats.popleft()
            seconds = sum(gap for _, gap, _ in worker.beats)
            worker.delay = sum(gap * late for _, gap, late in worker.beats) / seconds if seconds else 0.0
        worker.beat_at, worker.period = now, period

    def tokens(self, incarnation: str, deltas: Sequence[Delta], fit: float, calibration: float, now: float) -> None:
        """Tokens have come. A step takes so many seconds by the fit and by the calibration; 0: unknown, or the worker
        has other work as well."""
        worker = self._workers[incarnation]
        owed = worker.owed and next((each for each in deltas if (each.request, each.attempt) == worker.owed), None)
        if owed and owed.tokens and fit > 0 and calibration > 0:
            since = now - worker.last_tokens
            if since <= worker.hold:
                weight = exp(-since / _WINDOW)
            else:
                slow = worker.took > _OUTLIER * worker.by_calibration
                weight, worker.hold = 0.0, min(2 * worker.hold, _LONGEST) if slow else _TRUSTED
            worker.took = weight * worker.took + max(0.0, now - worker.owed_since)
            worker.by_fit = weight * worker.by_fit + len(owed.tokens) * fit
            worker.by_calibration = weight * worker.by_calibration + len(owed.tokens) * calibration
            worker.last_tokens = now
        goes_on = next((each for each in deltas if each.finish is None), None)
        worker.owed, worker.owed_since = goes_on and (goes_on.request, goes_on.attempt), now

    def silent(self, incarnation: str, now: float) -> bool:
        """Whether its heartbeat is overdue."""
        return self._overdue(self._workers[incarnation], now) > 0

    def delay(self, incarnation: str, now: float) -> float:
        """Return the seconds for which an order waits there longer than at most others."""
        if not (delay := self._delay(self._workers[incarnation], now)):
            return 0.0
        return max(0.0, delay - _OUTLIER * _median([self._delay(each, now) for each in self._alike(incarnation)]))

    def pace(self, incarnation: str, now: float) -> float:
        """Return the factor by which its decode steps take longer than the fit says; 1: no outlier."""
        return self._factor(incarnation, lambda each: each.took / each.by_fit, now)

    def slowdown(self, incarnation: str, now: float) -> float:
        """Return the factor by which its decode steps take longer than its calibration says; 1: no outlier."""
        return self._factor(incarnation, lambda each: each.took / each.by_calibration, now)

    def _factor(self, incarnation: str, ratio: Callable[[_Observed], float], now: float) -> float:
        worker = self._workers[incarnation]
        if worker.took < _ENOUGH or now - worker.last_tokens > worker.hold or (factor := ratio(worker)) < _OUTLIER:
            return 1.0
        factor /= max(1.0, _median([ratio(each) for each in self._alike(incarnation) if each.took >= _ENOUGH]))
        return factor if factor >= _OUTLIER else 1.0

    def _alike(self, incarnation: str) -> list[_Observed]:
        role = self._workers[incarnation].role
        return [worker for worker in self._workers.values() if worker.role == role]

    def _delay(self, worker: _Observed, now: float) -> float:
        """The mean, or as much as the next heartbeat is late already."""
        return max(worker.delay, self._overdue(worker, now))

    @staticmethod
    def _overdue(worker: _Observed, now: float) -> float:
        """Seconds by which its heartbeat is late so far."""
        return 0.0 if worker.beat_at is None else max(0.0, now - worker.beat_at - worker.period - _JITTER)


def _median(values: Sequence[float]) -> float:
    """The lower one of two: an outlier among two workers is the slower one."""
    return sorted(values)[(len(values) - 1) // 2]
