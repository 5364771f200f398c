"""Groups of layers that attend to a window, beside one group of layers that attends to all positions.

Each group has pages of its own, all of equal bytes: a page is one group's K and V of `page_size` tokens. Those of the
group without a window are *main* pages: they make the chain that routers, stores and caches know. A *window page* has a
key that is derived from the main page of the same tokens. It stands apart: no page follows it. A missing window page is
no miss, unless the next token looks at it.

A recurrent state is a window page too: that of a page is the state at the page's end, and the next token looks at the
state alone, which is a window of two positions. No chunk goes beyond the end of a page, so that each page has its own.

In tables and lists of keys, window pages of the same tokens lie side by side, `count` for each main page. A model
without such groups has none: then all lists are empty. Pure.
"""

# pyright: strict

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from msgspec import Struct

from baton.messages import KEY_BYTES
from kvstore.client.device_block_manager import DeviceBlockManager


class Allocation(NamedTuple):
    """Device pages of a sequence: main ones, of which the first `cached` are complete, and window pages of those from
    number `first` on."""

    pages: list[int]
    cached: int
    window_pages: list[int]
    first: int


class WindowGroups(Struct, frozen=True):
    """`count` groups whose layers attend to `tokens` positions, a token's own among them. `states`: the model has
    recurrent states, and a token can be computed once only."""

    count: int = 0
    tokens: int = 1
    page_size: int = 1
    states: bool = False

    def longest_chunk(self, start: int, tokens: int) -> int:
        """How many of so many tokens from position `start` on a chunk may have."""
        return min(tokens, self.page_size - start % self.page_size) if self.states else tokens

    def first_page(self, computed: int) -> int:
        """The first page that the token after `computed` tokens looks at."""
        return max(0, computed - self.tokens + 1) // self.page_size

    def keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of the window pages beside the main pages `keys`, which may be partial."""
        return [
            blake2b(key + bytes([group]), digest_size=KEY_BYTES).digest() for key in keys for group in range(self.count)
        ]

    def match(self, blocks: DeviceBlockManager, keys: Sequence[bytes]) -> int:
        """How many pages at the start of `keys` are cached, with all that the next token looks at."""
        pages = blocks.match(keys)
        while self.count and pages:
            seen = range(self.first_page(pages * self.page_size), pages)
            lacking = [page for page in seen if any(blocks.find(key) is None for key in self.keys([keys[page]]))]
            if not lacking:
                break
            pages = lacking[-1]  # a window of more pages would have this one
        return pages

    def allocate(
        self, blocks: DeviceBlockManager, keys: Sequence[bytes], total: int, coming: int = 0
    ) -> Allocation | None:
        """`total` main pages, those of the cached prefix of `keys` among them, and the window pages that are looked at
        behind it. If the first `coming` pages are to be fetched, it is those behind these. None, and no change, when
        there is no room."""
        cached = self.match(blocks, keys)
        first = self.first_page(max(cached, coming) * self.page_size)
        seen = [page.page for key in self.keys(keys[first:cached]) if (page := blocks.find(key)) is not None]
        blocks.incref(seen)
        pages = blocks.allocate_with_prefix(keys[:cached], total)
        fresh = None if pages is None else blocks.allocate((total - max(first, cached)) * self.count)
        if pages is None or fresh is None:
            blocks.free([*(pages or ()), *seen])
            return None
        return Allocation(pages, cached, [*seen, *fresh], first)


NO_GROUPS = WindowGroups()
