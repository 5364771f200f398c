"""A device and an arena that notice a wrong page.

At a position of a page lies a digest of every token up to there, as K and V depend on all of them. A step that finds
any other digest below its chunk has read a wrong, stale or half-copied page, and fails at once.
"""

# pyright: strict

from collections.abc import Iterator, Sequence

from engine.step.batch import Chunk
from engine.step.block_table import BlockTable
from kvstore.client.device_block_manager import DuplicatePage
from kvstore.client.transfer import Copy, CopyIn
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.transport import SlotMemory


def digests(tokens: Sequence[int]) -> list[int]:
    """Return what K and V stand for at each position."""
    value, values = 0, list[int]()
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


class PageMemory:
    """A store's arena: the digests of each slot. Pages have no checksums, and damage is told by itself."""

    def __init__(self, page_size: int) -> None:
        self.rubbish = [-1] * page_size  # what a damaged page has
        self._page_size = page_size
        self._slots: dict[int, list[int]] = {}

    def read_slot(self, slot: int, checksum: int = 0) -> list[int]:
        return list(self._slots.get(slot, [0] * self._page_size))

    def write(self, slot: int, contents: list[int]) -> None:
        self._slots[slot] = list(contents)

    def matches(self, contents: list[int], checksum: int) -> bool:
        return not self.spoilt(contents)

    def spoilt(self, contents: list[int]) -> bool:
        return contents == self.rubbish


class CheckingDevice:
    """A worker's device pages, and a model whose layers look at the last `window` positions, or at all. Beside these it
    may have `groups` of layers with a window and pages of their own."""

    def __init__(
        self, num_pages: int, page_size: int, window: int | None = None, groups: WindowGroups = NO_GROUPS
    ) -> None:
        self.pages = [[0] * page_size for _ in range(num_pages)]
        self._page_size, self._window, self._groups = page_size, window, groups

    def compute(self, known: Sequence[int], chunk: Chunk) -> int:
        """Check the pages below a chunk of the tokens `known` that it looks at, and write those of the chunk. Return
        its last digest."""
        expected, size, own = digests(known), self._page_size, chunk.kv_window
        if own is not None:  # its pages are no other sequence's
            same = own.anew()  # as long as the output lasts
            expected[own.exact :] = [hash((value, same)) for value in expected[own.exact :]]
        for position in self.read_positions(chunk):
            actual = self.pages[chunk.pages[position // size]][position % size]
            assert actual == expected[position], f"a wrong page was read at position {position}"
        assert list(chunk.tokens) == list(known[chunk.start : chunk.end])
        for position in range(chunk.start, chunk.end):
            self.pages[chunk.pages[position // size]][position % size] = expected[position]
        for position, (page, at), group in self.window_places(chunk):
            right = self.in_window(expected[position], group)
            if position < chunk.start:
                assert self.pages[page][at] == right, f"a wrong page of group {group} was read at position {position}"
            self.pages[page][at] = right
        return expected[chunk.end - 1]

    def window_places(self, chunk: Chunk) -> Iterator[tuple[int, tuple[int, int], int]]:
        """Each position that a group with a window reads or writes, where that is, and the group."""
        count, size = self._groups.count, self._page_size
        first = max(0, chunk.start - self._groups.tokens + 1) if count else chunk.end
        if isinstance(chunk.window_pages, BlockTable):
            assert chunk.window_pages.first <= first // size * count, "a window page was given back"
        positions = range(first, chunk.end)
        if self._groups.states:  # a page has one, which each chunk there changes
            assert chunk.start // size == (chunk.end - 1) // size, "a page's state is not kept"
            positions = [position for position in (chunk.start - 1, chunk.end - 1) if position >= 0]
        for position in positions:
            at = 0 if self._groups.states else position % size
            for group in range(count):
                yield position, (chunk.window_pages[position // size * count + group], at), group

    def in_window(self, digest: int, group: int) -> int:
        """What that group keeps where others keep `digest`."""
        return ~digest - group

    def read_positions(self, chunk: Chunk) -> Iterator[int]:
        """Yield the positions before a chunk that it looks at."""
        if (own := chunk.kv_window) is None:
            yield from range(self.first_read(chunk), chunk.start)
            return
        first = own.first_page(chunk.start)
        if isinstance(chunk.pages, BlockTable):
            assert chunk.pages.first <= first, "a page of the window was given back"
            assert chunk.pages.anchors == own.anchors(chunk.pages.first), "a page that is kept was given back"
        for position in range(chunk.start):
            if position >= first * self._page_size or position // self._page_size in own.anchors(first):
                yield position

    def first_read(self, chunk: Chunk) -> int:
        """The first position that the chunk looks at."""
        first = 0 if self._window is None else max(0, chunk.start - self._window + 1)
        if isinstance(chunk.pages, BlockTable):
            oldest = chunk.pages.first * self._page_size
            assert first >= oldest, f"position {first} lies in a page that was given back"
        return first

    def copy(self, copies: Sequence[Copy], arena: SlotMemory) -> None:
        """Copy pages from or to the store's arena."""
        for copy in copies:
            if isinstance(copy, CopyIn):
                self.pages[copy.page] = arena.read_slot(copy.slot, 0)
            else:
                arena.write(copy.slot, self.pages[copy.page])

    def duplicate(self, order: DuplicatePage) -> None:
        self.pages[order.dest] = list(self.pages[order.source])
