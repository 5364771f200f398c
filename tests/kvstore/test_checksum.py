"""The page checksum: a tree over KV heads, so that ranks hash their own parts."""

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.checksum import copy_page, head_checksums, join_checksums, page_checksum
from kvstore.layout import FORMS, PageLayout

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.binary(min_size=1, max_size=64))


@given(SIZES)
def test_ranks_hash_their_own_parts_and_join_them(sizes: tuple[int, int, bytes]) -> None:
    ranks, heads, head = sizes
    page = random.Random(len(head)).randbytes(ranks * heads * len(head))
    share = len(page) // ranks
    parts = [head_checksums(page[rank * share : (rank + 1) * share], heads) for rank in range(ranks)]
    assert join_checksums([each for part in parts for each in part]) == page_checksum(page, ranks * heads)


def test_the_tree_as_it_is_documented() -> None:
    page = bytes(range(240))
    heads = [xxhash.xxh3_64_intdigest(page[at : at + 60]) for at in range(0, 240, 60)]
    expected = xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in heads))
    assert page_checksum(page, 4) == expected
    assert len({page_checksum(page, count) for count in (1, 2, 4)}) == 3


@pytest.mark.parametrize("size", [64, 4_096, 2**16, 2**18])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_a_copy_is_whole_and_tells_the_checksum_of_what_lies_there(size: int, heads: int) -> None:
    source = random.Random(size).randbytes(size * heads)
    target = bytearray(size * heads)
    assert copy_page(memoryview(target), source, heads) == page_checksum(source, heads)
    assert target == source


@pytest.mark.parametrize(("size", "heads"), [(10, 3), (10, 0), (0, 1), (2, 4)])
def test_heads_that_do_not_divide_a_page(size: int, heads: int) -> None:
    for check in (head_checksums, page_checksum):
        with pytest.raises(ValueError, match="KV heads"):
            check(bytes(size), heads)
    with pytest.raises(ValueError, match="KV heads"):
        copy_page(memoryview(bytearray(size)), bytes(size), heads)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_s_slice_holds_whole_heads_in_every_form(form: str) -> None:
    layout = PageLayout(3, 8, 32, 32, "float32", form)
    page = random.Random(1).randbytes(layout.page_bytes)
    for size in (1, 2, 4, 8):
        share = layout.page_bytes // size
        parts = [head_checksums(page[rank * share : (rank + 1) * share], 8 // size) for rank in range(size)]
        assert join_checksums([each for part in parts for each in part]) == page_checksum(page, 8)
