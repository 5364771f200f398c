"""Refill: the cached pages of a worker's device on their way to a store that has lost them.

    StoreUp ──▶ keys of the cached pages ──tick──▶ Reserve ▶ Reserved ▶ CopyOut ▶ Seal ▶ Sealed ──▶ next run
                                            ▲                                                 │
                                            └─────────── quota, or room is needed here ───────┘

A restarted store has an empty arena, while its workers still have pages of earlier prompts on their devices. A worker
that attaches offers them: the parents before their children, and the least recently used first, so that both keep their
order. It offers one run of a chain at a time, of `_RUN` pages at most. It begins the next one at once while it has no
work, else every `_PERIOD` seconds, as after a run that gave way. What the store has already is not copied.

The worker owns the list of keys. A page of the run has a reference of the refill, and every other page may be evicted
meanwhile: it is skipped then. No request waits for a refill: a run gives way where pages run out, and is offered later.

- The worker dies: the store frees the slots of the run once the kernel has told so. Sealed pages stay.
- The store dies: the list and the run are forgotten (`stop`). The next store gets a list of its own.
- The store says nothing for too long: the same. It is asked again when it attaches the worker anew.
- The arena has no room for a run: it is skipped. A refill never offers more pages than the arena has slots.

Pure.
"""

# pyright: strict

from collections import deque
from collections.abc import Iterator

from kvstore.client.device_block_manager import CachedPage, DeviceBlockManager
from kvstore.client.transfer import CallStore, CopyQueue, StorePages, TransferEvent
from kvstore.keys import START

_RUN = 16  # pages, and at most this share of the arena's slots: a worker may reserve only so many
_SHARE = 1 / 16
_PERIOD = 0.1  # seconds between the beginnings of two runs while the worker has work


class StoreRefill:
    """The refill of one worker: none, or one under way."""

    def __init__(self, blocks: DeviceBlockManager, leases: Iterator[int]) -> None:
        self._blocks, self._leases = blocks, leases
        self.copies = CopyQueue(blocks)
        self._waiting: deque[bytes] = deque()
        self._run: list[CachedPage] = []
        self._write: StorePages | None = None  # of the run
        self._most = _RUN
        self._gave_way = False
        self._began = self._progressed_at = 0.0  # of the last run, seconds
        self._written = 0

    def begin(self, slots: int) -> None:
        """Offer what is cached now to a store with so many slots. Nothing may be under way."""
        self._waiting = deque(self._blocks.keys_by_use()[-slots:])
        self._most = max(1, min(_RUN, int(slots * _SHARE)))

    def tick(self, now: float, paused: float, most: float, *, idle: bool) -> list[CallStore]:
        """Offer the next run if it is time. Stop if the store has said nothing for `most` seconds, in which the worker
        had neither been paused nor owed it a copy."""
        if self._write is None:
            at_once = idle and not self._gave_way
            return self._begin_run(now) if at_once or now - self._began >= _PERIOD else []
        self._progressed_at = now if self.copies else self._progressed_at + paused
        return self.stop() if now - self._progressed_at > most else []

    def handle(self, lease: int, event: TransferEvent, now: float) -> list[CallStore]:
        """Take an event about a lease, which may be another one's."""
        write = self._write
        if write is None or write.lease != lease:
            return []
        self._progressed_at = now
        calls = self.copies.add_copies(write.handle(event))
        if write.refused == "quota":  # the worker's prompts need their share
            return calls + (self.give_way() or [])
        return calls + (self._end_run() if write.done or write.refused else [])

    def give_way(self) -> list[CallStore] | None:
        """Let go of the pages of the run, and offer them later. None: there is no run."""
        if self._write is None:
            return None
        self._waiting.extendleft(page.key for page in reversed(self._run))
        self._gave_way = True
        return self._end_run()

    def stop(self) -> list[CallStore]:
        """Offer nothing more."""
        self._waiting.clear()
        return self._end_run()

    def _begin_run(self, now: float) -> list[CallStore]:
        while self._waiting and len(self._run) < self._most:
            page = self._blocks.find(self._waiting[0])
            if page is not None and self._run and not _goes_with(page, self._run[-1]):
                break
            self._waiting.popleft()
            if page is not None:
                self._run.append(page)
        if not self._run:
            return []
        self._began, self._progressed_at, self._gave_way = now, now, False
        self._blocks.incref([page.page for page in self._run])
        keys = [page.key for page in self._run]
        apart = self._run[0].apart
        parent = START if apart else self._run[0].parent
        self._write = StorePages(next(self._leases), parent, keys, hold=False, apart=apart)
        calls = self.copies.add_copies(self._write.start())
        for index, page in enumerate(self._run):
            calls += self.copies.add_copies(self._write.offer(index, page.page))
        return calls

    def _end_run(self) -> list[CallStore]:
        write, self._write = self._write, None
        if write is None:
            return []
        self._written += write.pages_written
        self._blocks.free([page.page for page in self._run])
        self._run = []
        return self.copies.end_lease(write.lease)

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Pages that were sealed so far."""
        return self._written + (self._write.pages_written if self._write else 0)

    @property
    def leases(self) -> tuple[int, ...]:
        return (*([self._write.lease] if self._write else []), *self.copies.ending)

    @property
    def pages(self) -> list[int]:
        """The device pages that it refers to."""
        return [page.page for page in self._run]

    def validate(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests."""
        assert bool(self._run) == (self._write is not None)
        assert self.copies.leases <= set(self.leases)


def _goes_with(page: CachedPage, last: CachedPage) -> bool:
    """Whether one write may have both: pages of a chain, or pages apart."""
    return page.apart == last.apart and (page.apart or page.parent == last.key)
