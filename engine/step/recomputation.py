"""Recomputation: complete pages are computed once more, and compared bit by bit.

A checksum is taken of the bytes that lie in a slot. So a page that was wrong on the device is sealed as a valid one.
With `pages.recompute_share` a worker computes such a part of its complete pages again while it has nothing else to do:

    a prompt or an output ends ──▶ some of its pages are noted ──idle──▶ a step into a scratch page ──▶ ComparePages
        ──▶ PagesCompared ──differing──▶ not found any more, nor those after it; in the store: Acquire ▶ PageCorrupt

A step is one page. It reads the pages before it from the cache, and each of those may be noted, too. What was evicted
since is skipped. A sequence that runs on a differing page goes on. So do copies on disks and in other processes.

This holds where a page's bits depend on its tokens alone. Else pages differ that are sound. Pure.
"""

# pyright: strict

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from baton.messages import AttemptName
from baton.store_protocol import Acquire, EndLease, PageCorrupt, PagesReady, StoreCall
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepOutOfMemory
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore, TransferEvent
from kvstore.keys import START

NAME = AttemptName("", 1)
"""Of its chunks in plans. No request has this name."""
_MOST = 256  # pages noted


class ComparePages(Struct, frozen=True):
    """A command: compare the contents of two device pages, and tell by PagesCompared. `key` is that of the first."""

    key: bytes
    page: int
    scratch: int


class PagesCompared(Struct, frozen=True):
    """The pages of the last ComparePages have the same bytes, or not."""

    same: bool


class _Noted(NamedTuple):
    """A page of a sequence: its number, and all that it was made from."""

    number: int
    keys: Sequence[bytes]
    tokens: Sequence[int]
    adapter: str


class Recomputation:
    """The pages of one worker that are to be recomputed, and the one that is."""

    def __init__(
        self, blocks: DeviceBlockManager, leases: Iterator[int], page_size: int, share: float, seed: int = 0
    ) -> None:
        """`share` of all pages is noted, as the random numbers of `seed` choose."""
        self._blocks, self._leases, self._page_size, self._share = blocks, leases, page_size, share
        self._random = random.Random(seed)  # noqa: S311 - it chooses a sample
        self._noted: deque[_Noted] = deque()
        self._now: _Noted | None = None
        self.pages: list[int] = []  # that it refers to: the prefix, the page, the scratch page
        self._dropping: set[int] = set()  # leases of differing pages
        self.recomputed = self.differing = 0

    def note(self, tokens: Sequence[int], keys: Sequence[bytes], complete: int, adapter: str) -> None:
        """A sequence has ended whose first `complete` pages are cached. `tokens` and `keys` are not to change."""
        if self._share:
            for index in range(complete):
                if self._random.random() < self._share and len(self._noted) < _MOST:
                    self._noted.append(_Noted(index, keys, tokens, adapter))

    def plan(self) -> ScheduledBatch:
        """The step for a page, when there is no other work. Empty: there is no page, or one is in a step."""
        while self._noted and self._now is None:
            noted = self._noted.popleft()
            keys = noted.keys[: noted.number + 1]
            if self._blocks.match(keys) < len(keys):
                continue
            pages = self._blocks.allocate_with_prefix(keys, len(keys) + 1)
            if pages is None:
                continue
            if self._blocks.in_limbo(pages[-1:]):
                self._blocks.free(pages)
                self._noted.appendleft(noted)
                return {}
            self._now, self.pages = noted, pages
            start = noted.number * self._page_size
            tokens = noted.tokens[start : start + self._page_size]
            return {NAME: Chunk(tokens, start, [*pages[:-2], pages[-1]], adapter=noted.adapter)}
        return {}

    def step_ended(self, end: StepDone | StepOutOfMemory | StepFailed) -> list[ComparePages]:
        """Take the end of a step, which may be of another plan."""
        if NAME not in end.plan or (noted := self._now) is None:
            return []
        if isinstance(end, StepDone):
            return [ComparePages(noted.keys[noted.number], *self.pages[-2:])]
        self._let_go()
        return []

    def compared(self, event: PagesCompared) -> list[CallStore]:
        """Count it. A page that differs is not used again, nor those that were computed after it."""
        noted = self._now
        assert noted is not None, "nothing was to be compared"
        self._let_go()
        self.recomputed += 1
        if event.same:
            return []
        self.differing += 1
        key, parent = noted.keys[noted.number], noted.keys[noted.number - 1] if noted.number else START
        self._blocks.forget(key)
        lease = next(self._leases)
        self._dropping.add(lease)
        return [CallStore(Acquire(lease, key, False, parent))]

    def handle(self, lease: int, event: TransferEvent) -> list[CallStore]:
        """Take an event about a lease, which may be another one's."""
        if lease not in self._dropping:
            return []
        self._dropping.remove(lease)
        calls: list[StoreCall] = [PageCorrupt(lease, 0)] if isinstance(event, PagesReady) else []
        return [CallStore(call) for call in (*calls, EndLease(lease))]

    def store_changed(self) -> None:
        """Leases at the store that there was mean nothing any more."""
        self._dropping.clear()

    @property
    def leases(self) -> tuple[int, ...]:
        return tuple(self._dropping)

    @property
    def tokens(self) -> Sequence[int]:
        """Of the sequence whose page is in a step."""
        assert self._now is not None
        return self._now.tokens

    def _let_go(self) -> None:
        self._blocks.free(self.pages)
        self._now, self.pages = None, []
