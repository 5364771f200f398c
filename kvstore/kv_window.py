"""Attention sinks and a window: what the output of a request attends to where it asks for that (`KvCompression`).

Each token of the prompt attends to all before it, so its pages are those of any other request. A token of the output
attends to the pages of the first `sinks` tokens, and to the pages from that of its window's first token on. The pages
between are its *gap*. It depends on nothing but the token's position, so every path to a token computes the same. Keys
keep the rotation of their positions in the whole text. (StreamingLLM, ICLR 2024, rotates by the place in the cache.)

       sinks          gap, given back          window
    |0 ... 3|4 ........................ 119|120 ... 135|     entries of the block table
    |0 ... 3|                              |  4 ...  19|     as the step attends to them

The first tokens of an output have no gap. Their pages are exact, as those of the prompt are, and only exact pages are
cached, stored or fetched. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from baton.messages import KvCompression


class KvWindow(Struct, frozen=True):
    """The window of one request. `sinks` are pages, `tokens` is the window, a token's own position included."""

    prompt: int  # tokens
    sinks: int
    tokens: int
    page_size: int

    @classmethod
    def of(cls, order: KvCompression | None, prompt: int, page_size: int) -> KvWindow | None:
        """Return the window that a request has with a prompt of so many tokens; none: it asks for none."""
        if order is None:
            return None
        return cls(prompt, -(-order.sinks // page_size), order.window, page_size)

    def gap(self, position: int) -> int:
        """How many pages behind the sinks the token at this position does not attend to."""
        if position < self.prompt:
            return 0
        return max(0, (position - self.tokens + 1) // self.page_size - self.sinks)

    def first_page(self, computed: int) -> int:
        """The first page behind the gap of the token after `computed` tokens; 0: it has none."""
        gap = self.gap(computed)
        return self.sinks + gap if gap else 0

    @property
    def exact(self) -> int:
        """Tokens from the start without a gap."""
        return max(self.prompt, (self.sinks + 1) * self.page_size + self.tokens - 1)

    @property
    def pages(self) -> int:
        """How many pages a window touches at most."""
        return -(-(self.tokens - 1) // self.page_size) + 1

    @property
    def most(self) -> int:
        """Device pages that a sequence takes at most: pages before its window stay cached while the window has exact
        ones."""
        return self._exact_pages + self.pages

    def held(self, first: int) -> int:
        """The same of a sequence whose window begins at page `first`."""
        return self.most if first < self._exact_pages else self.sinks + self.pages

    def reach(self, computed: int) -> int:
        """The entries that a block table may have after `computed` tokens, so that no more than `most` are held."""
        first = self.first_page(computed)
        return self.most if first < self._exact_pages else first + self.most - self.sinks

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the positions `start` to `end` − 1 whose tokens have one gap, with that."""
        while start < end:
            gap = self.gap(start)
            border = (self.sinks + gap + 1) * self.page_size + self.tokens - 1 if gap else self.exact
            yield start, min(end, border), gap
            start = border

    @property
    def _exact_pages(self) -> int:
        return -(-self.exact // self.page_size)
