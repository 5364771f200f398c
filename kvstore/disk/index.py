"""What is on disk, where, what may be written and what goes: the disk tier's mind. Its hands are
`kvstore.disk.io_threads`.

    write ──Write──▶ threads ──Written──▶ readable ──read──▶ Read ──▶ PagesRead ──▶ ReadEnded
                                             │ evicted, corrupt, or its parent went
                                             ▼
                                       dead bytes in its segment ──cleaned──▶ room

Pages on disk are closed under prefix, as everywhere: a page is written only after its parent, and a page that goes
takes its subtree along. A page is *readable* once it and all before it are written. Being on its way or being read
protects a page and its prefix from eviction; a record that is read protects its segment from deletion.

Nothing here waits. A page that can't be written now is not written; a disk that fails is left alone for a while, and
what it has is read for as long as that works. After a restart evicted pages may be back: they are what their keys name.

Pure: calls and events in, orders and outcomes out. Time comes with `tick`.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from baton.config import DiskConfig
from baton.messages import TierSpeed
from kvstore.disk.interface import DiskEvent, DiskOrder, DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded
from kvstore.disk.orders import (
    Delete,
    Deleted,
    DeleteFolder,
    Finish,
    FolderDeleted,
    Found,
    Invalidate,
    Move,
    Moved,
    MovePage,
    Open,
    Opened,
    OpenFailed,
    PagesRead,
    Read,
    ReadFinished,
    ReadPage,
    Scanned,
    Trouble,
    Write,
    WritePage,
    Written,
)
from kvstore.disk.page_index import DiskPages, StoredPage
from kvstore.disk.record_format import MAX_NAMESPACE, RecordLayout
from kvstore.disk.segments import Segment, Segments
from kvstore.disk.stats import DiskCounters, DiskStats
from kvstore.events.changes import CacheChange
from kvstore.keys import START
from kvstore.load_or_recompute import SpeedMeter

RETRY_SECONDS = 30.0
"""How long a disk that has failed is left alone."""


class _Coming(NamedTuple):
    """A record that is being written: from a slot, or from another segment, where its place is."""

    page: StoredPage
    key: bytes
    slot: int
    source: tuple[Segment[StoredPage], int] | None


class _Reading(NamedTuple):
    key: bytes
    slot: int
    page: StoredPage
    segment: Segment[StoredPage]
    record: int


@dataclass(slots=True)
class _Outbox:
    """What one call leads to."""

    orders: list[DiskOrder] = field(default_factory=list[DiskOrder])
    ended: list[DiskOutcome] = field(default_factory=list[DiskOutcome])

    def result(self) -> DiskResult:
        return DiskResult(self.orders, self.ended)


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
        self._begin(RecordLayout(1, 1))

    def _begin(self, layout: RecordLayout) -> None:
        self._segments: Segments[StoredPage] = Segments(layout, self._settings.segment_bytes, self._settings.max_bytes)
        self._pages.clear()
        self._open = False  # all that lies there is known
        self._accepting = False  # pages to write
        self._full = False  # why not
        self._coming: dict[tuple[int, int], _Coming] = {}  # by segment and index
        self._reads: dict[int, dict[int, _Reading]] = {}  # by number and place in the order
        self._read_bytes: dict[int, int] = {}  # by number: what has come well
        self._writing = self._reading = 0
        self._sequence = 1

    # --- what can be asked ------------------------------------------------------------------------------------------

    @property
    def speed(self) -> TierSpeed:
        """How fast this tier has brought pages lately."""
        return self._meter.speed

    @property
    def working(self) -> bool:
        """Whether pages can be read, be the disk ever so full."""
        return self._open

    def has(self, key: bytes) -> bool:
        """Whether a page, and so all before it, can be read now."""
        return self._pages.find(key) is not None

    def parent(self, key: bytes) -> bytes | None:
        """What the page of `key` follows (empty: it starts a chain); none when it can't be read."""
        node = self._pages.find(key)
        return node.parent_key if node is not None else None

    def wants(self, key: bytes) -> bool:
        """Whether `write` would take this page if there is room: it is neither here nor on its way."""
        return self._accepting and key not in self._pages

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
            bytes=self._segments.used,
            live_bytes=self._segments.live_bytes,
            segments=len(self._segments),
            reading=self._reading,
            writing=self._writing,
            **asdict(self._count),
        )

    # --- what is asked for --------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, page_bytes: int, kv_heads: int) -> DiskResult:
        """Serve this namespace from now on. Nothing may be in flight for the caller, which reports the end of all
        pages of the last one itself."""
        assert not self._writing
        assert not self._reading
        if not self._settings.path:
            return DiskResult()
        assert 0 < len(namespace) <= MAX_NAMESPACE
        assert page_bytes > 0
        self._namespace = (namespace, page_bytes, kv_heads)
        self._reopen(namespace, page_bytes, kv_heads)
        self._pages.drain_events()
        return self._settled()

    def write(self, pages: Sequence[DiskPage]) -> DiskResult:
        """Take those pages that can be taken; parents first. Each ends in one WriteEnded, now or later."""
        run: list[WritePage] = []
        last: tuple[Segment[StoredPage], int] | None = None
        for page in pages:
            place = self._admit(page)
            if place is None:
                self._out.ended.append(WriteEnded(page.key, page.slot))
                continue
            if last is not None and place[0] is not last[0]:
                self._append(last, run)
            run.append(WritePage(page.key, page.parent, page.checksum, self._sequence, page.slot))
            self._sequence += 1
            last = place
        self._append(last, run)
        return self._settled()

    def read(self, pages: Sequence[tuple[bytes, int]]) -> DiskResult:
        """Bring pages that can be read into these slots: (key, slot). Each ends in one ReadEnded."""
        self._numbers += 1
        order: list[ReadPage] = []
        reading: dict[int, _Reading] = {}
        for key, slot in pages:
            node = self._pages.find(key)
            if node is None:
                self._out.ended.append(ReadEnded(key, slot, 0, ok=False))
                continue
            page = node.value
            assert page.segment is not None
            self._segments.read_began(page.segment)
            reading[len(order)] = _Reading(key, slot, page, page.segment, page.record)
            order.append(ReadPage(key, page.checksum, page.segment.number, page.record, slot))
        for each in reversed(reading.values()):  # the deepest first: it protects the others at one go
            self._pages.pin(each.page)
        if order:
            self._reading += len(order)
            self._reads[self._numbers] = reading
            self._read_bytes[self._numbers] = 0
            self._out.orders.append(Read(self._epoch, self._numbers, tuple(order)))
        return self._settled()

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages, parents first, were useful: they go later."""
        self._pages.touch(keys)

    def tick(self, now: float) -> DiskResult:
        """Time passes: try again what has failed a while ago."""
        if not self._failure or self._hopeless or self._namespace is None:
            return DiskResult()
        if self._retry_at is None:
            self._retry_at = now + RETRY_SECONDS
        elif now >= self._retry_at:
            self._retry_at = None
            if self._open:
                self._accepting = True  # the state says failed until a write has succeeded
                self._segments.retry()
            else:
                self._reopen(*self._namespace)
        return self._settled()

    def handle(self, event: DiskEvent) -> DiskResult:
        """The threads say this."""
        if getattr(event, "epoch", None) != self._epoch:
            return DiskResult()  # of a namespace that is served no more
        match event:
            case Scanned():
                self._scanned(event)
            case Found():
                self._found(event)
            case Opened(read_only=reason):
                self._segments.all_found()
                self._open = True
                self._failure = ""
                self._accepting = not reason
                if reason:
                    self._fail(reason)
            case OpenFailed(reason=reason):
                self._fail(reason)
            case Written():
                self._written(event)
            case PagesRead():
                self._pages_read(event)
            case ReadFinished():
                self._read_finished(event)
            case Moved():
                self._moved(event)
            case Deleted(segment=number, reason=reason):
                if reason:
                    self._segments.not_deleted(self._segments[number])
                    self._fail(reason)
                else:
                    self._segments.deleted(self._segments[number])
            case FolderDeleted(name=name, reason=reason):
                if reason:
                    self._segments.folder_not_deleted(name)
                    self._fail(reason)
                else:
                    self._segments.folder_deleted(name)
            case Trouble(reason=reason):
                self._fail(reason)
            case _:
                raise AssertionError(f"{type(event).__name__} is no event of the disk's threads")
        return self._settled()

    # --- opening ------------------------------------------------------------------------------------------------------

    def _reopen(self, namespace: bytes, page_bytes: int, kv_heads: int) -> None:
        layout = RecordLayout(page_bytes, kv_heads)
        self._begin(layout)
        self._epoch += 1
        self._failure = ""
        self._retry_at = None
        limit = self._settings.max_bytes
        self._hopeless = self._segments.needed > limit
        if self._hopeless:
            self._fail(f"disk.max_bytes is {limit}, too little for pages of {page_bytes} bytes; raise it")
        else:
            self._out.orders.append(Open(self._epoch, namespace, page_bytes, kv_heads, limit))

    def _scanned(self, event: Scanned) -> None:
        for segment in event.segments:
            self._segments.found(*segment)
        for folder in event.folders:
            self._segments.found_folder(*folder)
        self._sequence = event.next_sequence
        self._count.torn += event.torn
        self._count.corrupt += event.corrupt
        self._count.orphans += event.orphans
        self._count.duplicates += event.duplicates

    def _found(self, event: Found) -> None:
        pages: list[StoredPage] = []
        for key, parent, checksum, number, record in event.records:
            if key in self._pages or not self._pages.can_follow(parent):
                continue  # its parent has turned out to be unreadable meanwhile
            page = StoredPage(checksum)
            page.segment, page.record = self._segments.revive(number, record, page), record
            self._pages.plant(page, key, parent)
            self._pages.placed(page)
            pages.append(page)
        for page in pages:
            self._pages.unpin(page)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _admit(self, page: DiskPage) -> tuple[Segment[StoredPage], int] | None:
        """A place for a page, which is on its way from now on."""
        if page.key in self._pages:
            return None
        place = None
        room = self._writing < self._settings.queue_pages
        if room and self._accepting and self._pages.can_follow(page.parent):
            place = self._segments.append(moving=False)
        if place is None:
            self._count.dropped_writes += 1
            return None
        written = StoredPage(page.checksum)
        self._pages.plant(written, page.key, page.parent)
        self._coming[place[0].number, place[1]] = _Coming(written, page.key, page.slot, None)
        self._writing += 1
        return place

    def _append(self, last: tuple[Segment[StoredPage], int] | None, run: list[WritePage]) -> None:
        """Order the pages of a run, of which `last` is the last one's place, to be written."""
        if last is None or not run:
            return
        segment, index = last
        self._out.orders.append(Write(self._epoch, segment.number, index + 1 - len(run), tuple(run)))
        run.clear()
        if segment.state != "open":
            self._out.orders.append(Finish(self._epoch, segment.number))

    def _written(self, event: Written) -> None:
        segment = self._segments[event.segment]
        if event.reason:
            self._fail(event.reason, event.full)
        for index, intact in enumerate(event.intact, event.first):
            page, key, slot, _ = self._coming.pop((event.segment, index))
            self._writing -= 1
            self._count.damaged += not intact
            self._out.ended.append(WriteEnded(key, slot, intact))
            if event.reason or not intact:
                self._drop(page)
                self._segments.came(segment, index, None)
                continue
            self._count.written += 1
            if page.node is None:
                self._segments.came(segment, index, None)
                continue
            page.segment, page.record = segment, index
            self._segments.came(segment, index, page)
            self._pages.placed(page)
            self._pages.unpin(page)
        if not event.reason and self._accepting:
            self._failure = ""

    # --- reading ------------------------------------------------------------------------------------------------------

    def _pages_read(self, event: PagesRead) -> None:
        reading = self._reads[event.number]
        for place, outcome in event.outcomes:
            key, slot, page, segment, index = reading.pop(place)
            self._reading -= 1
            self._out.ended.append(ReadEnded(key, slot, page.checksum, outcome == "ok"))
            if outcome == "ok":
                self._count.read += 1
                self._read_bytes[event.number] += self._segments.layout.page_bytes
                self._pages.unpin(page)
            else:
                self._spoilt(page, segment, index, outcome == "corrupt")
            self._segments.read_ended(segment)

    def _read_finished(self, event: ReadFinished) -> None:
        assert not self._reads.pop(event.number), "pages of a read have not been told of"
        size = self._read_bytes.pop(event.number)
        if size:
            # The rate is that of what came after the first page; of a read that came all at once, of all pages alike.
            pages = size // self._segments.layout.page_bytes
            self._meter.loaded(
                event.first_seconds, max(event.seconds - event.first_seconds, event.seconds / pages), size
            )

    def _spoilt(self, page: StoredPage, segment: Segment[StoredPage], index: int, corrupt: bool) -> None:
        """A record could not be read: it goes, and what hangs from it."""
        if corrupt:
            self._count.corrupt += 1
            self._out.orders.append(Invalidate(self._epoch, segment.number, index))
        else:
            self._count.errors += 1
        self._drop(page)

    # --- making room --------------------------------------------------------------------------------------------------

    def _settled(self) -> DiskResult:
        """The end of every call: see to room, and hand over what the call has led to."""
        self._delete()
        if self._open and (self._accepting or self._full):
            self._reclaim()
            self._delete()
        out, self._out = self._out, _Outbox()
        return out.result()

    def _reclaim(self) -> None:
        """Start on what makes enough room: first records that can't be read, then sparse segments, then pages."""
        while self._segments.short:
            folder = self._segments.oldest_folder()
            if folder is not None:
                self._out.orders.append(DeleteFolder(self._epoch, folder))
                continue
            victim = self._segments.victim() if self._accepting else None
            if victim is not None:
                self._clean(victim)
            elif self._pages.evictable:
                self._evict()
            else:
                return

    def _delete(self) -> None:
        self._out.orders.extend(Delete(self._epoch, segment.number) for segment in self._segments.deletable())

    def _clean(self, victim: Segment[StoredPage]) -> None:
        """Move what is live in `victim` to the end of the open segment."""
        self._segments.clean(victim)
        run: list[MovePage] = []
        last: tuple[Segment[StoredPage], int] | None = None

        def order() -> None:
            assert last is not None
            self._out.orders.append(Move(self._epoch, last[0].number, last[1] + 1 - len(run), tuple(run)))
            run.clear()
            if last[0].state != "open":
                self._out.orders.append(Finish(self._epoch, last[0].number))

        for index, page in sorted(victim.live.items(), key=_by_index):
            place = self._segments.append(moving=True)
            assert place is not None, "the room for cleaning was there"
            assert page.node is not None
            if last is not None and last[0] is not place[0]:
                order()
            node = page.node
            run.append(MovePage(node.key, node.parent_key, page.checksum, self._sequence, victim.number, index))
            self._sequence += 1
            self._coming[place[0].number, place[1]] = _Coming(page, node.key, -1, (victim, index))
            last = place
        order()

    def _moved(self, event: Moved) -> None:
        segment = self._segments[event.segment]
        if event.reason:
            self._fail(event.reason, event.full)
        for index, outcome in enumerate(event.outcomes, event.first):
            page, _, _, source = self._coming.pop((event.segment, index))
            assert source is not None
            victim, old = source
            if not event.reason and outcome != "ok":
                self._spoilt(page, victim, old, outcome == "corrupt")
            if event.reason or page.node is None:
                self._segments.came(segment, index, None)
            else:
                self._segments.died(victim, old)
                page.segment, page.record = segment, index
                self._segments.came(segment, index, page)
                self._count.cleaned_bytes += self._segments.layout.record_bytes
            self._segments.left(victim)

    def _evict(self) -> None:
        self._retire_record(self._pages.evict())
        self._count.evictions += 1

    def _drop(self, page: StoredPage) -> None:
        for each in self._pages.drop(page):
            self._retire_record(each)

    def _retire_record(self, page: StoredPage) -> None:
        """Retire a record whose page can't be found any more: it is dead, or will be when it is written."""
        if page.segment is not None:
            self._segments.died(page.segment, page.record)
            page.segment = None

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _fail(self, reason: str, full: bool = False) -> None:
        """Leave the disk alone for a while, but for reading. When it is `full`, what there is must do from now on."""
        self._count.errors += 1
        self._failure = reason
        self._accepting = False
        self._full = full
        if full:
            self._segments.shrink()
        self._retry_at = None
        segment = self._segments.close_open()
        if segment is not None:
            self._out.orders.append(Finish(self._epoch, segment.number))

    def _state(self) -> str:
        if self._namespace is None:
            return "off"
        if self._failure:
            return f"failed: {self._failure}"
        return "on" if self._open else "opening"

    def validate(self, intact: Callable[[bytes, int, int], bool] = lambda key, segment, index: True) -> None:
        """Check every invariant; for tests. `intact` says whether a record with this key is at its place."""
        self._segments.validate()
        assert self._segments.used <= self._settings.max_bytes or not self._coming
        live = {(s.number, record): page for s in self._segments for record, page in s.live.items()}
        placed = self._pages.validate()
        for key, page in placed.items():
            assert page.segment is not None
            assert live[page.segment.number, page.record] is page
            assert intact(key, page.segment.number, page.record), "readable, but its record is not there"
        assert len(placed) == len(live), "a record is live that no key leads to"
        writes = sum(coming.source is None for coming in self._coming.values())
        assert writes == self._writing <= self._settings.queue_pages
        assert sum(map(len, self._reads.values())) == self._reading
        for segment in self._segments:
            assert segment.coming == sum(number == segment.number for number, _ in self._coming)
            reading = [each for reads in self._reads.values() for each in reads.values() if each.segment is segment]
            assert segment.reading == len(reading)


def _by_index(item: tuple[int, StoredPage]) -> int:
    return item[0]
