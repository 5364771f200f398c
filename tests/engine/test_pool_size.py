"""How much of its configured memory a pool fills."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import NotEnoughMemory
from engine.engine import Engine
from kvstore.layout import DTYPE_BYTES, PageLayout
from worker.loop import pool_pages

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
