"""The device pages of sequences: which each refers to, and what of them others may begin with.

Whole pages are shared by reference. Where a prompt leaves the cached pages in the middle of one, the longest beginning
in common is copied, and computed from there (as SGLang's radix tree matches tokens). A model whose layers have groups
has no such copies: its window pages would have to be copied, too. A prompt that is scored computes all of its tokens.
"""

# pyright: strict

from collections.abc import Sequence as Items

from decode_worker.batching import chunk_alignment
from decode_worker.sequence import Sequence, SequencePhase
from decode_worker.sliding_window import SlidingWindow
from engine.step.block_table import BlockTable
from kvstore.client.device_block_manager import FEWEST_COPIED, DeviceBlockManager, DuplicatePage
from kvstore.keys import pack_tokens
from kvstore.window_groups import WindowGroups


class SequencePages:
    """Lends pages of the device to sequences and takes them back."""

    def __init__(
        self, num_pages: int, page_size: int, window: SlidingWindow | None, groups: WindowGroups, *,
        tell_tokens: bool, fixed_borders: bool,
    ) -> None:  # fmt: skip
        """`window`: what every layer of the model has; none: some layer attends to all. `groups`: those that have one
        beside it. `tell_tokens`: events of cached pages have their tokens. `fixed_borders`: see
        `engine.runner.Runner`."""
        self.blocks = DeviceBlockManager(num_pages, tell_tokens=tell_tokens)
        self.total = num_pages
        self._page_size, self._window, self._groups = page_size, window, groups
        self._fixed_borders = fixed_borders

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence, or of it what its window looks at, has room if it is the only one."""
        # A sequence that is resumed may have to compute all its tokens, with the window pages of each.
        most = sequence.total_pages * (1 + self._groups.count)
        return most <= self.total or (self._window is not None and self._window.fits)

    def reserve(self, sequence: Sequence) -> list[DuplicatePage] | None:
        """Lend pages for every known token, or for a part of them, the cached prefix among them; all or nothing. The
        beginning of the page after it is copied if it is here."""
        keys, needed = sequence.reservation()
        in_parts = sequence.must_be_in_parts
        cached = self._groups.match(self.blocks, keys)
        alone = sequence.unscored or sequence.unobserved or in_parts
        beginning, copied = (0, 0) if alone else self._find_beginning(sequence, cached)
        allocation = self._groups.allocate(self.blocks, keys, needed, sequence.coming)
        if allocation is None:
            return None
        pages, _, window_pages, first = allocation
        sequence.pages = BlockTable(pages)
        sequence.window_pages = BlockTable(window_pages, first * self._groups.count)
        fresh = window_pages[max(0, cached - first) * self._groups.count :]
        sequence.in_limbo = self.blocks.in_limbo([*pages[cached:], *fresh])
        sequence.known_at_first, sequence.in_parts = len(sequence.tokens), in_parts
        sequence.computed, sequence.copied = cached * self._page_size, 0
        sequence.cached_pages = cached
        sequence.stored_pages = max(sequence.stored_pages, cached)
        if not copied or pages[cached] in sequence.in_limbo:
            return []
        sequence.computed += copied
        sequence.copied = copied
        return [] if pages[cached] == beginning else [DuplicatePage(beginning, pages[cached])]

    def _find_beginning(self, sequence: Sequence, cached: int) -> tuple[int, int]:
        """Return a page that goes on as the sequence does after its first `cached` pages, and for how many tokens it is
        to be copied. The last token of the page, or of all, is computed."""
        start = cached * self._page_size
        rest = sequence.tokens[start : min(start + self._page_size, sequence.exact) - 1]
        if not rest or self._groups.count:
            return 0, 0
        page, count = self.blocks.find_beginning(sequence.chain_before(cached), pack_tokens(rest))
        if start + count == len(sequence.tokens) - 1:
            return page, count
        if self._fixed_borders:
            count -= count % chunk_alignment(self._page_size)
        return page, count if count >= FEWEST_COPIED else 0

    def grow(self, sequence: Sequence, pages: int | None = None) -> bool:
        """Lend the pages that its table should have and lacks, or those up to so many. Return whether there were as
        many."""
        count = (sequence.table_pages if pages is None else pages) - len(sequence.pages)
        grown = self.blocks.allocate(count * (1 + self._groups.count))
        if grown is None:
            return False
        sequence.pages.extend(grown[:count])
        sequence.window_pages.extend(grown[count:])
        sequence.in_limbo += self.blocks.in_limbo(grown)
        return True

    def cache_full(self, sequence: Sequence) -> None:
        """Let others begin with its full pages."""
        if sequence.unscored:
            # A page of the same tokens may have other low bits, if kernels for few rows or another worker made it. In
            # exchange for it, the rest of the prompt would be scored by what happened to be cached.
            return
        for page in range(sequence.cached_pages, sequence.cacheable):
            tokens = sequence.tokens[page * self._page_size : (page + 1) * self._page_size]
            key = sequence.keys[page]
            self.blocks.cache_block(key, sequence.parent_of(page), sequence.pages[page], tokens)
            self._share_beginning(sequence, page, tokens)
            # A sequence below a cached page must refer to it. Otherwise the page would count as free once its maker has
            # gone.
            sequence.pages.exchange(page, self.blocks.deduplicate(key, sequence.pages[page]))
            self._cache_windows(sequence, page)
            sequence.cached_pages = page + 1

    def _cache_windows(self, sequence: Sequence, page: int) -> None:
        """The same for the window pages beside a page, unless they were given back."""
        main, table = sequence.keys[page], sequence.window_pages
        for entry, key in enumerate(self._groups.keys([main]), page * self._groups.count):
            if entry >= table.first:
                self.blocks.cache_block(key, main, table[entry], apart=True)
                table.exchange(entry, self.blocks.deduplicate(key, table[entry]))

    def share_last(self, sequence: Sequence) -> None:
        """Let others copy the page in which its computed tokens end."""
        page = sequence.computed // self._page_size
        tokens = sequence.tokens[page * self._page_size : sequence.computed]
        if not tokens or sequence.unscored or sequence.in_parts or page < sequence.pages.first:
            return
        if sequence.computed > sequence.exact:
            return
        self._share_beginning(sequence, page, tokens)

    def _share_beginning(self, sequence: Sequence, page: int, tokens: Items[int]) -> None:
        """Let others copy a page from the beginning. A page is found below the page before it, if that is cached."""
        if self._groups.count:
            return
        above = self.blocks.find(sequence.keys[page - 1]) if page else None
        if page == 0 or (above is not None and above.page == sequence.pages[page - 1]):
            self.blocks.share_beginning(sequence.chain_before(page), pack_tokens(tokens), sequence.pages[page])

    def give_back_unseen(self, sequence: Sequence) -> None:
        """Take back the pages that no layer looks at any more. Copies of them that are under way have references of
        their own."""
        self.give_back_windows(sequence)
        if self._window is not None:
            self._take_back(sequence, sequence.pages.give_back(self._window.first_page(sequence.computed)))
        if (own := sequence.kv_window) is not None:
            first = own.first_page(sequence.computed)
            self._take_back(sequence, sequence.pages.give_back(first, own.anchors(first)))

    def take_apart(self, sequence: Sequence) -> list[DuplicatePage]:
        """Copy the pages that a sequence keeps behind its sinks, if there is room now. A cached page keeps all before
        it in the cache, and these were given back."""
        own, pages = sequence.kv_window, sequence.pages
        if own is None or not own.chosen or not pages.first or sequence.apart:
            return []
        behind = [*(page for page in pages.anchors if page >= own.sinks), *range(pages.first, sequence.cached_pages)]
        copies = self.blocks.allocate(len(behind))
        if copies is None or self.blocks.in_limbo(copies):
            self.blocks.free(copies or ())
            return []
        orders = [DuplicatePage(pages[page], copy) for page, copy in zip(behind, copies, strict=True)]
        for page, copy in zip(behind, copies, strict=True):
            pages.exchange(page, copy)
        self.blocks.free([order.source for order in orders])
        sequence.apart = True
        return orders

    def give_back_windows(self, sequence: Sequence) -> None:
        """Take back the window pages that no layer looks at any more."""
        if self._groups.count:
            first = self._groups.first_page(sequence.computed) * self._groups.count
            self._take_back(sequence, sequence.window_pages.give_back(first))

    def _take_back(self, sequence: Sequence, unseen: list[int]) -> None:
        self.blocks.free(unseen)
        if sequence.in_limbo:
            sequence.in_limbo = [page for page in sequence.in_limbo if page not in unseen]

    def release(self, sequence: Sequence) -> None:
        """Take back all. Others may copy the last page until it is handed out."""
        if sequence.pages:
            self.share_last(sequence)
        self.blocks.free([*sequence.pages.held, *sequence.window_pages.held])
        sequence.pages, sequence.window_pages, sequence.in_limbo = BlockTable(), BlockTable(), []
        sequence.apart = False

    def validate(self, sequence: Sequence) -> None:
        """Raise AssertionError unless it has the pages that its phase and progress ask for. For tests."""
        pages = sequence.pages
        assert len(sequence.window_pages) == len(pages) * self._groups.count, sequence.name
        if (own := sequence.kv_window) is not None:
            assert pages.first <= own.first_page(sequence.computed), sequence.name
            assert pages.num_held <= own.most, sequence.name
            assert sequence.cached_pages * self._page_size <= own.exact, sequence.name
        elif pages.first:
            assert self._window is not None
            assert pages.first <= self._window.first_page(sequence.computed), sequence.name
        assert sequence.computed <= len(pages) * self._page_size or not pages, sequence.name
        if sequence.phase in (SequencePhase.PREEMPTED, SequencePhase.ENDED):
            assert not pages, sequence.name
        if sequence.phase in (SequencePhase.WAITING_FOR_REMOTE_KVS, SequencePhase.RUNNING):
            assert pages, sequence.name
