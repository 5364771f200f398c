from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import DTYPE_BYTES, FORMS, FP8, INT8, LATENT, LAYOUT_VERSION, STATES, PageLayout

layouts = st.builds(
    PageLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from([dtype for dtype in DTYPE_BYTES if dtype not in (INT8, FP8)]),
    form=st.sampled_from(FORMS),
) | st.builds(
    PageLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from([INT8, FP8]),
)


def test_sizes_of_a_known_page():
    layout = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    assert layout.shape == (8, 32, 2, 16, 128)
    assert layout.token_bytes == 128 * 1024
    assert layout.page_bytes == 2 * 1024 * 1024
    assert layout.version == LAYOUT_VERSION
    latent = PageLayout(num_layers=61, num_kv_heads=1, head_dim=576, page_size=16, dtype="bfloat16", form=LATENT)
    assert latent.shape == (1, 61, 16, 576)
    assert latent.token_bytes == 61 * 576 * 2
    states = PageLayout(num_layers=2, num_kv_heads=1, head_dim=600, page_size=64, dtype="bfloat16", form=STATES)
    assert states.page_bytes == 2 * 600 * 2
    for dtype in (INT8, FP8):
        codes = PageLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
        assert codes.shape == (8, 32, 2 * 16 * (128 + 4))
        assert codes.page_bytes == layout.page_bytes * 132 // 256


@given(layouts)
def test_a_page_has_the_bytes_of_its_shape_with_kv_heads_outermost(layout: PageLayout):
    assert layout.shape[:2] == (layout.num_kv_heads, layout.num_layers)
    assert prod(layout.shape) * DTYPE_BYTES[layout.dtype] == layout.page_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int4"},
        {"dtype": INT8, "form": LATENT},
        {"dtype": FP8, "head_dim": 7},
        {"page_size": 0},
        {"head_dim": "64"},
        {"num_layers": True},
        {"form": "x"},
    ],
)
def test_refuses_what_it_does_not_know(change: dict[str, Any]):
    fields = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": "float32"}
    with pytest.raises(ValueError, match="page layout"):
        PageLayout(**fields | change)
