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

Some windows choose *again* each time the output has grown by `tokens` (after H2O, NeurIPS 2023). Its last tokens are
observed, and pages are chosen of those chosen before and those that the window leaves. The others of these are given
back for good. The window stands still between two choices.

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
    are pages between, in order; `keep` more are to be chosen when the prompt's last tokens have been observed. Where it
    chooses `again`, `chosen` holds from position `since` on; 0: no page was chosen yet."""

    prompt: int  # tokens
    sinks: int
    tokens: int
    page_size: int
    keep: int = 0
    chosen: tuple[int, ...] = ()
    again: bool = False
    since: int = 0

    @classmethod
    def of(cls, order: KvCompression | None, prompt: int, page_size: int) -> KvWindow | None:
        """Return the window that a request has with a prompt of so many tokens; none: it asks for none."""
        if order is None:
            return None
        keep = 0 if order.kind == "window" else -(-order.keep // page_size)
        again = order.kind == "h2o"
        return cls(prompt, -(-order.sinks // page_size), order.window, page_size, keep, again=again).anew()

    def anew(self) -> KvWindow:
        """Return the window as it is before any token is computed. A choice that is made once stays."""
        if not self.again and self.chosen:
            return self
        between = range(self.sinks, self._page_of(self.prompt - self.tokens + 1))
        if len(between) > self.keep:
            return replace(self, chosen=(), since=0)
        chosen = tuple(between) if self.keep else ()
        return replace(self, chosen=chosen, since=self.prompt) if self.again else replace(self, keep=0, chosen=chosen)

    @property
    def observed_until(self) -> int:
        """The tokens that are known when the next choice is made."""
        return self.since + self.tokens if self.since else self.prompt

    @property
    def observed_from(self) -> int:
        """The first token that is observed before that; none, if nothing is to be chosen. All are in the window of the
        next token, so each sees all pages that may be chosen."""
        until = self.observed_until
        return max(0, until - min(MOST_OBSERVED, self.tokens)) if self.keep else until

    def choose(self, weights: Sequence[Sequence[float]]) -> KvWindow:
        """Return the window with the pages that the observed tokens attend to most, of equal ones the first. `weights`
        has for each of these tokens how much that is, by page of those that it attends to."""
        until, first = self.observed_until, self.first_page(self.observed_until - 1)
        seen = (*self.anchors(first), *range(first, self._page_of(until - self.tokens + 1)))
        totals = {page: sum(row[at] for row in weights) for at, page in enumerate(seen) if page >= self.sinks}
        best = tuple(sorted(sorted(totals, key=lambda page: (-totals[page], page))[: self.keep]))
        return replace(self, chosen=best, since=until) if self.again else replace(self, keep=0, chosen=best)

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
        return self.prompt if self.again else max(self.prompt, (self.sinks + 1) * self.page_size + self.tokens - 1)

    @property
    def pages(self) -> int:
        """How many pages a window touches at most."""
        return -(-(self.tokens - 1) * (1 + self.again) // self.page_size) + 1

    @property
    def most(self) -> int:
        """Device pages that a sequence takes at most: pages before its window stay cached while it attends to exact
        ones. Beside these it may have chosen others."""
        return max(self._exact_pages, self.sinks) + self.keep * self.again + self.pages

    def held(self, first: int, apart: bool = False) -> int:
        """The same of a sequence whose window begins at page `first`; `apart`: what it keeps behind the sinks are
        copies, so nothing stays for them."""
        return self.most if first < self._exact_pages and not apart else self._num_anchors + self.pages

    def reach(self, computed: int, apart: bool = False) -> int:
        """The entries that a block table may have after `computed` tokens, so that no more than `most` are held."""
        first = self.first_page(computed)
        if first < self._exact_pages:
            return self.most
        return first + (self.most - self._num_anchors if apart or not self.chosen else self.pages)

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the positions `start` to `end` − 1 whose tokens have one window, with the first page of
        that; 0: they have no gap."""
        while start < end:
            first = self.first_page(start)
            border = (first + 1) * self.page_size + self.tokens - 1 if first else self._gapless
            if self.since:  # it stands still until the next choice
                border = self.prompt if start < self.prompt and self.first_page(self.prompt) else end
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
        return self._page_of((self.since or position) - self.tokens + 1)

    def _page_of(self, position: int) -> int:
        return max(0, position // self.page_size)
