"""Block tables beside plain lists, and what a batch makes of them."""

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.step.batch import Chunk, TokenDraw, flatten
from engine.step.block_table import BlockTable
from tests.engine.driver import GREEDY

PAGE, PAGES, VOCAB = 4, 50, 100
pages = st.integers(0, PAGES - 1)


class TableMachine(RuleBasedStateMachine):
    """A table does what a list does. Steps that were given its array may go on with that."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.model: list[int] = []
        self.steps: list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[int]]] = []

    @rule(new=st.lists(pages, max_size=30))
    def extend(self, new: list[int]) -> None:
        self.table.extend(new)
        self.model += new

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 10_000), page=pages)
    def exchange(self, index: int, page: int) -> None:
        index %= len(self.model)
        self.table.exchange(index, page)
        self.model[index] = page
        self.steps = []  # the contents are the same, so a step may see either page

    @rule()
    def give_to_a_step(self) -> None:
        self.table.check(PAGES)
        self.steps.append((self.table.array, list(self.model)))

    @rule(bad=st.sampled_from([-1, PAGES, PAGES + 3]), after=st.lists(pages, max_size=2))
    def a_bad_page_is_found(self, bad: int, after: list[int]) -> None:
        self.table.check(PAGES)
        self.table.extend([bad, *after])
        with pytest.raises(ValueError, match=f"page {bad} is not in 0 to {PAGES - 1}"):
            self.table.check(PAGES)
        self.table.exchange(len(self.model), 0)
        self.table.check(PAGES)
        self.model += [0, *after]

    @invariant()
    def is_the_list(self) -> None:
        assert list(self.table) == self.model
        assert list(reversed(self.table)) == self.model[::-1]
        assert len(self.table) == len(self.model)
        assert self.table[2:7] == self.model[2:7]
        assert [self.table[at] for at in range(len(self.model))] == self.model
        there = (ctypes.c_int64 * len(self.model)).from_address(self.table.address)
        assert list(there) == self.model

    @invariant()
    def steps_keep_what_they_were_given(self) -> None:
        for array, expected in self.steps:
            assert array[: len(expected)].tolist() == expected


TestTable = TableMachine.TestCase


def test_a_list_has_no_entry_beyond_its_end() -> None:
    table = BlockTable([1, 2])
    with pytest.raises(IndexError):
        table[2]


def test_another_pool_is_checked_anew() -> None:
    table = BlockTable([1, 9])
    table.check(10)
    with pytest.raises(ValueError, match="page 9 is not in 0 to 8"):
        table.check(9)


lengths = st.tuples(st.integers(0, 30), st.one_of(st.just(1), st.integers(1, 20)))


@given(st.lists(lengths, min_size=1, max_size=6), st.data())
def test_a_batch_lays_chunks_end_to_end(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    chunks: list[Chunk] = []
    for start, count in sizes:
        covering = -(-(start + count) // PAGE)
        own = data.draw(st.lists(pages, min_size=covering, max_size=covering + 2))
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
        in_table = data.draw(st.booleans())
        chunks.append(
            Chunk(tokens, start, BlockTable(own) if in_table else own, data.draw(st.sampled_from([None, GREEDY])))
        )
    batch = flatten(chunks, PAGE, PAGES, VOCAB)
    rows = [(chunk, position) for chunk in chunks for position in range(chunk.start, chunk.end)]
    assert batch.tokens.tolist() == [token for chunk in chunks for token in chunk.tokens]
    assert batch.positions.tolist() == [position for _, position in rows]
    assert batch.write_pages.tolist() == [chunk.pages[position // PAGE] for chunk, position in rows]
    assert batch.write_offsets.tolist() == [position % PAGE for _, position in rows]
    for chunk, span in zip(chunks, batch.spans, strict=True):
        expected = list(chunk.pages[: -(-chunk.end // PAGE)])
        assert batch.pages_of(span).tolist() == expected
        for address in batch.tables[span.first : span.last].tolist():
            assert list((ctypes.c_int64 * len(expected)).from_address(address)) == expected
    lasts = [span.last - 1 for chunk, span in zip(chunks, batch.spans, strict=True) if chunk.sample]
    assert batch.sample_rows.tolist() == lasts
    begun = [chunk for chunk in chunks if chunk.end % PAGE and chunk.end // PAGE * PAGE >= chunk.start]
    assert batch.fresh_pages.tolist() == [chunk.pages[chunk.end // PAGE] for chunk in begun]


@pytest.mark.parametrize(
    ("tokens", "start", "own", "message"),
    [
        ([], 0, [1], "needs tokens"),
        ([1], -1, [1], "1 tokens at -1"),
        ([1] * 5, 0, [1], "positions up to 4 need 2 pages, not 1"),
        ([1, VOCAB], 0, [1], "token id 100 is not in 0 to 99"),
        ([1, -7], 0, [1], "token id -7 is not"),
        ([1], 0, [PAGES], "page 50 is not in 0 to 49"),
        ([1], 4, [-1, 3], "page -1 is not"),
    ],
)
@pytest.mark.parametrize("in_table", [True, False])
def test_what_no_pool_could_run_is_refused(
    tokens: list[int], start: int, own: Sequence[int], message: str, in_table: bool
) -> None:
    chunk = Chunk(tokens, start, BlockTable(own) if in_table else own)
    with pytest.raises(ValueError, match=message):
        flatten([Chunk([3], 0, [7]), chunk], PAGE, PAGES, VOCAB)


def test_a_table_is_in_a_batch_once() -> None:
    table = BlockTable([1, 2])
    with pytest.raises(ValueError, match="one block table"):
        flatten([Chunk([3], 0, table), Chunk([3], 1, table, TokenDraw())], PAGE, PAGES, VOCAB)


def test_a_batch_without_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one chunk"):
        flatten([], PAGE, PAGES, VOCAB)
