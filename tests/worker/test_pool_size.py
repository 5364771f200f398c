"""How much of its configured memory a pool fills."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.config import PrefillConfig
from baton.errors import NotEnoughMemory
from engine.device.gpu_memory import CONTEXT_BYTES, GpuMemory, GpuUse, pool_bytes, worker_bytes
from engine.engine import Engine
from engine.step.batch import Chunk
from kvstore.layout import DTYPE_BYTES, PageLayout
from worker.pool_size import await_memory, fitting_pages, largest_steps, pool_pages

layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    head_dim=st.sampled_from([16, 64, 80, 128, 256]),
    page_size=st.sampled_from([1, 8, 16, 32, 256]),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)


@given(layouts, st.integers(100, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_pool_of_a_hundred_pages_fills_its_memory_to_within_one_percent(
    layout: PageLayout, pages: int, more: float
) -> None:
    memory = pages * layout.page_bytes + int(more * layout.page_bytes)
    assert Engine.pages_for(memory, layout) == pages
    assert 0.99 * memory < pages * layout.page_bytes <= memory


LAYOUT = PageLayout(2, 4, 16, 16, "float32")


@pytest.mark.parametrize(("memory", "pages", "warned"), [(10.0, 10, False), (10.05, 10, False), (10.5, 10, True)])
def test_a_pool_of_few_pages_says_what_it_leaves_unused(
    memory: float, pages: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert pool_pages(int(memory * LAYOUT.page_bytes), LAYOUT) == pages
    assert ("stay unused" in caplog.text) == warned


def test_a_pool_below_one_page() -> None:
    with pytest.raises(NotEnoughMemory, match="raise kv_cache_bytes"):
        pool_pages(LAYOUT.page_bytes - 1, LAYOUT)


# --- what a GPU has left ---------------------------------------------------------------------------------------------

GIB = 2**30


@given(
    st.integers(1, 200 * GIB), st.integers(0, 200 * GIB), st.integers(0, 200 * GIB), st.integers(0, 20 * GIB),
    st.floats(0.1, 1.0), st.floats(0.1, 1.0),
)  # fmt: skip
def test_a_worker_never_takes_more_than_it_may_nor_than_is_free(
    total: int, free: int, weights: int, step: int, utilization: float, share: float
) -> None:
    memory, use = GpuMemory(total, min(free, total)), GpuUse(weights, step)
    pool = pool_bytes(memory, use, utilization, share)
    assert pool >= 0
    if pool:
        assert pool + step + weights + CONTEXT_BYTES <= worker_bytes(total, utilization, share)
        assert pool + step <= memory.free
    assert pool >= pool_bytes(memory, GpuUse(weights, step + 1), utilization, share)
    assert pool >= pool_bytes(memory, use, utilization / 2, share)


def test_two_workers_on_one_gpu_have_room_side_by_side() -> None:
    use = GpuUse(16 * GIB, GIB)
    first = pool_bytes(GpuMemory(80 * GIB, 64 * GIB), use, 0.9, 0.5)
    used = first + use.weights + use.step + CONTEXT_BYTES
    second = pool_bytes(GpuMemory(80 * GIB, 80 * GIB - used - use.weights - CONTEXT_BYTES), use, 0.9, 0.5)
    assert first == second
    assert first > 17 * GIB


class Memory:
    """A GPU on which a step takes memory for each of its tokens, and for each pair of a token and its context."""

    def __init__(self, total: int, weights: int, each: int = 1_000, pair: int = 1) -> None:
        self.total, self.weights = total, weights
        self._each, self._pair = each, pair
        self._peak = 0
        self.pools: list[int] = []
        self.steps: list[Sequence[Chunk]] = []

    def make(self, pages: int) -> Engine:
        self.pools.append(pages)
        pool = SimpleNamespace(nbytes=pages * LAYOUT.page_bytes)
        spec = SimpleNamespace(max_positions=8_192)
        engine: Any = SimpleNamespace(
            pool=pool, layout=LAYOUT, config=spec, vocab_size=100, has_lm_head=True, launch=self._launch
        )
        return engine

    def _launch(self, chunks: Sequence[Chunk]) -> SimpleNamespace:
        if not self.steps or self.steps[-1] is not chunks:  # each is launched twice
            self.steps.append(chunks)
        count = sum(len(chunk.tokens) for chunk in chunks)
        needed = count * self._each + sum(len(c.tokens) * c.start * self._pair for c in chunks if len(c.tokens) > 1)
        if self.allocated() + needed > self.total:
            raise torch.OutOfMemoryError("tried to allocate")
        self._peak = max(self._peak, needed)
        return SimpleNamespace(wait=lambda: None)

    def read(self) -> GpuMemory:
        return GpuMemory(self.total, self.total - self.weights)

    def allocated(self) -> int:
        return self.weights + self.pools[-1] * LAYOUT.page_bytes

    def begin_peak(self) -> None:
        self._peak = 0

    def peak(self) -> int:
        return self.allocated() + self._peak

    def give_back(self) -> None: ...


OWN = PrefillConfig(max_num_batched_tokens=512)


def test_a_gpu_is_filled_but_for_the_largest_step() -> None:
    memory = Memory(8 * GIB, 2 * GIB)
    pages = fitting_pages(memory.make, memory, OWN, 16, 1.0)
    step = 512 * 1_000 + 512 * (8_192 - 512)
    pool = pool_bytes(memory.read(), GpuUse(2 * GIB, step), 0.9)
    assert pages == pool // LAYOUT.page_bytes
    assert max(chunk.end for chunks in memory.steps for chunk in chunks) == 8_192
    assert all(max(chunk.pages) < memory.pools[0] for chunks in memory.steps for chunk in chunks)
    assert pages > 1.9 * fitting_pages(memory.make, memory, OWN, 16, 0.7) / 2


def test_a_context_with_which_steps_do_not_fit_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(8 * GIB, 2 * GIB, pair=2_000)  # 7.5 GiB behind the longest context
    assert fitting_pages(memory.make, memory, OWN, 16, 1.0) > 0
    assert "behind more than" in caplog.text


def test_a_gpu_with_too_little_memory() -> None:
    small = Memory(3 * GIB, 2 * GIB, each=4 * 2**20)
    with pytest.raises(NotEnoughMemory, match="a step of 512 tokens does not fit: tried to allocate"):
        fitting_pages(small.make, small, OWN, 16, 1.0)
    full = Memory(4 * GIB, int(3.2 * GIB))
    with pytest.raises(NotEnoughMemory, match="leave no page"):
        fitting_pages(full.make, full, OWN, 16, 1.0)


def test_the_largest_steps_are_steps_that_an_engine_runs(engine: Callable[..., Engine]) -> None:
    loaded = engine("llama")
    longest = loaded.config.max_positions - 32
    vocab = loaded.vocab_size
    for steps in (largest_steps(32, longest, 16, vocab), largest_steps(32, 0, 16, vocab)):
        for chunks in steps:
            drawn = loaded.step(chunks)
            assert all(one is None if chunk.sample is None else one for one, chunk in zip(drawn, chunks, strict=True))


def test_memory_of_a_predecessor_is_awaited_for_a_while() -> None:
    clock = [0.0]

    class Draining(Memory):
        def read(self) -> GpuMemory:
            return GpuMemory(10, int(clock[0]))

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    memory = Draining(10, 0)
    assert await_memory(3, memory, 10.0, lambda: clock[0], sleep)
    assert clock[0] == pytest.approx(3.0, abs=0.3)
    assert not await_memory(30, memory, 10.0, lambda: clock[0], sleep)
    assert clock[0] < 14.0
