"""Which pages a sequence needs where every layer of the model attends to a window: those before it are given back.

A token at position p attends to the positions from p − window + 1 on, so a page that ends before them is read by no
later step. A sequence whose context is larger than the pool can run therefore. If its known tokens leave no room for
what follows, it is computed *in parts*: it holds a few pages more than its window, and computes as far as they reach.

Pages in the cache keep those before them in their chain there, referenced or not. So of a context that is larger than
the pool only the tokens known at first are cached. A sequence in parts neither uses the cache nor fills it.
"""

# pyright: strict

from msgspec import Struct

_PART = 512  # tokens besides its window for which a sequence in parts holds pages


class SlidingWindow(Struct, frozen=True):
    """The largest window of the model's layers, in tokens, a token's own position included; and a worker's pages."""

    tokens: int
    page_size: int
    num_pages: int

    def first_page(self, computed: int) -> int:
        """The first page that is read after `computed` tokens."""
        return max(0, computed - self.tokens + 1) // self.page_size

    @property
    def pages(self) -> int:
        """How many pages a token attends to at most, its own among them."""
        return -(-(self.tokens - 1) // self.page_size) + 1

    @property
    def part(self) -> int:
        """How many pages a sequence in parts holds."""
        return min(self.num_pages, self.pages + max(1, _PART // self.page_size))

    @property
    def fits(self) -> bool:
        """Whether the pool has room for a window and one page more, as any sequence needs."""
        return self.pages < self.num_pages

    def in_parts(self, known: int, total: int) -> bool:
        """Whether a sequence of `known` pages, which may become `total`, is computed in parts."""
        return total > self.num_pages and known + self.pages > self.num_pages
