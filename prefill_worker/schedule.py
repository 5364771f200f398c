"""What the next prefill step computes, and how long it may take.

**Length.** A newcomer, a cancellation and pages on their way to a decode worker all wait for the end of a step, so a
step lasts about `step` seconds while several prompts are at hand, and twice that for one alone. How many tokens that
is, `engine.pace` learns from the steps themselves, which also know that the end of a long prompt is slower than its
beginning. Where a step costs much however little it computes, it lasts longer, so that at most a quarter is lost.

**Order.** The urgent go first, and what they leave goes to the others. Those who are equally urgent share by max-min
fairness: each may have an equal part, and what a short prompt leaves goes to the longer ones. So short prompts don't
wait behind long ones, and several of them fit into one step.

**Ageing.** A prompt that waits for its next part rises: `passed` counts the steps in a row in which it got less than an
equal part of the step, and its rank (0 first) is

    rank = max(0, min(priority − most urgent priority here, LEVELS) · STEPS_PER_LEVEL − passed)

So whatever arrives, every prompt gets its part after at most LEVELS · STEPS_PER_LEVEL steps without one, and one step
more for each time that the prompts which have waited as long fill a whole step with one page each.

**Lending.** A prompt that waits for pages which another one makes lends that one its rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

from engine.batch import Chunk
from engine.pace import StepPace
from engine.steps import Plan
from prefill_worker.job import Job, Phase

LEVELS = 4  # a prompt that is less urgent than that many levels waits no longer for it
STEPS_PER_LEVEL = 4
_UNMEASURED = 256  # tokens of the first step, of which nobody knows yet how long it will take
_GROWTH = 4  # no step is larger than the largest so far times this
_FIXED = 4.0  # a step lasts at least this many times what it costs to compute nothing

Ranks: TypeAlias = Sequence[tuple[int, Sequence[Job]]]
"""The prompts that are ready, foremost first: of each its rank, itself, and those that wait for it."""

Shares: TypeAlias = Mapping[Job, int]
"""How many pages of each prompt a step computes; of none 0."""


def plan_step(jobs: Collection[Job], pace: StepPace, step: float, most: int) -> Plan:
    """Whole pages of the prompts that are computing: as many as fit into the seconds that a step may last, and at most
    `most` tokens, but at least one page. Counts in each prompt how long it has been passed over."""
    ready = [job for job in jobs if job.phase is Phase.COMPUTING and job.pending]
    if not ready:
        return {}
    page_size = ready[0].page_size
    ranks = rank(ready, [job for job in jobs if job.phase is Phase.WAITING])
    alone = sum(job.phase not in (Phase.SETTLING, Phase.DONE) for job in jobs) == 1
    seconds = max(2 * step if alone else step, _FIXED * pace.seconds(0))
    most = min(most, max(_UNMEASURED, _GROWTH * pace.largest), sum(job.pending for job in ready))
    pages = bisect_right(
        range(1, most // page_size + 1), seconds, key=lambda count: _seconds(share(ranks, count), pace)
    )
    shares = share(ranks, max(1, pages))
    _age(ranks, shares)
    return {job.name: _chunk(job, count) for job, count in shares.items()}


def rank(ready: Collection[Job], waiting: Collection[Job]) -> Ranks:
    """Who goes first, by the formula above; among equals those who have waited longest, then those who got
    least, then those who came first."""
    urgent = min(job.priority for job in (*ready, *waiting))
    ranked: list[tuple[int, Sequence[Job]]] = []
    for job in ready:
        behind = [job, *(other for other in waiting if other.waits_for is job)]
        best = min(min(each.priority - urgent, LEVELS) * STEPS_PER_LEVEL - each.passed for each in behind)
        ranked.append((max(0, best), behind))
    return sorted(ranked, key=_place)


def _place(ranked: tuple[int, Sequence[Job]]) -> tuple[float, ...]:
    of, (job, *behind) = ranked
    return of, -max(each.passed for each in (job, *behind)), job.computed_here, job.arrival


def share(ranks: Ranks, pages: int) -> Shares:
    """At most `pages` pages, shared between those of each rank, one rank after the other. In a rank that has more
    prompts than pages are left, the foremost get one each."""
    shares: dict[Job, int] = {}
    for _, equals in groupby(ranks, key=lambda item: item[0]):
        served = [behind[0] for _, behind in equals][:pages]
        for left, job in zip(range(len(served), 0, -1), sorted(served, key=lambda job: job.pending), strict=True):
            count = min(job.pending // job.page_size, pages // left)
            pages -= count
            shares[job] = count
    return shares


def _age(ranks: Ranks, shares: Shares) -> None:
    part = max(1, sum(shares.values()) // len(ranks))
    for _, (job, *behind) in ranks:
        served = shares.get(job, 0) >= min(part, job.pending // job.page_size)
        for each in (job, *behind):
            each.passed = 0 if served else each.passed + 1


def _seconds(shares: Shares, pace: StepPace) -> float:
    """What such a step would take."""
    chunks = [(job.computed, count * job.page_size) for job, count in shares.items()]
    return pace.seconds(sum(count for _, count in chunks), pairs=sum(pairs(start, count) for start, count in chunks))


def pairs(start: int, count: int) -> int:
    """How many earlier positions `count` tokens attend to in all, the first being at position `start`."""
    return count * start + count * (count - 1) // 2


def _chunk(job: Job, pages: int) -> Chunk:
    end = job.ready + pages
    return Chunk(job.tokens[job.computed : end * job.page_size], job.computed, job.pages[:end])
