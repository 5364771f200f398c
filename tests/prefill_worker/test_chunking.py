"""Chunks of a prefill step: how many tokens, in which order, and that no prompt is skipped for long."""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages import AttemptName, StepSample
from baton.step_cost_model import StepCostModel, pairs
from engine.step.block_table import BlockTable
from engine.step.outcome import ScheduledBatch
from prefill_worker.chunking import LEVELS, STEPS_PER_LEVEL, build_batch
from prefill_worker.prefill_request import PrefillPhase, PrefillRequest

PAGE = 16
_numbers = itertools.count()


def prompt(
    pages: int, priority: int = 0, computed: int = 0, phase: PrefillPhase = PrefillPhase.COMPUTING
) -> PrefillRequest:
    """Return a prompt of `pages` pages, of which `computed` are complete. Each prompt arrives after those made before
    it."""
    number = next(_numbers)
    return PrefillRequest(
        name=AttemptName(f"r{number}", 1),
        tokens=list(range(pages * PAGE)),
        keys=[number.to_bytes(8, "big") + page.to_bytes(8, "big") for page in range(pages)],
        page_size=PAGE,
        priority=priority,
        arrival=float(number),
        deadline=None,
        pages=BlockTable(range(pages)),
        computed=computed * PAGE,
        phase=phase,
    )


def planned(jobs: Sequence[PrefillRequest], pages: int) -> dict[str, int]:
    """Return the pages of each prompt in a step of at most `pages`, on a machine without measured step times."""
    plan = build_batch(jobs, StepCostModel(), 1.0, pages * PAGE)
    return {name.request: len(chunk.tokens) // PAGE for name, chunk in plan.items()}


def run(jobs: Sequence[PrefillRequest], plan: ScheduledBatch) -> None:
    for job in jobs:
        if job.name in plan:
            job.computed = plan[job.name].end
            job.computed_here += len(plan[job.name].tokens)


def took(plan: ScheduledBatch, fixed: float = 0.002) -> float:
    """Seconds that the machine below takes for it."""
    chunks = [(len(chunk.tokens), chunk.start) for chunk in plan.values()]
    return machine(sum(count for count, _ in chunks), sum(pairs(*chunk) for chunk in chunks), fixed)


def machine(tokens: int, attended: int = 0, fixed: float = 0.002) -> float:
    return fixed + 100e-6 * tokens + 50e-9 * attended


@cache
def known_pace(fixed: float = 0.002) -> StepCostModel:
    pace = StepCostModel()
    for count in range(50):
        tokens, start = (64, 256, 512)[count % 3], count % 7 * 1_000
        attended = pairs(tokens, start)
        pace.observe(StepSample(tokens, attended, 0, 0, machine(tokens, attended, fixed)))
    return pace


PROMPTS = st.builds(prompt, st.integers(1, 40), st.integers(-3, 9))


@pytest.mark.technique("Chunked prefill")
@given(st.lists(PROMPTS, max_size=12), st.integers(1, 30), st.data())
def test_a_step_is_whole_pages_in_order_within_its_budget(
    jobs: list[PrefillRequest], pages: int, data: st.DataObject
) -> None:
    for job in jobs:
        job.computed = data.draw(st.integers(0, job.total)) * PAGE
        job.skipped_steps = data.draw(st.integers(0, 40))
    plan = build_batch(jobs, StepCostModel(), 1.0, pages * PAGE)
    ready = {job.name: job for job in jobs if job.pending}
    assert plan.keys() <= ready.keys()
    for name, chunk in plan.items():
        job = ready[name]
        assert chunk.start == job.computed
        assert chunk.tokens
        assert len(chunk.tokens) % PAGE == 0
        assert chunk.tokens == job.tokens[chunk.start : chunk.end]
        assert chunk.pages is job.pages
        assert chunk.sample is None
    # All that there is room for, and no more.
    most = min(pages * PAGE, 256, sum(job.pending for job in jobs))
    assert sum(len(chunk.tokens) for chunk in plan.values()) == most


@given(st.lists(PROMPTS, min_size=1, max_size=8), st.lists(PROMPTS, max_size=60), st.integers(1, 16), st.data())
def test_no_prompt_is_passed_over_beyond_the_bound(
    jobs: list[PrefillRequest], arriving: list[PrefillRequest], pages: int, data: st.DataObject
) -> None:
    passed: dict[AttemptName, int] = {}
    most = 0
    while ready := [job for job in jobs if job.pending]:
        most = max(most, len(ready))
        plan = build_batch(jobs, StepCostModel(), 1.0, pages * PAGE)
        part = max(1, sum(len(chunk.tokens) for chunk in plan.values()) // PAGE // len(ready))
        for job in ready:
            got = len(plan[job.name].tokens) // PAGE if job.name in plan else 0
            passed[job.name] = 0 if got >= min(part, job.pending // PAGE) else passed.get(job.name, 0) + 1
            assert passed[job.name] <= LEVELS * STEPS_PER_LEVEL + math.ceil(most / pages)
        run(jobs, plan)
        jobs = [*jobs, *arriving[: (count := data.draw(st.integers(0, 3)))]]
        arriving = arriving[count:]


@given(st.lists(PROMPTS, min_size=1, max_size=8), st.lists(PROMPTS, max_size=40), st.floats(0.001, 0.1), st.data())
def test_nor_where_some_pages_take_far_longer_than_others(
    jobs: list[PrefillRequest], arriving: list[PrefillRequest], step: float, data: st.DataObject
) -> None:
    pace = known_pace()
    passed: dict[AttemptName, int] = {}
    most = 0
    for job in jobs:
        job.computed = data.draw(st.integers(0, job.total)) * PAGE
    while ready := [job for job in jobs if job.pending]:
        most = max(most, len(ready))
        plan = build_batch(jobs, pace, step, 10_000)
        assert len(plan) == 1 or took(plan) < max(4 * step, 0.008) * 1.1
        for job in ready:
            passed[job.name] = 0 if job.name in plan else passed.get(job.name, 0) + 1
            assert passed[job.name] <= LEVELS * STEPS_PER_LEVEL + most
        run(jobs, plan)
        jobs = [*jobs, *arriving[: (count := data.draw(st.integers(0, 3)))]]
        arriving = arriving[count:]


def test_equals_share_and_what_a_short_one_leaves_goes_to_the_longer_ones() -> None:
    short, long, longer = prompt(2), prompt(20), prompt(30)
    shares = planned([longer, short, long], 12)
    assert shares == {short.name.request: 2, long.name.request: 5, longer.name.request: 5}


def test_prompts_that_a_step_completes_are_done_one_after_the_other_unless_one_has_waited_long() -> None:
    jobs = [prompt(12) for _ in range(3)]
    names = [job.name.request for job in jobs]
    assert planned(jobs, 16) == {names[0]: 12, names[1]: 2, names[2]: 2}
    jobs[2].skipped_steps = STEPS_PER_LEVEL
    assert planned(jobs, 15) == dict.fromkeys(names, 5)


@pytest.mark.technique("Several prompts in one prefill step")
def test_several_short_prompts_fit_into_one_step() -> None:
    jobs = [prompt(2) for _ in range(6)]
    assert list(planned(jobs, 12).values()) == [2] * 6


def test_the_more_urgent_go_first_and_leave_what_they_dont_need() -> None:
    later, urgent = prompt(20, priority=1), prompt(4, priority=0)
    assert planned([later, urgent], 10) == {urgent.name.request: 4, later.name.request: 6}
    urgent = prompt(20, priority=-5)
    assert planned([later, urgent], 10) == {urgent.name.request: 10}


@pytest.mark.parametrize(("priority", "steps"), [(0, 0), (1, 4), (3, 12), (4, 16), (2**31 - 1, 16)])
def test_close_priorities_age_sooner(priority: int, steps: int) -> None:
    jobs = [prompt(10_000, priority=0), prompt(100, priority=priority)]
    until = 0
    while True:
        plan = build_batch(jobs, StepCostModel(), 1.0, 10 * PAGE)
        if jobs[1].name in plan:
            break
        until += 1
        run(jobs, plan)
    assert until == steps
    assert len(plan[jobs[1].name].tokens) == 5 * PAGE  # its part
    assert jobs[1].skipped_steps == 0


def test_scraps_are_no_part() -> None:
    """A prompt that gets a leftover page now and then still rises in rank."""
    low = prompt(1_000, priority=9)
    for _ in range(16):
        assert planned([prompt(9, priority=0), low], 10)[low.name.request] == 1
    assert planned([prompt(9, priority=0), low], 10)[low.name.request] == 5


def test_with_more_prompts_than_pages_they_take_turns() -> None:
    jobs = [prompt(4) for _ in range(5)]
    seen: list[str] = []
    for _ in range(5):
        plan = build_batch(jobs, StepCostModel(), 1.0, 2 * PAGE)
        seen += [name.request for name in plan]
        run(jobs, plan)
    assert [seen.count(job.name.request) for job in jobs] == [2] * 5


def test_an_awaited_prompt_goes_as_early_as_its_waiters() -> None:
    maker, other, waiter = (
        prompt(20, priority=7),
        prompt(20, priority=3),
        prompt(20, priority=0, phase=PrefillPhase.WAITING),
    )
    waiter.waits_for = maker
    assert planned([maker, other, waiter], 10) == {maker.name.request: 10}
    # It lends its age as well: a prompt that was skipped often waits for one that was not.
    waiter.priority, waiter.skipped_steps = 9, 16
    assert planned([maker, other, waiter], 10) == {maker.name.request: 5, other.name.request: 5}
    assert waiter.skipped_steps == 0
    assert planned([maker, other, waiter], 10) == {other.name.request: 10}
    assert (maker.skipped_steps, waiter.skipped_steps) == (1, 1)


def test_a_step_lasts_as_long_as_it_should() -> None:
    pace = known_pace()
    for jobs, seconds in (([prompt(1_000)], 0.2), ([prompt(1_000), prompt(500, phase=PrefillPhase.LOOKUP)], 0.05)):
        assert took(build_batch(jobs, pace, 0.05, 10_000)) == pytest.approx(seconds, rel=0.1)


def test_the_end_of_a_long_prompt_takes_smaller_chunks_than_its_beginning() -> None:
    pace = known_pace()
    first, last = (build_batch([prompt(2_000, computed=at)], pace, 0.05, 10_000) for at in (0, 1_800))
    assert took(first) == pytest.approx(0.2, rel=0.1)
    assert 0.16 < took(last) <= 0.205  # a page takes 25 ms there
    ((many,), (few,)) = first.values(), last.values()
    assert len(few.tokens) < len(many.tokens) / 4


def test_where_a_step_costs_much_in_itself_it_computes_more() -> None:
    assert took(build_batch([prompt(1_000)], known_pace(0.1), 0.05, 10_000), 0.1) == pytest.approx(0.4, rel=0.1)


def test_a_slow_machine_still_gets_a_page_done_and_a_fast_one_keeps_to_the_bound() -> None:
    slow, fast = StepCostModel(), StepCostModel()
    slow.calibrate([StepSample(size * PAGE, pairs(size * PAGE), 0, 0, 4.0 * size) for size in (1, 2, 4, 8, 16)])
    fast.observe(StepSample(512, pairs(512), 0, 0, 0.001))
    assert [len(c.tokens) for c in build_batch([prompt(100)], slow, 0.05, 512).values()] == [PAGE]
    assert [len(c.tokens) for c in build_batch([prompt(100)], fast, 0.05, 512).values()] == [512]


def test_steps_grow_no_faster_than_they_are_measured() -> None:
    pace, job, counts = StepCostModel(), prompt(1_000), []
    for _ in range(5):
        (chunk,) = build_batch([job], pace, 60.0, 10_000).values()
        counts.append(len(chunk.tokens))
        pace.observe(StepSample(len(chunk.tokens), pairs(len(chunk.tokens), chunk.start), 0, 0, 0.001))
    assert counts == [256, 1_024, 4_096, 10_000, 10_000]


def test_a_first_step_has_a_page_however_large_pages_are() -> None:
    large = PrefillRequest(
        AttemptName("large", 1), list(range(1_024)), [b"k" * 16] * 2, 512, 0, 0.0, None, BlockTable([0, 1])
    )
    large.phase = PrefillPhase.COMPUTING
    plan = build_batch([large], StepCostModel(), 1.0, 8_192)
    assert [len(chunk.tokens) for chunk in plan.values()] == [512]


def test_there_is_no_step_without_anything_to_compute() -> None:
    assert build_batch([], StepCostModel(), 1.0, 512) == {}
    others = [prompt(3, phase=phase) for phase in PrefillPhase if phase is not PrefillPhase.COMPUTING]
    assert build_batch([*others, prompt(3, computed=3)], StepCostModel(), 1.0, 512) == {}
