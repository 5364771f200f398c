"""The size of a prompt's last chunk: by when all its pages have been copied, against every other size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import PrefillConfig
from prefill_worker.last_chunk import CopyRate, last_chunk
from prefill_worker.scheduler import PrefillScheduler
from tests.prefill_worker.timed import PAGE, Timed

SECONDS = st.floats(1e-6, 0.1)


def copied_at(pages: int, last: int, fixed: float, page: float, copy: float) -> float:
    """Seconds until all pages are copied, if the `last` are a step of their own; 0: they are not."""
    free = fixed + (pages - last) * page
    copies = free + (pages - last) * copy
    if last:
        free += fixed + last * page
        copies = max(free, copies) + last * copy
    return copies


@given(st.integers(1, 200), SECONDS, SECONDS, SECONDS)
def test_no_other_size_is_better(pages: int, fixed: float, page: float, copy: float) -> None:
    chosen = last_chunk(pages, fixed, lambda n: n * page, copy)
    assert 0 <= chosen < pages
    best = min(copied_at(pages, last, fixed, page, copy) for last in range(pages))
    assert copied_at(pages, chosen, fixed, page, copy) <= best * (1 + 1e-9)


def test_a_step_that_costs_more_than_it_hides_is_not_taken() -> None:
    assert last_chunk(100, 0.01, lambda n: n * 0.001, 0.0001) == 0
    assert last_chunk(100, 0.001, lambda n: n * 0.001, 0.0001) == 9
    assert last_chunk(1, 0.001, lambda n: n * 0.001, 1.0) == 0


def test_copies_that_end_together_count_together() -> None:
    rate = CopyRate()
    assert rate.seconds == 0
    for start in (10.0, 20.0):
        rate.idle(start)
        rate.copied(4, start + 0.8)
        rate.copied(4, start + 0.8)
    assert rate.seconds == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("copy", [0.0, 0.002])
def test_a_prompt_that_is_alone_ends_with_a_small_chunk_where_copies_are_made_beside_steps(copy: float) -> None:
    worker = Timed(PrefillConfig(max_num_seqs=64, step_ms=200), overlap=copy > 0)
    for number in range(3):  # the steps' costs are learned
        worker.order(f"r{number}", [number] * 64 * PAGE)
        worker.run()
    if copy:
        worker.state._copy_rate._seconds, worker.state._copy_rate._pages = copy, 1.0
    steps = len(worker.steps)
    worker.order("r", [7] * 64 * PAGE)
    worker.run()
    sizes = [len(chunk.tokens) for _, plan in worker.steps[steps:] for chunk in plan.values()]
    assert sum(sizes) == 64 * PAGE
    if copy:
        assert 0 < sizes[-1] < sizes[-2]
    else:
        assert max(sizes) - min(sizes) <= PAGE
    assert isinstance(worker.state, PrefillScheduler)
