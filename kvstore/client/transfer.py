"""Moving pages between a worker's device and its node's store, as pure state: what to ask, what to copy, what counts.

    PrefixLookup  what is there    Acquire ▶ PagesReady, PagesUnavailable, LowerTierHits (▶ Promote)
    PageFetch     store → device   Acquire ▶ PagesReady ▶ CopyIn ▶ Release ▶ Released(held)
    StorePages    device → store   Reserve ▶ Reserved ▶ CopyOut ▶ Seal ▶ Sealed

A page that a lookup finds is held from then on. A fetched page counts after Released. A stored page exists after
Sealed.

All belong to one attempt of one request and name device pages that the attempt keeps reserved until they end. The
worker's loop carries out the copies, between two steps of the engine or beside one, and reports them back.

Of a cached prefix, some may lie on tiers below the arena. Once the store has told about all of it, `runs` is what could
be loaded; the worker's state decides how much is worth it (`kvstore.load_or_recompute`) and says so to `decide`.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
from msgspec import Struct

from baton import store_protocol as protocol
from baton.messages import MAX_KEYS_PER_CALL, PageSource
from kvstore.client.device_block_manager import DeviceBlockManager


class CallStore(Struct, frozen=True):
    """A state's command: send this to the node's store. Dropped while there is none: its loss is told by StoreLost."""

    call: protocol.StoreCall


class CopyIn(msgspec.Struct, frozen=True):
    """Copy an arena slot into a device page."""

    lease: int
    index: int
    slot: int
    page: int
    checksum: int


class CopyOut(msgspec.Struct, frozen=True):
    """Copy a device page into an arena slot."""

    lease: int
    index: int
    page: int
    slot: int


class CopiedIn(Struct, frozen=True):
    """Those pages of the lease were copied in; `corrupt` ones did not match their checksum. `seconds` is what that
    took; none where the device has not told."""

    lease: int
    indices: tuple[int, ...]
    corrupt: tuple[int, ...] = ()
    seconds: float | None = None

    @property
    def pages(self) -> int:
        return len(self.indices) + len(self.corrupt)


class CopiedOut(Struct, frozen=True):
    """The pages of the lease from `first` on were copied out and have these checksums. `seconds`: as of CopiedIn."""

    lease: int
    first: int
    checksums: tuple[int, ...]
    seconds: float | None = None

    @property
    def pages(self) -> int:
        return len(self.checksums)


class StoreUp(Struct, frozen=True):
    """The node's store has attached this worker; its arena has `slots` slots of `page_bytes` bytes."""

    slots: int
    page_bytes: int


class StoreLost(Struct, frozen=True):
    """The node's store is gone; every lease with it."""


Copy: TypeAlias = CopyIn | CopyOut
TransferEvent: TypeAlias = protocol.StoreReply | CopiedIn | CopiedOut


def batches(copies: Sequence[Copy], most: int) -> Iterator[Sequence[Copy]]:
    """Neighbours of one kind, one lease and consecutive indices together, at most `most`: one word tells of each."""
    first = 0
    for end in range(1, len(copies) + 1):
        if end == len(copies) or end - first == most or not _follows(copies[end], copies[end - 1]):
            yield copies[first:end]
            first = end


def _follows(copy: Copy, last: Copy) -> bool:
    return copy.index == last.index + 1 and copy.lease == last.lease and type(copy) is type(last)


class _Acquisition:
    """The leases under which a chain is acquired, then pages apart, and what the store has said about each."""

    def __init__(
        self,
        leases: Iterator[int],
        keys: Sequence[bytes],
        wait: bool,
        parent: bytes,
        sources: Sequence[PageSource],
        *,
        partial: bool = False,
        apart: Sequence[bytes] = (),
    ) -> None:
        self._keys, self._wait, self._parent, self._sources = (*keys, *apart), wait, parent, sources
        self._chain = len(keys)
        self._partial = partial  # the last one of the chain is of a partial page
        self._bases: dict[int, int] = {}  # where the keys of each lease begin
        self._ends: dict[int, int] = {}
        for first, last in ((0, len(keys)), (len(keys), len(self._keys))):
            for base in range(first, last, MAX_KEYS_PER_CALL):
                self._bases[lease := next(leases)] = base
                self._ends[lease] = min(base + MAX_KEYS_PER_CALL, last)
        self._here: set[int] = set()  # pages that the arena has, or had
        self._below: dict[int, Sequence[protocol.TierPages]] = {}  # by lease
        self._unanswered = set(() if wait else self._bases)  # leases of which not everything is known yet
        self._decided = wait
        self.limit = len(self._keys)  # the first page that is known not to come

    @property
    def leases(self) -> tuple[int, ...]:
        return tuple(self._bases)

    def start(self) -> list[protocol.StoreCall]:
        calls: list[protocol.StoreCall] = []
        for lease, base in self._bases.items():
            end = self._ends[lease]
            keys = b"".join(self._keys[base:end])
            if base >= self._chain:
                whole = [source for source in self._sources if source.pages >= self._chain]
                sources = tuple(PageSource(source.store, source.endpoint, end - base) for source in whole)
                calls.append(protocol.Acquire(lease, keys, self._wait, b"", sources, apart=True))
                continue
            parent = self._keys[base - 1] if base else self._parent
            sources = tuple(
                PageSource(source.store, source.endpoint, source.pages - base)
                for source in self._sources
                if source.pages > base
            )
            partial = self._partial and end == self._chain
            calls.append(protocol.Acquire(lease, keys, self._wait, parent, sources, partial))
        return calls

    @property
    def undecided(self) -> bool:
        """All is known that the store can tell, and `decide` must be called."""
        return not self._decided and not self._unanswered

    @property
    def here(self) -> int:
        """Pages from the start that the arena has, without a gap."""
        return self._arrived(0, len(self._keys))

    @property
    def runs(self) -> list[protocol.TierPages]:
        """What lower tiers have after the pages that the arena has, without a gap."""
        runs: list[protocol.TierPages] = []
        for lease, base in self._bases.items():
            end = self._ends[lease]
            if self._here.issuperset(range(base, end)):
                continue
            runs += self._below.get(lease, ())
            if self._arrived(base, end) + sum(run.pages for run in self._below.get(lease, ())) < end - base:
                break
        return runs

    def decide(self, pages: int) -> list[protocol.StoreCall]:
        """Load the first `pages` of `runs`; nothing after them will come."""
        assert self.undecided
        self._decided = True
        here = self.here
        until = min(self.limit, here + pages)
        self.limit = until
        return [
            protocol.Promote(lease, min(until, self._ends[lease]) - base)
            for lease, base in self._bases.items()
            if until > max(base, here) and here < self._ends[lease]
        ]

    def _arrived(self, first: int, last: int) -> int:
        """How many pages from `first` on, before `last`, the arena has without a gap."""
        return next((index for index in range(first, last) if index not in self._here), last) - first

    def _hear(self, event: TransferEvent) -> None:
        match event:
            case protocol.PagesReady(lease=lease, pages=pages):
                base = self._bases[lease]
                self._here |= {base + page.index for page in pages}
                if self._here.issuperset(range(base, self._ends[lease])):
                    self._unanswered.discard(lease)
            case protocol.LowerTierHits(lease=lease, runs=runs):
                self._below[lease] = runs
                self._unanswered.discard(lease)
            case protocol.PagesUnavailable(lease=lease, index=index):
                self._unanswered.discard(lease)
                self._stop_at(lease, index)
            case _:
                pass

    def _stop_at(self, lease: int, index: int) -> None:
        if self._decided:
            self.limit = min(self.limit, self._bases[lease] + index)


class PrefixLookup(_Acquisition):
    """Finds, and holds, the prefix of a chain that the store has or can load."""

    def __init__(self, leases: Iterator[int], keys: Sequence[bytes], sources: Sequence[PageSource] = ()) -> None:
        super().__init__(leases, keys, False, b"", sources)

    @property
    def hits(self) -> int | None:
        """Pages of the prefix that the arena has; none until it is known how many these will be."""
        return self.limit if self._decided and self._here.issuperset(range(self.limit)) else None

    def handle(self, event: TransferEvent) -> None:
        self._hear(event)


class PageFetch(_Acquisition):
    """Brings the pages of `keys`, which follow `parent`, into the device pages `pages`, one for one, in order of the
    chain. With `wait` it is a hand-off, and nothing is to be decided; the last page may be a `partial` one then. Pages
    `apart` have keys behind those of the chain. Nothing counts before all of them do."""

    def __init__(
        self,
        leases: Iterator[int],
        keys: Sequence[bytes],
        pages: Sequence[int],
        wait: bool,
        parent: bytes = b"",
        sources: Sequence[PageSource] = (),
        *,
        partial: bool = False,
        apart: Sequence[bytes] = (),
    ) -> None:
        if len(keys) + len(apart) != len(pages):
            raise ValueError(f"{len(keys) + len(apart)} keys for {len(pages)} device pages")
        super().__init__(leases, keys, wait, parent, sources, partial=partial, apart=apart)
        self._pages = pages
        self._copied: set[int] = set()
        self._counted: set[int] = set()
        self.covered = 0  # pages from the start whose bytes count

    @property
    def usable(self) -> int:
        """Pages of the chain from the start that a step may read."""
        return self.covered if len(self._keys) == self._chain else self._chain * self.complete

    @property
    def in_arena(self) -> int:
        """Pages of the chain from the start that the arena has, whatever is lacking of those apart."""
        return min(self._arrived(0, self._chain), self.limit)

    @property
    def ended(self) -> bool:
        """Nothing more will come: all is covered, or all up to the first page that is not coming."""
        return self._decided and self.covered >= self.limit

    @property
    def confirming(self) -> bool:
        """Every page that will come was copied; the store need only confirm the last of them."""
        return self._decided and self.covered < self.limit <= len(self._copied)

    @property
    def complete(self) -> bool:
        return self.covered == len(self._keys)

    def handle(self, event: TransferEvent) -> list[protocol.StoreCall | Copy]:
        self._hear(event)
        match event:
            case protocol.PagesReady(lease=lease, pages=arrived):
                base = self._bases[lease]
                return [
                    CopyIn(lease, page.index, page.slot, self._pages[base + page.index], page.checksum)
                    for page in arrived
                ]
            case CopiedIn(lease=lease, indices=indices, corrupt=corrupt):
                for index in corrupt:
                    self._lost(lease, index)
                self._copied |= {self._bases[lease] + index for index in indices}
                calls: list[protocol.StoreCall | Copy] = [protocol.PageCorrupt(lease, index) for index in corrupt]
                return [*calls, protocol.Release(lease, indices)] if indices else calls
            case protocol.Released(lease=lease, indices=indices, held=held):
                for index, counts in zip(indices, held, strict=True):
                    if counts:
                        self._counted.add(self._bases[lease] + index)
                    else:
                        self._lost(lease, index)
                while self.covered in self._counted:
                    self.covered += 1
            case _:
                pass
        return []

    def _lost(self, lease: int, index: int) -> None:
        """A page that had arrived is no good: nothing after it is of use."""
        self._decided, self._unanswered = True, set()
        self._stop_at(lease, index)


class StorePages:
    """Writes the device pages of `keys` (at most 1,024), which follow `parent`, into the store; the last of them may be
    `partial`. Or they stand `apart`, without a parent.

    Pages are handed over with `ready` as their contents become complete, in any order."""

    def __init__(
        self, lease: int, parent: bytes, keys: Sequence[bytes], hold: bool, *, partial: bool = False, prompt: int = 0,
        apart: bool = False,
    ) -> None:  # fmt: skip
        """`prompt`: which prompt waits for slots; 0 if none does."""
        if not 0 < len(keys) <= MAX_KEYS_PER_CALL:
            raise ValueError(f"a write takes 1 to {MAX_KEYS_PER_CALL} pages, not {len(keys)}")
        self.lease = lease
        self._parent, self._keys, self._hold, self._partial = parent, keys, hold, partial
        self._prompt, self.apart = prompt, apart
        self._slots: tuple[int | None, ...] | None = None
        self._waiting: dict[int, int] = {}  # complete pages handed over before the slots were known: index → page
        self._missing = set(range(len(keys)))  # not known to be in the store yet
        self.refused: str | None = None  # why the store gave no slots
        self.pages_written = 0  # pages sealed by this write

    @property
    def count(self) -> int:
        return len(self._keys)

    @property
    def done(self) -> bool:
        return not self._missing

    def start(self) -> list[protocol.StoreCall]:
        """Ask for slots."""
        return [
            protocol.Reserve(self.lease, self._parent, b"".join(self._keys), self._partial, self._prompt, self.apart)
        ]

    def offer(self, index: int, page: int) -> list[protocol.StoreCall | Copy]:
        """The contents of page `index` lie complete in the device page `page`."""
        if self._slots is None:
            self._waiting[index] = page
            return []
        slot = self._slots[index]
        return [] if slot is None else [CopyOut(self.lease, index, page, slot)]

    def handle(self, event: TransferEvent) -> list[protocol.StoreCall | Copy]:
        """Take an event about this write's lease."""
        match event:
            case protocol.Reserved(slots=slots):
                self._slots = slots
                self._missing -= {index for index, slot in enumerate(slots) if slot is None}
                waiting, self._waiting = self._waiting, {}
                return [copy for index, page in waiting.items() for copy in self.offer(index, page)]
            case protocol.NotReserved(reason=reason):
                self.refused = reason
            case protocol.PagesUnavailable():
                self.refused = "orphan"  # the chain that these pages follow has been dropped meanwhile
            case CopiedOut(lease=lease, first=first, checksums=checksums):
                return [protocol.Seal(lease, first, checksums, self._hold)]
            case protocol.Sealed(first=first, count=count):
                self._missing -= set(range(first, first + count))
                self.pages_written += count
            case _:
                pass
        return []


class CopyQueue:
    """The copies that transfers have asked for, until they are reported as made.

    The store lends a lease's slots to others once the lease has ended. So a lease with copies under way ends only after
    these, and is listed in `ending` until then. A copy into a page in limbo waits."""

    def __init__(self, blocks: DeviceBlockManager) -> None:
        self._blocks = blocks
        self._copies: list[Copy] = []  # not handed out
        self._under_way: dict[int, int] = {}  # by lease: how many were handed out and not reported
        self._ending: set[int] = set()  # leases to end after the copies under way
        self._coming: dict[tuple[int, int], int] = {}  # device pages that are being copied into, by lease and index

    def __bool__(self) -> bool:
        return len(self._copies) > len(self._delayed())

    def add_copies(self, requests: Sequence[protocol.StoreCall | Copy]) -> list[CallStore]:
        """Keep the copies of what a transfer asks for; the calls come back as commands."""
        self._copies += [item for item in requests if isinstance(item, CopyIn | CopyOut)]
        return [CallStore(item) for item in requests if not isinstance(item, CopyIn | CopyOut)]

    def take_copies(self, count: int) -> list[Copy]:
        """Hand out at most `count`, oldest first. Each must be reported to `copies_ended`."""
        if delayed := self._delayed():
            waiting = [copy for copy in self._copies if isinstance(copy, CopyIn) and copy.page in delayed]
            ready = [copy for copy in self._copies if not (isinstance(copy, CopyIn) and copy.page in delayed)]
        else:
            waiting, ready = [], self._copies
        batch, self._copies = ready[:count], ready[count:] + waiting
        for copy in batch:
            self._under_way[copy.lease] = self._under_way.get(copy.lease, 0) + 1
            if isinstance(copy, CopyIn):
                self._coming[copy.lease, copy.index] = copy.page
        return batch

    def copies_ended(self, event: CopiedIn | CopiedOut) -> list[CallStore]:
        """Copies that were handed out have been made. Their lease ends now, if it was to and they were the last."""
        if event.lease not in self._under_way:
            return []
        if isinstance(event, CopiedIn):
            for index in (*event.indices, *event.corrupt):
                del self._coming[event.lease, index]
        self._under_way[event.lease] -= event.pages
        if self._under_way[event.lease] > 0:
            return []
        del self._under_way[event.lease]
        if event.lease not in self._ending:
            return []
        self._ending.remove(event.lease)
        return [CallStore(protocol.EndLease(event.lease))]

    def end_lease(self, lease: int) -> list[CallStore]:
        """End a lease, now or after the copies under way. Its other copies are not made."""
        self._copies = [copy for copy in self._copies if copy.lease != lease]
        if lease not in self._under_way:
            return [CallStore(protocol.EndLease(lease))]
        self._ending.add(lease)
        return []

    @property
    def leases(self) -> set[int]:
        """Those of the copies that were not handed out."""
        return {copy.lease for copy in self._copies}

    @property
    def ending(self) -> tuple[int, ...]:
        """Leases that the store must not end yet, though nothing else asks for them any more."""
        return tuple(self._ending)

    @property
    def under_way(self) -> int:
        """Copies that were handed out and not reported."""
        return sum(self._under_way.values())

    def busy(self, pages: Sequence[int]) -> list[int]:
        """Those of the device pages that no step may write to yet: in limbo, or copied into at this moment."""
        waiting = self._blocks.in_limbo(pages)
        if not self._coming:
            return waiting
        coming = {*self._coming.values(), *waiting}
        return [page for page in pages if page in coming]

    def _delayed(self) -> set[int]:
        """Pages in limbo that are to be copied into."""
        return set(self._blocks.in_limbo([copy.page for copy in self._copies if isinstance(copy, CopyIn)]))
