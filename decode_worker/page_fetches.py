"""Fetches: pages of sequences on their way from the node's store to the device.

A fetch brings the pages of a chain in order. Those that have come count, whatever becomes of the rest. Its end leaves
copies that are under way: the pages that these write to are in limbo until then.
"""

# pyright: strict

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

from baton.messages import LowerTier, PageSource
from decode_worker.sequence import Sequence, SequencePhase
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.client.transfer import CallStore, CopyQueue, PageFetch, TransferEvent
from kvstore.load_or_recompute import LoadInProgress, LoadRegret, choose_load_length


class PageFetches:
    """All that are under way."""

    def __init__(self, blocks: DeviceBlockManager, leases: Iterator[int], page_size: int) -> None:
        self._numbers, self._page_size = leases, page_size
        self._sequences: dict[int, Sequence] = {}  # by lease
        self.copies = CopyQueue(blocks)
        self._regret = LoadRegret()
        self.short = 0  # those that have ended before all pages had come

    def start(self, sequence: Sequence, keys: Items[bytes], now: float) -> list[CallStore]:
        """Fetch the pages `keys`, which follow what is computed. They go to the sequence's own device pages."""
        have = sequence.computed // self._page_size
        sources = [PageSource(s.store, s.endpoint, s.pages - have) for s in sequence.sources if s.pages > have]
        sequence.branch = goal = have + len(keys)
        groups = sequence.groups
        first = max(have, groups.first_page(min(goal * self._page_size, len(sequence.tokens) - 1)))
        pages = sequence.pages[have:goal] + sequence.window_pages[first * groups.count : goal * groups.count]
        partial = goal > len(sequence.reusable_keys())
        fetch = PageFetch(
            self._numbers, keys, pages, sequence.prefilled_remotely, sequence.parent_of(have), sources,
            partial=partial, apart=groups.keys(keys[first - have :]),
        )  # fmt: skip
        sequence.phase, sequence.fetch, sequence.progressed_at = SequencePhase.WAITING_FOR_REMOTE_KVS, fetch, now
        self._sequences |= dict.fromkeys(fetch.leases, sequence)
        return [CallStore(call) for call in fetch.start()]

    def find(self, lease: int) -> Sequence | None:
        """The sequence that fetches by that lease. None: the fetch has ended, or it is no fetch."""
        return self._sequences.get(lease)

    def handle(self, sequence: Sequence, event: TransferEvent, now: float) -> tuple[list[CallStore], int]:
        """Take an event about this sequence's fetch. Return calls, and how many pages have come."""
        fetch = sequence.fetch
        assert fetch is not None
        before = fetch.usable
        calls = self.copies.add_copies(fetch.handle(event))
        sequence.progressed_at = now
        return calls, fetch.usable - before

    def decide(self, sequence: Sequence, page_bytes: int, rate: float, now: float) -> list[CallStore]:
        """Decide how much of a cached prefix that lower tiers have is worth loading, once the store has told what that
        is. `rate`: prompt tokens a second that this worker would compute."""
        fetch = sequence.fetch
        if fetch is None or not fetch.undecided:
            return []
        runs = fetch.runs
        choice = choose_load_length(runs, page_bytes, self._page_size, rate)
        if choice.pages:
            sequence.loading = LoadInProgress(choice, runs, now)
            sequence.loaded_from = fetch.here
        return [CallStore(call) for call in fetch.decide(choice.pages)]

    def end(self, sequence: Sequence, now: float) -> tuple[list[CallStore], bool]:
        """No more pages will come. Return calls, and whether all had come."""
        fetch = sequence.fetch
        if sequence.loading is not None and fetch is not None:
            self._regret.load_ended(sequence.loading, max(0, fetch.usable - sequence.loaded_from), now)
        complete = fetch is not None and fetch.complete
        self.short += not complete
        return self.drop(sequence), complete

    def drop(self, sequence: Sequence) -> list[CallStore]:
        """Stop the sequence's fetch, if it has one: copies that have not been handed out are not made."""
        fetch, sequence.fetch = sequence.fetch, None
        if fetch is None:
            return []
        calls: list[CallStore] = []
        for lease in fetch.leases:
            del self._sequences[lease]
            calls += self.copies.end_lease(lease)
        # Where copies under way still write.
        sequence.in_limbo = self.copies.busy([*sequence.pages, *sequence.window_pages.held])
        return calls

    def leave_limbo(self, sequence: Sequence) -> None:
        """Note which of its pages in limbo copies still write to."""
        if sequence.in_limbo:
            sequence.in_limbo = self.copies.busy(sequence.in_limbo)

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[int, ...]:
        return (*self._sequences, *self.copies.ending)

    @property
    def confirming(self) -> bool:
        """Whether the store need only confirm the pages of some fetch, whose copies were all made."""
        return any(s.fetch is not None and s.fetch.confirming for s in self._sequences.values())

    @property
    def regret(self) -> Mapping[LowerTier, float]:
        """Seconds lost to loads that took longer than computing would have."""
        return dict(self._regret.seconds)

    def validate(self, sequences: Iterator[Sequence]) -> None:
        """Raise AssertionError unless every invariant holds, with these sequences on the worker. For tests."""
        assert set(self._sequences) == {lease for s in sequences if s.fetch for lease in s.fetch.leases}
        assert self.copies.leases <= set(self._sequences)
