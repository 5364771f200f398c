"""What the next prefill step computes, and how long it may take.

**Length.** A newcomer, a cancellation and pages on their way to a decode worker all wait for the end of a step, so a
step lasts about `step` seconds while several prompts are at hand. For one alone it lasts four times that, as fewer
steps are faster, and its pages still travel while the next ones are computed. A prompt of the lowest class fills a gap,
and has short steps. How much that is, `baton.step_cost_model`
learns from the steps themselves; it knows that the end of a long prompt is slower than its beginning. The steps of one
alone are made equal, since a small rest would be computed slowly. Where a step costs much however little it computes,
it lasts longer, so that at most a quarter is lost. Where copies are made beside steps, a small last chunk may shorten
the hand-off (`prefill_worker.last_chunk`).

**Order.** Urgent prompts go first, and the others share the rest. Of equally urgent ones, those that the step can
complete are completed, the foremost first: side by side all would be done with the last, and their pages would leave
together while nothing is computed. The others share the time by max-min fairness: each may have an equal part, and the
rest of a short prompt's part goes to the longer ones. Once a prompt was passed over for `STEPS_PER_LEVEL` steps, all
share. So short prompts don't wait behind long ones, and several of them fit into one step.

**Ageing.** A prompt that waits for its next part rises: `passed` counts the steps in a row in which it got less than an
equal part, and its rank (0 first) is

    rank = max(0, min(priority − most urgent priority here, LEVELS) · STEPS_PER_LEVEL − passed)

Within a rank, skipped prompts get a page before any prompt gets a second one. So every prompt has its turn after at
most LEVELS · STEPS_PER_LEVEL steps without one. One more step is added for each time that prompts which have waited as
long fill a whole step with a page each.

**Lending.** A prompt that waits for pages which another one makes lends that one its rank.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby
from math import inf
from typing import TypeAlias

from baton.messages import LOWEST_CLASS
from baton.step_cost_model import StepCostModel, pairs
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch
from prefill_worker.last_chunk import last_chunk
from prefill_worker.prefill_request import PrefillPhase, PrefillRequest

LEVELS = 4  # a prompt that is less urgent than that many levels waits no longer for it
STEPS_PER_LEVEL = 4
_UNMEASURED = 256  # tokens of the first step, before its time is known
_GROWTH = 4  # no step is larger than the largest so far times this
_ALONE = 4  # times as long is a step of a prompt that is alone
_FIXED = 4.0  # a step lasts at least this many times what it costs to compute nothing

Ranks: TypeAlias = Sequence[tuple[int, Sequence[PrefillRequest]]]
"""The prompts that are ready, foremost first: of each its rank, itself, and those that wait for it."""

Shares: TypeAlias = Mapping[PrefillRequest, int]
"""How many pages of each prompt a step computes; of none 0."""

PageSeconds: TypeAlias = Callable[[PrefillRequest, int], float]
"""Seconds of a prompt's n-th page from now, counted from 0."""


def build_batch(
    jobs: Collection[PrefillRequest], model: StepCostModel, step: float, most: int, copy: float = 0.0
) -> ScheduledBatch:
    """Whole pages of the prompts that are computing: as many as fit into the seconds that a step may last, and at most
    `most` tokens, but at least one page. Counts in each prompt how long it has been passed over. `copy`: seconds to
    copy a page beside a step; 0 if copies are made between steps."""
    ready = [job for job in jobs if job.ready_to_step]
    if not ready:
        return {}
    most = max(1, min(most, max(_UNMEASURED, _GROWTH * model.largest)) // ready[0].page_size)
    alone = sum(job.phase not in (PrefillPhase.COMMITTING, PrefillPhase.DONE) for job in jobs) == 1
    alone = alone and ready[0].priority < LOWEST_CLASS
    fixed = model.cost.fixed
    seconds = max(_ALONE * step if alone else step, _FIXED * fixed) - fixed
    if alone:
        seconds = _equal_steps(ready[0], model, seconds)
    cost = _cost(model, ready[0].page_size)
    ranks = rank_requests(ready, [job for job in jobs if job.phase is PrefillPhase.WAITING])
    shares = share_pages(ranks, cost, seconds if model.largest else inf, most)
    if alone and copy and model.largest:
        shares = _leave_last_chunk(ready[0], shares, cost, fixed, copy)
    _count_skipped(ranks, cost, shares)
    return {job.name: _chunk(job, count) for job, count in shares.items()}


def _equal_steps(job: PrefillRequest, model: StepCostModel, seconds: float) -> float:
    """What the rest of a prompt takes, divided by the number of steps that comes nearest to `seconds` each."""
    rest = model.cost.token * job.unbegun + model.cost.pair * pairs(job.unbegun, job.begun)
    steps = round(rest / seconds)
    return rest / steps if steps > 1 else inf


def _leave_last_chunk(job: PrefillRequest, shares: Shares, cost: PageSeconds, fixed: float, copy: float) -> Shares:
    """Once for each prompt, leave a small chunk to the step after the one that would complete it."""
    pages = shares[job]
    if job.last_chunk_cut or pages < job.total - job.begun_pages:
        return shares
    job.last_chunk_cut = True
    added = [0.0, *accumulate(cost(job, page) for page in reversed(range(pages)))]
    return {job: pages - last_chunk(pages, fixed, added.__getitem__, copy)}


def rank_requests(ready: Collection[PrefillRequest], waiting: Collection[PrefillRequest]) -> Ranks:
    """Rank the prompts by the formula above. Among equals the longest wait comes first, then the fewest tokens
    computed, then the earliest arrival."""
    urgent = min(job.priority for job in (*ready, *waiting))
    ranked: list[tuple[int, Sequence[PrefillRequest]]] = []
    for job in ready:
        behind = [job, *(other for other in waiting if other.waits_for is job)]
        best = min(min(each.priority - urgent, LEVELS) * STEPS_PER_LEVEL - each.skipped_steps for each in behind)
        ranked.append((max(0, best), behind))
    return sorted(ranked, key=_place)


def _place(ranked: tuple[int, Sequence[PrefillRequest]]) -> tuple[float, ...]:
    of, (job, *behind) = ranked
    return of, -max(each.skipped_steps for each in (job, *behind)), job.computed_here, job.arrival


def share_pages(ranks: Ranks, cost: PageSeconds, seconds: float, most: int) -> Shares:
    """Return pages worth that time, at most `most` of them, but at least one.

    They are given rank after rank. Within a rank the foremost prompts get all their pages, as long as these fit, unless
    a prompt there was passed over for long. The others get page by page, next the one that will have had the least
    time."""
    shares: dict[PrefillRequest, int] = {}
    spent: dict[PrefillRequest, float] = {}

    def give(job: PrefillRequest) -> bool:
        """One more page, if there is one and room for it."""
        nonlocal seconds, most
        count = shares.get(job, 0)
        if not most or count == job.steppable:
            return False
        price = cost(job, count)
        if price > seconds and shares:
            return False
        seconds, most = seconds - price, most - 1
        shares[job], spent[job] = count + 1, spent.get(job, 0.0) + price
        return True

    for _, equals in groupby(ranks, key=lambda item: item[0]):
        lent = [behind for _, behind in equals]
        served = [behind[0] for behind in lent]
        if all(each.skipped_steps < STEPS_PER_LEVEL for behind in lent for each in behind):
            for job in served:
                if job.steppable > most or sum(cost(job, page) for page in range(job.steppable)) > seconds:
                    break
                while give(job):
                    pass
        for job in served:
            if job.skipped_steps:
                give(job)
        queue = [(spent.get(job, 0.0) + cost(job, shares.get(job, 0)), place, job) for place, job in enumerate(served)]
        heapify(queue)
        while queue:
            _, place, job = heappop(queue)
            if give(job):
                heappush(queue, (spent[job] + cost(job, shares[job]), place, job))
    return shares


def _count_skipped(ranks: Ranks, cost: PageSeconds, shares: Shares) -> None:
    times = {job: sum(cost(job, page) for page in range(count)) for job, count in shares.items()}
    part = sum(times.values()) / len(ranks)
    for _, (job, *behind) in ranks:
        count = shares.get(job, 0)
        served = count == job.steppable or (count and times[job] + cost(job, count) > part)
        for each in (job, *behind):
            each.skipped_steps = 0 if served else each.skipped_steps + 1


def _cost(model: StepCostModel, page_size: int) -> PageSeconds:
    """By what a page makes a step longer; while nothing is known, all pages are equal."""
    if not model.largest:
        return lambda job, page: 1.0
    each = max(1e-9, model.cost.token * page_size)  # were pages free, the first prompt would get them all
    return lambda job, page: each + model.cost.pair * pairs(page_size, job.begun + page * page_size)


def _chunk(job: PrefillRequest, pages: int) -> Chunk:
    end = job.begun_pages + pages
    tokens = job.tokens[job.begun : end * job.page_size]
    return Chunk(tokens, job.begun, job.pages, adapter=job.adapter, window_pages=job.window_pages)
