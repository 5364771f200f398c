"""Which side of the cluster is the narrower one, and whether one worker more of the other kind would help.

    prefill side    seconds of prompt work that come per second / prefill workers
    decode side     tokens generated per second / (decode workers · capacity)
    capacity        b / (fixed + b · (row + context · c)), tokens per second of one worker

where b is how many sequences of the mean context c fit into a worker's pages, and into a step that keeps the objective
for the time per token; the coefficients are those of `router.placement.step_costs`. A decode worker's steps are worth
more the more sequences share their fixed part, so its capacity is that of a full batch, and not what its present steps
bring.

All prompt work counts as the prefill side's, also what decode workers compute for themselves: the question is what the
workers would have to do were each to do what it is there for. Both are of the last half minute. Pure.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from baton.messages import WorkerRole
from router.placement.step_costs import DecodeCost

BUSY = 0.5  # utilisation below which nothing need be changed
GAIN = 0.85  # by this factor, at least, the busier side must become less busy
HOLD = 30.0  # seconds for which a change must have been worth it
_WINDOW = 30.0  # seconds; what is older by so much counts a third


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What is asked of the cluster, per second."""

    prompts: float  # seconds of one worker's time
    tokens: float  # generated
    context: float  # positions that each of these attends to, on average


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The workers that take work; those of a side are taken to be alike."""

    prefill: int
    decode: int
    step: DecodeCost  # of decoding
    pool: float  # tokens that the pages of a decode worker hold
    tpot: float | None = None  # objective, seconds


@dataclass(frozen=True, slots=True)
class PoolUtilization:
    """Share of what a side can do; above 1 its queue grows."""

    prefill: float
    decode: float

    @property
    def busiest(self) -> float:
        return max(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class RoleAdvice:
    """One worker of the other kind should have this role."""

    role: WorkerRole
    now: PoolUtilization
    then: PoolUtilization


def utilization(demand: OfferedLoad, sides: PoolCapacity) -> PoolUtilization:
    """How busy each side is. A side without workers, of which something is asked, is infinitely busy."""
    each = sides.step.row + demand.context * sides.step.context
    batch = sides.pool / max(1.0, demand.context)
    if sides.tpot is not None and each > 0:
        batch = min(batch, (sides.tpot - sides.step.fixed) / each)
    batch = max(1.0, batch)
    seconds = (sides.step.fixed + batch * each) / batch  # of a worker, for a token
    return PoolUtilization(_share(demand.prompts, sides.prefill), _share(demand.tokens * seconds, sides.decode))


def advise(demand: OfferedLoad, sides: PoolCapacity) -> RoleAdvice | None:
    """The change of one worker's role that helps the busier side most; none, where none is worth it. At least one
    worker of each kind stays. For an unchanged demand the way back is never advised: it would lead to what was
    worse."""
    now = utilization(demand, sides)
    ways: list[RoleAdvice] = []
    if sides.prefill and sides.decode > 1:
        more = PoolCapacity(sides.prefill + 1, sides.decode - 1, sides.step, sides.pool, sides.tpot)
        ways.append(RoleAdvice("prefill", now, utilization(demand, more)))
    if sides.prefill > 1 and sides.decode:
        more = PoolCapacity(sides.prefill - 1, sides.decode + 1, sides.step, sides.pool, sides.tpot)
        ways.append(RoleAdvice("decode", now, utilization(demand, more)))
    best = min(ways, key=lambda way: way.then.busiest, default=None)
    if best is None or now.busiest < BUSY or best.then.busiest > GAIN * now.busiest:
        return None
    return best


class UtilizationMonitor:
    """Watches what is asked of the cluster."""

    def __init__(self) -> None:
        self._prompts = self._tokens = self._context = 0.0  # decaying sums
        self._first = self._last = -inf  # when they began, and were last decayed
        self._advised: WorkerRole | None = None
        self._since = 0.0  # when that began to be worth it
        self._sides: tuple[int, int] = (0, 0)
        self.now: PoolUtilization | None = None  # as of the last look

    def prompt(self, seconds: float) -> None:
        self._prompts += seconds

    def generated(self, tokens: int, position: int) -> None:
        """So many tokens have come, the last of which stands there."""
        self._tokens += tokens
        self._context += tokens * position

    def demand(self, now: float) -> OfferedLoad:
        """Of the last half minute. Call about once a second, or older demand counts as well."""
        if self._first == -inf:
            self._first = self._last = now
        decay = exp(-(now - self._last) / _WINDOW)
        self._prompts, self._tokens, self._context = (
            total * decay for total in (self._prompts, self._tokens, self._context)
        )
        self._last = now
        seconds = max(1.0, _WINDOW * (1.0 - exp(-(now - self._first) / _WINDOW)))
        context = self._context / self._tokens if self._tokens else 0.0
        return OfferedLoad(self._prompts / seconds, self._tokens / seconds, context)

    def assess(self, sides: PoolCapacity, now: float) -> RoleAdvice | None:
        """What should be changed: only what has been worth it for a while, with the same numbers of workers. Call
        about once a second."""
        demand = self.demand(now)
        self.now = utilization(demand, sides)
        advice = advise(demand, sides)
        advised = advice.role if advice else None
        if (advised, (sides.prefill, sides.decode)) != (self._advised, self._sides):
            self._advised, self._sides, self._since = advised, (sides.prefill, sides.decode), now
        return advice if now - self._since >= HOLD else None


def _share(work: float, workers: int) -> float:
    if workers:
        return work / workers
    return inf if work > 0 else 0.0
