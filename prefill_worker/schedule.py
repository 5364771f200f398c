"""What the next prefill step computes: the token budget shared between prompts, so that short ones don't wait."""

from __future__ import annotations

from collections.abc import Iterable

from engine.batch import Chunk
from engine.steps import Plan
from prefill_worker.job import Job, Phase


def plan_step(jobs: Iterable[Job], budget: int) -> Plan:
    """Whole pages of the prompts that are computing, at most `budget` tokens in all (at least one page).

    Max-min fairness: every prompt may have an equal share, and what a short one leaves goes to the longer ones. Where
    the budget can't give everyone a page, those served least often come first."""
    ready = [job for job in jobs if job.phase is Phase.COMPUTING and job.pending]
    if not ready:
        return {}
    page_size = ready[0].page_size
    pages = max(1, budget // page_size)
    served = sorted(ready, key=lambda job: (job.priority, job.turns, job.arrival))[:pages]
    plan: Plan = {}
    for left, job in zip(range(len(served), 0, -1), sorted(served, key=lambda job: job.pending), strict=True):
        count = min(job.pending // page_size, pages // left)
        pages -= count
        end = job.ready + count
        plan[job.name] = Chunk(job.tokens[job.computed : end * page_size], job.computed, job.pages[:end])
    return plan
