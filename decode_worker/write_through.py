"""Write-through: full pages of running sequences on their way to the node's store.

A write-through never waits for space, and no request waits for it. While a page is on its way it stays referenced, also
when its sequence has gone. Where pages run out, pages with no other reference are given up before any sequence is
preempted. So is a write whose store says nothing about it for too long.
"""

# pyright: strict

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from baton.messages import MAX_KEYS_PER_CALL
from decode_worker.sequence import Sequence
from engine.step.block_table import BlockTable
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore, CopyQueue, StorePages, TransferEvent


@dataclass
class _PageWrite:
    """With the device pages that stay referenced until it ends."""

    store: StorePages
    pages: list[int]
    sequence: Sequence
    table: BlockTable  # where they stand, from entry `start` on
    start: int
    progressed_at: float  # seconds

    @property
    def let_go(self) -> list[int]:
        """The pages that would become available, but for those that others refer to. A cached page does not while the
        sequence has cached pages after it."""
        sequence, now = self.sequence, self.sequence.pages
        if not now:
            return self.pages
        if self.store.apart:
            gone = self.table is not sequence.window_pages
            return self.pages[: len(self.pages) if gone else max(0, self.table.first - self.start)]
        if sequence.window is None:  # if it was preempted and resumed, it refers to the same pages again
            return []
        if now is self.table:
            return self.pages[max(0, sequence.cached_pages - self.start) : max(0, now.first - self.start)]
        again = now[self.start : self.start + len(self.pages)]
        return [page for page, own in zip_longest(self.pages, again) if page != own]


class WriteThrough:
    """All that are under way."""

    def __init__(self, cache: DeviceBlockManager, leases: Iterator[int], page_size: int) -> None:
        self._blocks, self._numbers, self._page_size = cache, leases, page_size
        self._under_way: dict[int, _PageWrite] = {}  # by lease, oldest first
        self.copies = CopyQueue(cache)
        self.written = 0  # pages that were sealed
        self.refused = 0  # writes that the store had no room for

    @property
    def leases(self) -> tuple[int, ...]:
        return (*self._under_way, *self.copies.ending)

    def store(self, sequence: Sequence, now: float) -> list[CallStore]:
        """Write the pages of `sequence` that have filled up since the last time."""
        full = min(sequence.computed, sequence.exact) // self._page_size
        if sequence.stored_pages < sequence.pages.first:  # given back while there was no store
            sequence.writes_through = False
        first, sequence.stored_pages = sequence.stored_pages, max(sequence.stored_pages, full)
        if not sequence.writes_through:
            return []
        calls: list[CallStore] = []
        for start in range(first, full, MAX_KEYS_PER_CALL):
            end = min(start + MAX_KEYS_PER_CALL, full)
            store = StorePages(next(self._numbers), sequence.parent_of(start), sequence.keys[start:end], hold=False)
            calls += self._begin(_PageWrite(store, sequence.pages[start:end], sequence, sequence.pages, start, now))
        return calls + self._store_windows(sequence, first, full, now)

    def _store_windows(self, sequence: Sequence, first: int, full: int, now: float) -> list[CallStore]:
        """The same for window pages: those that a sequence needs which goes on behind page `full`, or behind those that
        this one was to fetch."""
        groups, table = sequence.groups, sequence.window_pages
        calls: list[CallStore] = []
        for end in sorted({min(sequence.branch, full), full}) if groups.count else ():
            first = max(first, groups.first_page(end * self._page_size), -(-table.first // groups.count))
            keys = groups.keys(sequence.keys[first:end])
            for at in range(0, len(keys), MAX_KEYS_PER_CALL):
                part, start = keys[at : at + MAX_KEYS_PER_CALL], first * groups.count + at
                store = StorePages(next(self._numbers), b"", part, hold=False, apart=True)
                calls += self._begin(_PageWrite(store, table[start : start + len(part)], sequence, table, start, now))
            first = max(first, end)
        return calls

    def _begin(self, write: _PageWrite) -> list[CallStore]:
        self._blocks.incref(write.pages)
        self._under_way[write.store.lease] = write
        calls = self.copies.add_copies(write.store.start())
        for index, page in enumerate(write.pages):
            calls += self.copies.add_copies(write.store.offer(index, page))
        return calls

    def handle(self, lease: int, event: TransferEvent, now: float) -> list[CallStore]:
        """Something about a write; one that has ended means nothing any more."""
        page_write = self._under_way.get(lease)
        if page_write is None:
            return []
        page_write.progressed_at = now
        calls = self.copies.add_copies(page_write.store.handle(event))
        if page_write.store.refused:
            self.refused += 1
            page_write.sequence.writes_through = False
        if page_write.store.done or page_write.store.refused:
            calls += self._end(lease)
        return calls

    @property
    def spare(self) -> int:
        """Device pages that would be available if all were given up whose sequences have let go of theirs."""
        return sum(self._blocks.count_unshared(each.let_go) for each in self._under_way.values())

    def abandon(self) -> list[CallStore] | None:
        """End the oldest write of pages that their sequence has let go of; none: there is no such write."""
        for lease, page_write in self._under_way.items():
            if page_write.let_go:
                return self._end(lease)
        return None

    def tick(self, now: float, paused: float, most: float) -> list[CallStore]:
        """End the writes of which the store has said nothing for `most` seconds. While this worker has not made their
        copies, or was paused, the store is not to blame."""
        for lease in self.copies.leases:
            self._under_way[lease].progressed_at = now
        for page_write in self._under_way.values():
            page_write.progressed_at += paused
        late = [lease for lease, each in self._under_way.items() if now - each.progressed_at > most]
        return [call for lease in late for call in self._end(lease)]

    def end_all(self) -> list[CallStore]:
        """The store is gone."""
        return [call for lease in list(self._under_way) for call in self._end(lease)]

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests."""
        assert self.copies.leases <= set(self._under_way)

    def _end(self, lease: int) -> list[CallStore]:
        page_write = self._under_way.pop(lease)
        self.written += page_write.store.pages_written
        self._blocks.free(page_write.pages)
        return self.copies.end_lease(lease)
