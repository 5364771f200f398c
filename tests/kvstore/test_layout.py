from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import DTYPE_BYTES, FORMS, LAYOUT_VERSION, PageLayout

layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    form=st.sampled_from(FORMS),
)


def test_sizes_of_a_known_page():
    layout = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    assert layout.shape == (8, 32, 2, 16, 128)
    assert layout.token_bytes == 128 * 1024
    assert layout.page_bytes == 2 * 1024 * 1024
    assert layout.version == LAYOUT_VERSION


@given(layouts)
def test_every_form_has_the_same_bytes_with_kv_heads_outermost(layout: PageLayout):
    assert layout.shape[:2] == (layout.num_kv_heads, layout.num_layers)
    assert prod(layout.shape) * DTYPE_BYTES[layout.dtype] == layout.page_bytes


@given(layouts)
def test_ranks_share_a_page_without_gap_or_overlap(layout: PageLayout):
    for size in range(1, layout.num_kv_heads + 1):
        if layout.num_kv_heads % size:
            with pytest.raises(ValueError, match="evenly"):
                layout.rank_slice(0, size)
            continue
        slices = [layout.rank_slice(rank, size) for rank in range(size)]
        assert slices[0].start == 0
        assert slices[-1].stop == layout.page_bytes
        assert all(left.stop == right.start for left, right in pairwise(slices))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_no_such_rank(rank: int, size: int):
    with pytest.raises(ValueError):
        PageLayout(2, 4, 8, 16, "float32").rank_slice(rank, size)


@given(layouts)
def test_survives_a_message(layout: PageLayout):
    assert PageLayout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"dtype": "int8"},
        {"page_size": 0},
        {"head_dim": "64"},
        {"colour": 1},
        {"num_layers": True},
        {"form": "x"},
    ],
)
def test_refuses_what_it_does_not_know(change: dict[str, object]):
    fields = PageLayout(2, 4, 8, 16, "float32").to_dict() | change
    with pytest.raises(ValueError, match="page layout"):
        PageLayout.from_dict(fields)


def test_refuses_a_missing_field():
    fields = PageLayout(2, 4, 8, 16, "float32").to_dict()
    del fields["head_dim"]
    with pytest.raises(ValueError, match="head_dim"):
        PageLayout.from_dict(fields)
