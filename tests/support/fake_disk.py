"""A disk's index that is a dictionary, for tests of the store's state, and its threads, which work when a test lets
them. A test may also play them and send `Finished`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.messages import TierSpeed
from kvstore.disk.orders import DiskEvent, DiskOrder, DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded
from kvstore.events.changes import CacheChange, ChangeLog
from kvstore.load_or_recompute import DEFAULT_SPEEDS


class Write(DiskOrder, frozen=True):
    page: DiskPage


class Read(DiskOrder, frozen=True):
    key: bytes
    slot: int


class Finished(DiskEvent, frozen=True):
    """An order has been carried out, or (`ok` False) not."""

    order: Write | Read
    ok: bool = True
    intact: bool = True


@dataclass
class FakeDisk:
    """Takes every page that it has room for, and loses one only when a read fails or it is told to.

    Each namespace has a shelf of its own; nothing can be read before one was opened."""

    room: int = 1_000_000
    working: bool = True
    speed: TierSpeed = DEFAULT_SPEEDS["disk"]
    _shelves: dict[bytes, dict[bytes, tuple[bytes, int]]] = field(default_factory=dict)  # by namespace
    _pages: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)  # key → parent, checksum; parents first
    _coming: dict[bytes, bytes] = field(default_factory=dict)
    _reading: Counter[bytes] = field(default_factory=Counter)
    _changes: ChangeLog = field(default_factory=ChangeLog)

    def restart(self) -> None:
        """The store's process was replaced: what was on its way never arrives, what was written stays."""
        self._coming.clear()
        self._reading.clear()
        self._pages = {}
        self._changes = ChangeLog()

    def open(self, namespace: bytes, page_bytes: int, kv_heads: int) -> DiskResult:
        assert not self._coming, "opened anew while something is on its way"
        assert not self._reading, "opened anew while something is on its way"
        self._pages = self._shelves.setdefault(namespace, {})
        self._changes = ChangeLog()
        for key, (parent, _) in self._pages.items():
            self._changes.stored(key, parent)
        return DiskResult()

    def prefix(self, keys: Sequence[bytes], parent: bytes = b"") -> int:
        chain = zip(keys, (parent, *keys), strict=False)
        return next((place for place, (key, above) in enumerate(chain) if self.parent(key) != above), len(keys))

    def has(self, key: bytes) -> bool:
        return key in self._pages

    def parent(self, key: bytes) -> bytes | None:
        return self._pages[key][0] if key in self._pages else None

    def wants(self, key: bytes) -> bool:
        return self.working and not (key in self._pages or key in self._coming)

    def write(self, pages: Sequence[DiskPage]) -> DiskResult:
        orders: list[DiskOrder] = []
        ended: list[DiskOutcome] = []
        for page in pages:
            fits = len(self._pages) + len(self._coming) < self.room
            follows = page.parent == b"" or page.parent in self._pages or page.parent in self._coming
            if fits and follows and self.wants(page.key):
                self._coming[page.key] = page.parent
                orders.append(Write(0, page))
            else:
                ended.append(WriteEnded(page.key, page.slot))
        return DiskResult(orders, ended)

    def read_pages(self, pages: Sequence[tuple[bytes, int]]) -> DiskResult:
        assert all(key in self._pages for key, _ in pages)
        self._reading.update(key for key, _ in pages)
        return DiskResult([Read(0, key, slot) for key, slot in pages])

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def handle(self, event: DiskEvent) -> DiskResult:
        assert isinstance(event, Finished)
        match event.order:
            case Write(page=page):
                del self._coming[page.key]
                follows = page.parent == b"" or page.parent in self._pages
                if event.ok and event.intact and follows:
                    self._pages[page.key] = (page.parent, page.checksum)
                    self._changes.stored(page.key, page.parent)
                return DiskResult(ended=[WriteEnded(page.key, page.slot, event.intact)])
            case Read(key=key, slot=slot):
                self._reading -= Counter([key])
                known = key in self._pages
                checksum = self._pages[key][1] if known else 0
                if known and not event.ok:
                    self._drop(key)
                return DiskResult(ended=[ReadEnded(key, slot, checksum, event.ok and known)])

    def tick(self, now: float) -> DiskResult:
        return DiskResult()

    def drain_events(self) -> list[CacheChange]:
        return self._changes.drain()

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        return ((key, parent) for key, (parent, _) in self._pages.items())

    def stats(self) -> None:
        return None

    def validate(self) -> None:
        assert all(parent == b"" or parent in self._pages for parent, _ in self._pages.values()), "an orphan"

    def evict(self, pick: int) -> None:
        """Evict a leaf page that is not being read."""
        parents = {parent for parent, _ in self._pages.values()} | set(self._coming.values())
        leaves = [key for key in self._pages if key not in parents and not self._reading[key]]
        if leaves:
            self._drop(leaves[pick % len(leaves)])

    def _drop(self, key: bytes) -> None:
        for child in [child for child, (parent, _) in self._pages.items() if parent == key]:
            self._drop(child)
        del self._pages[key]
        self._changes.removed(key)


class DiskMemory(Protocol):
    """The arena, as the disk's threads see it."""

    def read_slot(self, slot: int, checksum: int) -> Any: ...
    def write(self, slot: int, contents: Any) -> None: ...
    def matches(self, contents: Any, checksum: int) -> bool: ...

    @property
    def rubbish(self) -> Any:
        """Contents that are no page's."""
        ...

    def spoilt(self, contents: Any) -> bool:
        """Whether these were damaged on purpose."""
        ...


class DiskThreads:
    """The files, by key, and what the threads of one store process do with them. A slot is read or written when an
    order is carried out."""

    def __init__(self, files: dict[bytes, Any], memory: DiskMemory) -> None:
        """`files` outlive the process."""
        self.files, self._memory = files, memory

    def carry_out(self, order: Write | Read, ok: bool) -> Finished:
        """Carry out an order, or fail to. Return the event for the index."""
        memory, intact = self._memory, True
        match order:
            case Write(page=page):
                contents = memory.read_slot(page.slot, page.checksum)
                intact = memory.matches(contents, page.checksum)
                if ok and intact:
                    self.files[page.key] = contents
            case Read(key=key, slot=slot):
                contents = self.files.get(key, memory.rubbish)
                ok = ok and key in self.files and not memory.spoilt(contents)
                memory.write(slot, contents if ok else memory.rubbish)
        return Finished(0, order, ok, intact)
