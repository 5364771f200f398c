"""Attention sinks, a window and chosen pages: what the output of a request attends to where it asks for that
(`KvCompression`).

Each token of the prompt attends to all before it, so its pages are those of any other request. A token of the output
attends to the pages of the first `sinks` tokens, and to the pages from that of its window's first token on. The pages
between are its *gap*. It depends on nothing but the token's position, so every path to a token computes the same. Keys
keep the rotation of their positions in the whole text. (StreamingLLM, ICLR 2024, rotates by the place in the cache.)

       sinks          gap, given back          window
    |0 ... 3|4 ........................ 119|120 ... 135|     entries of the block table
    |0 ... 3|                              |  4 ...  19|     as the step attends to them

With `keep`, some pages of the prompt are *chosen* and are in no gap (SnapKV, NeurIPS 2024). The last tokens of the
prompt are observed: how much they attend to each page, summed over them, over heads, and over all layers but the last.
The pages with most are chosen, once for all layers. (SnapKV chooses tokens, for each head of each layer.) So the
choice follows from the prompt and the request's options.

The first tokens of an output have no gap. Their pages are exact, as those of the prompt are, and only exact pages are
cached, stored or fetched. Pure.
"""

# pyright: strict

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from baton.messages import KvCompression

MOST_OBSERVED = 16
"""Tokens of a prompt. Of the demo model's questions 16 find the page of the fact more often than 32 or 64."""


class KvWindow(Struct, frozen=True):
    """The window of one request. `sinks` are pages, `tokens` is the window, a token's own position included. `chosen`
    are pages between, in order; `keep` more are to be chosen when the prompt's last tokens have been observed."""

    prompt: int  # tokens
    sinks: int
    tokens: int
    page_size: int
    keep: int = 0
    chosen: tuple[int, ...] = ()

    @classmethod
    def of(cls, order: KvCompression | None, prompt: int, page_size: int) -> KvWindow | None:
        """Return the window that a request has with a prompt of so many tokens; none: it asks for none."""
        if order is None:
            return None
        keep = -(-order.keep // page_size) if order.kind == "snapkv" else 0
        window = cls(prompt, -(-order.sinks // page_size), order.window, page_size, keep)
        between = range(window.sinks, window._begin(prompt))
        return window if len(between) > keep else replace(window, keep=0, chosen=tuple(between) if keep else ())

    @property
    def observed_from(self) -> int:
        """The first token that is observed; none of a prompt, if nothing is to be chosen. All are in the window of the
        output's first token, so each sees all pages that may be chosen."""
        return max(0, self.prompt - min(MOST_OBSERVED, self.tokens)) if self.keep else self.prompt

    def choose(self, weights: Sequence[Sequence[float]]) -> KvWindow:
        """Return the window with the pages that the observed tokens attend to most, of equal ones the first. `weights`
        has for each of these tokens how much that is, by page."""
        totals = dict.fromkeys(range(self.sinks, self._begin(self.prompt)), 0.0)
        for row in weights:
            for page in totals:
                totals[page] += row[page]
        best = sorted(totals, key=lambda page: (-totals[page], page))[: self.keep]
        return replace(self, keep=0, chosen=tuple(sorted(best)))

    def gap(self, position: int) -> int:
        """How many pages before its window the token at this position does not attend to."""
        if position < self.prompt:
            return 0
        begin = self._begin(position)
        return max(0, begin - self.sinks) - bisect_left(self.chosen, begin)

    def first_page(self, computed: int) -> int:
        """The first page of the window of the token after `computed` tokens; 0: it has no gap."""
        return self._begin(computed) if self.gap(computed) else 0

    def anchors(self, first: int) -> tuple[int, ...]:
        """The pages before page `first` that all tokens attend to."""
        return (*range(min(self.sinks, first)), *self.chosen[: bisect_left(self.chosen, first)])

    @property
    def exact(self) -> int:
        """Tokens from the start without a gap, whatever is chosen."""
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

    def held(self, first: int, apart: bool = False) -> int:
        """The same of a sequence whose window begins at page `first`; `apart`: what it keeps behind the sinks are
        copies, so nothing stays for them."""
        return self.most if first < self._exact_pages and not apart else self._num_anchors + self.pages

    def reach(self, computed: int) -> int:
        """The entries that a block table may have after `computed` tokens, so that no more than `most` are held."""
        first = self.first_page(computed)
        return self.most if first < self._exact_pages else first + self.most - self._num_anchors

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the positions `start` to `end` − 1 whose tokens have one window, with the first page of
        that; 0: they have no gap."""
        while start < end:
            first = self.first_page(start)
            border = (first + 1) * self.page_size + self.tokens - 1 if first else self._gapless
            yield start, min(end, border), first
            start = border

    @property
    def _gapless(self) -> int:
        """Tokens from the start without a gap."""
        first = self.sinks
        for page in self.chosen:
            first += page == first
        return max(self.prompt, (first + 1) * self.page_size + self.tokens - 1)

    @property
    def _num_anchors(self) -> int:
        return self.sinks + (self.keep or len(self.chosen))

    @property
    def _exact_pages(self) -> int:
        return -(-self.exact // self.page_size)

    def _begin(self, position: int) -> int:
        """The page in which the window of a token begins."""
        return max(0, (position - self.tokens + 1) // self.page_size)
