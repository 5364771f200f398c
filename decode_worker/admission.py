"""Admission of sequences by device pages, never by a count of requests.

Decides and changes nothing. A sequence that is the only one may have them all; beside others it must leave room for
what all of them are going to take (`decode_worker.growth_reserve`).
"""

# pyright: strict

from collections.abc import Collection
from math import inf

from decode_worker.growth_reserve import GrowthOutlook, GrowthReserve
from decode_worker.sequence import Sequence, SequencePhase
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.window_groups import WindowGroups


class SequenceAdmission:
    """Of newcomers, and of preempted sequences that are to be resumed."""

    def __init__(
        self, cache: DeviceBlockManager, growth_reserve: GrowthReserve, page_size: int, groups: WindowGroups
    ) -> None:
        self._blocks, self._reserve, self._page_size, self._groups = cache, growth_reserve, page_size, groups

    def displaced_by(
        self, newcomer: Sequence, sequences: Collection[Sequence], spare: int = 0
    ) -> list[Sequence] | None:
        """Return the sequences that must be preempted before `newcomer` has room, last in rank first; most often
        none. They are less urgent than it and come after it in rank. `spare` pages more than now would be available
        before that. None: there is no room, or a preempted sequence of higher rank has still to be resumed."""
        if any(s.phase is SequencePhase.PREEMPTED and s.rank < newcomer.rank for s in sequences):
            return None
        staying = sorted((s for s in sequences if s.pages), key=lambda s: s.rank)
        leaving: list[Sequence] = []
        freed = 0
        while not self.fits(newcomer, staying, freed):
            if spare:
                freed, spare = spare, 0
                continue
            if not staying or staying[-1].priority <= newcomer.priority or staying[-1].rank < newcomer.rank:
                return None
            leaving.append(staying.pop())
            freed += self._own(leaving[-1])
        return leaving

    def fits(self, sequence: Sequence, holders: Collection[Sequence], freed: int = 0) -> bool:
        """Whether it may have pages beside these `holders` of some, when `freed` pages more than now are available."""
        keys, pages = sequence.reservation()
        # What is freed may be what it would have shared.
        cached = 0 if freed else self._groups.match(self._blocks, keys)
        own = pages if freed else self._blocks.new_blocks_needed(keys[:cached], pages)
        first = self._groups.first_page(max(cached, sequence.coming) * self._page_size)
        windows = (pages - first) * self._groups.count
        left = self._blocks.available + freed - own - windows
        if left < 0 or not holders:
            return left >= 0
        outlooks = [self._outlook(each) for each in holders]
        return left >= self._reserve.pages_to_keep([*outlooks, _outlook(sequence, pages, own)], self._page_size)

    def growth_reserve(self, holders: Collection[Sequence]) -> int:
        return self._reserve.pages_to_keep([self._outlook(each) for each in holders], self._page_size)

    def sequence_ended(self, sequence: Sequence, cut: bool) -> None:
        """It takes no more pages; `cut`: its output would have gone on."""
        begun = sequence.first_new - sequence.prompt
        if sequence.generated > begun:
            self._reserve.output_ended(begun, sequence.generated, cut)

    def _outlook(self, holder: Sequence) -> GrowthOutlook:
        return _outlook(holder, holder.pages.num_held, self._own(holder))

    def _own(self, holder: Sequence) -> int:
        """How many pages only this sequence refers to."""
        pages = holder.pages
        return self._blocks.count_unshared(pages.held if pages.anchors else pages, 0 if pages.anchors else pages.first)


def _outlook(sequence: Sequence, pages: int, own: int) -> GrowthOutlook:
    generated = sequence.generated
    known = len(sequence.tokens) - (sequence.pages.first - len(sequence.pages.anchors)) * sequence.page_size
    return GrowthOutlook(generated, sequence.max_tokens - generated, known, pages, own, _most(sequence, pages))


def _most(sequence: Sequence, pages: int) -> float:
    """How many of the pool's pages it will ever take at a time. Those before its window are given back, but stay while
    cached ones after them are in use."""
    window = sequence.window
    if sequence.kv_window is not None:
        return sequence.kv_window.held(sequence.pages.first, sequence.apart)
    if window is None:
        return inf
    in_parts = sequence.in_parts if sequence.pages else sequence.must_be_in_parts
    cached = not in_parts and sequence.cached_pages >= sequence.pages.first
    return pages + window.pages if cached else max(pages, window.pages)
