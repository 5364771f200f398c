"""What is on disk, what may be written and what goes: the disk tier's mind. Its hands are `kvstore.disk.io_threads`.

    write ──Write──▶ threads ──Written──▶ readable ──read──▶ Read ──▶ PagesRead ──▶ ReadEnded
                                             │ evicted, corrupt, or its parent went
                                             ▼
                                          Delete ──▶ Deleted: its bytes are room again

Pages on disk are closed under prefix, as everywhere: a page is written only after its parent, and a page that goes
takes its subtree along. A page is *readable* once it and all before it are written. Being on its way or being read
protects a page and its prefix from eviction.

Nothing here waits. A page that can't be written now is not written; a disk that fails is left alone for a while, and
what it has is read for as long as that works. Each file counts as the bytes that it takes on the disk, from the order
to write it until it has been deleted. Pages go before the room is used up, so that the next writes find some.

Pure: calls and events in, orders and outcomes out. Time comes with `tick`.
"""

# pyright: strict

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

from baton.config import DiskConfig
from baton.messages import TierSpeed
from kvstore.disk import orders as disk
from kvstore.disk.file_names import MAX_NAMESPACE, PageFile, footprint
from kvstore.disk.page_index import DiskPages, StoredPage
from kvstore.disk.stats import DiskCounters, DiskStats
from kvstore.events.changes import CacheChange
from kvstore.keys import START
from kvstore.load_or_recompute import SpeedMeter

RETRY_SECONDS = 30.0
"""How long a disk that has failed is left alone."""

_RESERVE = 8  # one part in so many is kept free for the pages that come next, if the queue can take so many
_FEWEST = 2 * _RESERVE  # pages that there must be room for


class _Coming(NamedTuple):
    """A page that is being written."""

    page: StoredPage
    slot: int


class _Reading(NamedTuple):
    key: bytes
    slot: int
    page: StoredPage


@dataclass(slots=True)
class _Folder:
    """Another namespace's."""

    size: int  # bytes
    state: Literal["idle", "deleting", "stuck"] = "idle"


@dataclass(slots=True)
class _Outbox:
    """What one call leads to."""

    orders: list[disk.DiskOrder] = field(default_factory=list[disk.DiskOrder])
    ended: list[disk.DiskOutcome] = field(default_factory=list[disk.DiskOutcome])
    deletes: list[PageFile] = field(default_factory=list[PageFile])
    evicted: list[PageFile] = field(default_factory=list[PageFile])

    def result(self, epoch: int) -> disk.DiskResult:
        if self.deletes:
            self.orders.append(disk.Delete(epoch, tuple(self.deletes)))
        if self.evicted:
            self.orders.append(disk.Evict(epoch, tuple(self.evicted)))
        return disk.DiskResult(self.orders, self.ended)


class DiskIndex:
    """The one owner of the disk's space and of the knowledge which pages can be read."""

    def __init__(self, settings: DiskConfig) -> None:
        self._settings = settings
        self._meter = SpeedMeter("disk")
        self._count = DiskCounters()
        self._pages = DiskPages()
        self._epoch = 0
        self._namespace: tuple[bytes, int, int] | None = None  # digest, bytes and KV heads of a page
        self._failure = ""
        self._retry_at: float | None = None
        self._hopeless = False  # no retry will help
        self._numbers = 0  # of reads
        self._out = _Outbox()
        self._begin(1)

    def _begin(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._footprint = footprint(page_bytes)
        self._limit = int(self._settings.max_bytes)
        self._used = 0  # bytes of everything
        self._going = 0  # of these, bytes of what is being deleted
        self._folders: dict[str, _Folder] = {}
        self._pages.clear()
        self.working = False  # all that lies there is known: pages can be read, be the disk ever so full
        self._accepting = False  # pages to write
        self._full = False  # why not
        self._coming: dict[bytes, _Coming] = {}
        self._deleting: set[bytes] = set()  # keys of files that are still there
        self._stuck: list[PageFile] = []  # those of them that could not be deleted
        self._reads: dict[int, dict[int, _Reading]] = {}  # by number and place in the order
        self._well_read: dict[int, int] = {}  # by number: pages that have come well
        self._reading = 0

    # --- what can be asked ------------------------------------------------------------------------------------------

    @property
    def speed(self) -> TierSpeed:
        """How fast this tier has brought pages lately."""
        return self._meter.speed

    def has(self, key: bytes) -> bool:
        """Whether a page, and so all before it, can be read now."""
        return self._pages.find(key) is not None

    def parent(self, key: bytes) -> bytes | None:
        """What the page of `key` follows (empty: it starts a chain); none when it can't be read."""
        node = self._pages.find(key)
        return node.parent_key if node is not None else None

    def wants(self, key: bytes) -> bool:
        """Whether `write` would take this page if there is room: its file is neither here nor on its way."""
        return self._accepting and not (key in self._pages or key in self._coming or key in self._deleting)

    def prefix(self, keys: Sequence[bytes], parent: bytes = START) -> int:
        """How many of the first `keys`, which follow `parent`, can be read now."""
        return self._pages.prefix(keys, parent)

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that can be read, parents first."""
        return self._pages.pages()

    def drain_events(self) -> list[CacheChange]:
        """What has become readable or stopped being so since the last call, in order."""
        return self._pages.drain_events()

    def stats(self) -> DiskStats:
        return DiskStats(
            state=self._state(),
            pages=self._pages.readable,
            bytes=self._used,
            reading=self._reading,
            writing=len(self._coming),
            **asdict(self._count),
        )

    # --- what is asked for --------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, page_bytes: int, kv_heads: int) -> disk.DiskResult:
        """Serve this namespace from now on. Nothing may be in flight for the caller, which reports the end of all
        pages of the last one itself."""
        assert not self._coming
        assert not self._reading
        if not self._settings.path:
            return disk.DiskResult()
        assert 0 < len(namespace) <= MAX_NAMESPACE
        assert page_bytes > 0
        self._namespace = (namespace, page_bytes, kv_heads)
        self._reopen(*self._namespace)
        self._pages.drain_events()
        return self._settled()

    def write(self, pages: Sequence[disk.DiskPage]) -> disk.DiskResult:
        """Take those pages that can be taken; parents first. Each ends in one WriteEnded, now or later."""
        order: list[disk.SlotPage] = []
        for each in pages:
            file = PageFile(each.key, each.parent, each.checksum)
            if self._admit(file, each.slot):
                order.append(disk.SlotPage(file, each.slot))
            else:
                self._out.ended.append(disk.WriteEnded(each.key, each.slot))
        if order:
            self._out.orders.append(disk.Write(self._epoch, tuple(order)))
        return self._settled()

    def read_pages(self, pages: Sequence[tuple[bytes, int]]) -> disk.DiskResult:
        """Bring pages that can be read into these slots: (key, slot). Each ends in one ReadEnded."""
        self._numbers += 1
        order: list[disk.SlotPage] = []
        reading: dict[int, _Reading] = {}
        for key, slot in pages:
            node = self._pages.find(key)
            if node is None:
                self._out.ended.append(disk.ReadEnded(key, slot, 0, ok=False))
                continue
            reading[len(order)] = _Reading(key, slot, node.value)
            order.append(disk.SlotPage(node.value.file, slot))
        for each in reversed(reading.values()):  # the deepest first: it protects the others at one go
            self._pages.pin(each.page)
        if order:
            self._reading += len(order)
            self._reads[self._numbers] = reading
            self._well_read[self._numbers] = 0
            self._out.orders.append(disk.Read(self._epoch, self._numbers, tuple(order)))
        return self._settled()

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages, parents first, were useful: they go later."""
        self._pages.touch(keys)

    def tick(self, now: float) -> disk.DiskResult:
        """Time passes: try again what has failed a while ago."""
        if not self._failure or self._hopeless or self._namespace is None:
            return disk.DiskResult()
        if self._retry_at is None:
            self._retry_at = now + RETRY_SECONDS
        elif now >= self._retry_at:
            self._retry_at = None
            if self.working:
                self._accepting = True  # the state says failed until a write has succeeded
                self._try_deleting_again()
            else:
                self._reopen(*self._namespace)
        return self._settled()

    def handle(self, event: disk.DiskEvent) -> disk.DiskResult:
        """The threads say this."""
        if event.epoch != self._epoch:
            return disk.DiskResult()  # of a namespace that is served no more
        match event:
            case disk.PagesListed():
                self._pages_listed(event)
            case disk.Opened():
                self._opened(event)
            case disk.OpenFailed(reason=reason):
                self._fail(reason)
            case disk.Written():
                self._written(event)
            case disk.PagesRead():
                self._pages_read(event)
            case disk.ReadFinished():
                self._read_finished(event)
            case disk.Deleted():
                self._deleted(event)
            case disk.FolderDeleted(name=name, reason=reason):
                self._folder_deleted(name, reason)
            case _:
                raise AssertionError(f"{type(event).__name__} is no event of the disk's threads")
        return self._settled()

    # --- opening ------------------------------------------------------------------------------------------------------

    def _reopen(self, namespace: bytes, page_bytes: int, kv_heads: int) -> None:
        self._begin(page_bytes)
        self._epoch += 1
        self._failure = ""
        self._retry_at = None
        self._hopeless = _FEWEST * self._footprint > self._limit
        if self._hopeless:
            self._fail(f"disk.max_bytes is {self._limit}, too little for pages of {page_bytes} bytes; raise it")
        else:
            spares = self._reserve() // self._footprint
            self._out.orders.append(disk.Open(self._epoch, namespace, page_bytes, kv_heads, spares))

    def _pages_listed(self, event: disk.PagesListed) -> None:
        pages = [StoredPage(file) for file in event.pages]
        self._used += len(pages) * self._footprint
        for page in pages:
            if self._pages.can_follow(page.file.parent):
                self._pages.plant(page)
                self._pages.place(page)
            else:  # its parent has turned out to be unreadable meanwhile
                self._delete(page, self._out.deletes)
        for page in pages:
            self._pages.unpin(page)

    def _opened(self, event: disk.Opened) -> None:
        for name, size in event.folders:
            self._folders[name] = _Folder(size)
            self._used += size
        self._used += event.stray_bytes
        self._count.torn += event.torn
        self._count.corrupt += event.corrupt
        self._count.orphans += event.orphans
        self._count.duplicates += event.duplicates
        self.working = True
        self._failure = ""
        self._accepting = True
        if event.read_only:
            self._fail(event.read_only)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _admit(self, file: PageFile, slot: int) -> bool:
        """Whether a page is taken; then it is on its way."""
        if file.key in self._pages:
            return False
        queued = len(self._coming) < self._settings.queue_pages
        room = self._used + self._footprint <= self._limit
        if not (queued and room and self.wants(file.key) and self._pages.can_follow(file.parent)):
            self._count.dropped_writes += 1
            return False
        page = StoredPage(file)
        self._pages.plant(page)
        self._coming[file.key] = _Coming(page, slot)
        self._used += self._footprint
        return True

    def _written(self, event: disk.Written) -> None:
        for key, outcome in event.outcomes:
            page, slot = self._coming.pop(key)
            self._out.ended.append(disk.WriteEnded(key, slot, outcome != "damaged"))
            if outcome == "ok":
                self._count.written += 1
                if page.node is None:
                    self._delete(page, self._out.deletes)  # it was dropped meanwhile
                else:
                    self._pages.place(page)
                    self._pages.unpin(page)
            else:
                self._count.damaged += outcome == "damaged"
                self._used -= self._footprint
                self._drop(page)
        if event.reason:
            self._fail(event.reason, event.full)
        elif self._accepting:
            self._failure = ""

    # --- reading ------------------------------------------------------------------------------------------------------

    def _pages_read(self, event: disk.PagesRead) -> None:
        reading = self._reads[event.number]
        for place, outcome in event.outcomes:
            key, slot, page = reading.pop(place)
            self._reading -= 1
            self._out.ended.append(disk.ReadEnded(key, slot, page.file.checksum, outcome == "ok"))
            if outcome == "ok":
                self._count.read += 1
                self._well_read[event.number] += 1
            elif page.node is not None:
                self._count.corrupt += outcome == "corrupt"
                self._count.errors += outcome != "corrupt"
            if outcome in ("ok", "busy"):
                self._pages.unpin(page)
            else:
                self._drop(page)

    def _read_finished(self, event: disk.ReadFinished) -> None:
        assert not self._reads.pop(event.number), "pages of a read have not been told of"
        if pages := self._well_read.pop(event.number):
            self._meter.loaded(event.first_seconds, event.seconds, pages, self._page_bytes)

    # --- making room --------------------------------------------------------------------------------------------------

    def _settled(self) -> disk.DiskResult:
        """The end of every call: see to room, and hand over what the call has led to."""
        if self.working and (self._accepting or self._full):
            self._reclaim()
        out, self._out = self._out, _Outbox()
        return out.result(self._epoch)

    def _reclaim(self) -> None:
        """Start on what makes enough room: first folders of other namespaces, then pages."""
        while self._used - self._going > self._limit - self._reserve():
            name = next((name for name, folder in self._folders.items() if folder.state == "idle"), None)
            if name is not None:
                self._folders[name].state = "deleting"
                self._going += self._folders[name].size
                self._out.orders.append(disk.DeleteFolder(self._epoch, name))
            elif self._pages.evictable:
                self._evict()
            else:
                return

    def _reserve(self) -> int:
        """Return the bytes that are kept free. Spare files, which count as deleted, take no more than these."""
        return max(self._footprint, min(self._settings.queue_pages * self._footprint, self._limit // _RESERVE))

    def _evict(self) -> None:
        self._delete(self._pages.evict(), self._out.evicted)
        self._count.evictions += 1

    def _drop(self, page: StoredPage) -> None:
        """A page is not on the disk, or can't be read: it goes, and what hangs from it."""
        for each in self._pages.drop(page):
            if each.placed:
                self._delete(each, self._out.deletes)

    def _delete(self, page: StoredPage, order: list[PageFile]) -> None:
        """Have the file of a page deleted that can't be found any more."""
        self._deleting.add(page.file.key)
        order.append(page.file)
        self._going += self._footprint

    def _deleted(self, event: disk.Deleted) -> None:
        self._going -= self._footprint * (len(event.deleted) + len(event.left))
        self._used -= self._footprint * len(event.deleted)
        self._deleting.difference_update(page.key for page in event.deleted)
        if event.left:
            self._stuck += event.left
            self._fail(event.reason)

    def _folder_deleted(self, name: str, reason: str) -> None:
        folder = self._folders[name]
        self._going -= folder.size
        if reason:
            folder.state = "stuck"
            self._fail(reason)
        else:
            self._used -= folder.size
            del self._folders[name]

    def _try_deleting_again(self) -> None:
        stuck, self._stuck = self._stuck, []
        self._out.deletes += stuck
        self._going += self._footprint * len(stuck)
        for folder in self._folders.values():
            if folder.state == "stuck":
                folder.state = "idle"

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _fail(self, reason: str, full: bool = False) -> None:
        """Leave the disk alone for a while, but for reading. When it is `full`, what there is must do from now on."""
        self._count.errors += 1
        self._failure = reason
        self._accepting = False
        self._full = full
        if full:  # before the limit is reached: what is used now is the limit, but no less than such a part of it
            self._limit = max(self._settings.max_bytes // _RESERVE, min(self._limit, self._used))
        self._retry_at = None

    def _state(self) -> str:
        if self._namespace is None:
            return "off"
        if self._failure:
            return f"failed: {self._failure}"
        return "on" if self.working else "opening"

    def validate(self, intact: Callable[[PageFile], bool] = lambda page: True) -> None:
        """Check every invariant; for tests. `intact` says whether a page's file is there."""
        placed = self._pages.validate()
        for key, page in placed.items():
            assert page.file.key == key
            assert intact(page.file), "readable, but its file is not there"
        away = len(self._deleting)
        assert {page.key for page in self._stuck} <= self._deleting
        assert not self._deleting & placed.keys()
        assert not self._deleting & self._coming.keys(), "written and deleted at the same time"
        assert not placed.keys() & self._coming.keys()
        folders = sum(folder.size for folder in self._folders.values())
        assert self._used >= self._footprint * (len(placed) + len(self._coming) + away) + folders
        deleting = sum(folder.size for folder in self._folders.values() if folder.state == "deleting")
        assert self._going == self._footprint * (away - len(self._stuck)) + deleting
        assert len(self._coming) <= self._settings.queue_pages
        assert sum(map(len, self._reads.values())) == self._reading
