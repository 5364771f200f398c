"""What is on disk, where, what may be written and what goes: the disk tier's mind. Its hands are `kvstore.disk`.

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
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.config import DiskConfig
from baton.messages import TierSpeed
from kvstore.changes import Change, ChangeLog
from kvstore.cost import SpeedMeter
from kvstore.disk_format import MAX_NAMESPACE, RecordLayout
from kvstore.disk_orders import (
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
from kvstore.eviction import LeafFirstLru
from kvstore.keys import START
from kvstore.radix import Node, RadixTree
from kvstore.segments import Segment, Segments
from kvstore.tiers import DiskEvent, DiskOrder, DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded

RETRY_SECONDS = 30.0
"""How long a disk that has failed is left alone."""


class _Page:
    """A page that is written or being written. `node` is none once nobody can find it any more."""

    __slots__ = ("checksum", "node", "readable", "record", "segment")

    def __init__(self, checksum: int) -> None:
        self.checksum = checksum
        self.segment: Segment[_Page] | None = None  # none while it is on its way
        self.record = 0
        self.readable = False
        self.node: Node[_Page] | None = None


class _Coming(NamedTuple):
    """A record that is being written: from a slot, or from another segment, where its place is."""

    page: _Page
    key: bytes
    slot: int
    source: tuple[Segment[_Page], int] | None


class _Reading(NamedTuple):
    key: bytes
    slot: int
    page: _Page
    segment: Segment[_Page]
    record: int


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot of the disk tier. The first group is what is so now, the second what has happened since the start."""

    state: str  # "off", "opening", "on", "failed: reason"
    pages: int  # readable
    bytes: int  # of all files that are ours, those on their way included
    live_bytes: int  # of these, records of pages
    segments: int
    reading: int  # pages
    writing: int  # pages

    written: int  # pages
    read: int  # pages
    evictions: int
    cleaned_bytes: int  # moved to make room
    dropped_writes: int  # pages not taken: no room, no time, no disk
    torn: int  # records whose writing was cut off
    corrupt: int  # records that did not match their checksum
    orphans: int  # records found without those before them
    duplicates: int  # records found twice
    damaged: int  # pages that did not match their checksum in the arena
    errors: int  # orders that failed


@dataclass(slots=True)
class _Counters:
    written: int = 0
    read: int = 0
    evictions: int = 0
    cleaned_bytes: int = 0
    dropped_writes: int = 0
    torn: int = 0
    corrupt: int = 0
    orphans: int = 0
    duplicates: int = 0
    damaged: int = 0
    errors: int = 0


@dataclass(slots=True)
class _Outbox:
    """What one call leads to."""

    orders: list[DiskOrder] = field(default_factory=list[DiskOrder])
    ended: list[DiskOutcome] = field(default_factory=list[DiskOutcome])

    def result(self) -> DiskResult:
        return DiskResult(self.orders, self.ended)


class DiskIndex:
    """The one owner of the disk's space, and the only one who says what can be read from it."""

    def __init__(self, settings: DiskConfig) -> None:
        self._settings = settings
        self._meter = SpeedMeter("disk")
        self._count = _Counters()
        self._changes = ChangeLog()
        self._epoch = 0
        self._namespace: tuple[bytes, int] | None = None  # digest, bytes of a page
        self._failure = ""
        self._retry_at: float | None = None
        self._hopeless = False  # no retry will help
        self._numbers = 0  # of reads
        self._out = _Outbox()
        self._begin(RecordLayout(1))

    def _begin(self, layout: RecordLayout) -> None:
        self._segments: Segments[_Page] = Segments(layout, self._settings.segment_bytes, self._settings.max_bytes)
        self._tree: RadixTree[_Page] = RadixTree()
        self._lru: LeafFirstLru[_Page] = LeafFirstLru()
        self._open = False  # all that lies there is known
        self._accepting = False  # pages to write
        self._full = False  # why not
        self._coming: dict[tuple[int, int], _Coming] = {}  # by segment and index
        self._reads: dict[int, dict[int, _Reading]] = {}  # by number and place in the order
        self._read_bytes: dict[int, int] = {}  # by number: what has come well
        self._writing = self._reading = self._readable = 0
        self._sequence = 1

    # --- what can be asked ------------------------------------------------------------------------------------------

    @property
    def speed(self) -> TierSpeed:
        """How fast this tier has brought pages lately."""
        return self._meter.speed

    @property
    def working(self) -> bool:
        """Whether pages are taken for writing."""
        return self._accepting

    def has(self, key: bytes) -> bool:
        """Whether a page, and so all before it, can be read now."""
        node = self._tree.find(key)
        return node is not None and node.value.readable

    def parent(self, key: bytes) -> bytes | None:
        """What the page of `key` follows (empty: it starts a chain); none when it can't be read."""
        node = self._tree.find(key)
        return node.parent_key if node is not None and node.value.readable else None

    def wants(self, key: bytes) -> bool:
        """Whether `write` might take this page: it is neither here nor on its way, and the queue has room."""
        return self._accepting and self._writing < self._settings.queue_pages and key not in self._tree

    def prefix(self, keys: Sequence[bytes], parent: bytes = START) -> int:
        """How many of the first `keys`, which follow `parent`, can be read now."""
        above: Node[_Page] | None = None
        if parent != START:
            above = self._tree.find(parent)
            if above is None:
                return 0
        count = 0
        for key in keys:
            node = self._tree.find(key)
            if node is None or node.parent is not above or not node.value.readable:
                break
            above = node
            count += 1
        return count

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that can be read, parents first."""
        return ((node.key, node.parent_key) for node in self._tree.preorder() if node.value.readable)

    def drain_events(self) -> list[Change]:
        """What has become readable or stopped being so since the last call, in order."""
        return self._changes.drain()

    def stats(self) -> DiskStats:
        count = self._count
        return DiskStats(
            state=self._state(),
            pages=self._readable,
            bytes=self._segments.used,
            live_bytes=self._segments.live_bytes,
            segments=len(self._segments),
            reading=self._reading,
            writing=self._writing,
            written=count.written,
            read=count.read,
            evictions=count.evictions,
            cleaned_bytes=count.cleaned_bytes,
            dropped_writes=count.dropped_writes,
            torn=count.torn,
            corrupt=count.corrupt,
            orphans=count.orphans,
            duplicates=count.duplicates,
            damaged=count.damaged,
            errors=count.errors,
        )

    # --- what is asked for --------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, page_bytes: int) -> DiskResult:
        """From now on serve this namespace. Nothing may be in flight for the caller."""
        assert not self._writing
        assert not self._reading
        if not self._settings.path:
            return DiskResult()
        assert 0 < len(namespace) <= MAX_NAMESPACE
        assert page_bytes > 0
        self._namespace = (namespace, page_bytes)
        self._reopen(namespace, page_bytes)
        return self._settled()

    def write(self, pages: Sequence[DiskPage]) -> DiskResult:
        """Take those pages that can be taken; parents first. Each ends in one WriteEnded, now or later."""
        run: list[WritePage] = []
        last: tuple[Segment[_Page], int] | None = None
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
            node = self._tree.find(key)
            if node is None or not node.value.readable:
                self._out.ended.append(ReadEnded(key, slot, 0, ok=False))
                continue
            page = node.value
            assert page.segment is not None
            self._segments.read_began(page.segment)
            reading[len(order)] = _Reading(key, slot, page, page.segment, page.record)
            order.append(ReadPage(key, page.checksum, page.segment.number, page.record, slot))
        for each in reversed(reading.values()):  # the deepest first: it protects the others at one go
            assert each.page.node is not None
            self._lru.pin(each.page.node)
        if order:
            self._reading += len(order)
            self._reads[self._numbers] = reading
            self._read_bytes[self._numbers] = 0
            self._out.orders.append(Read(self._epoch, self._numbers, tuple(order)))
        return self._settled()

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages, parents first, were useful: they go later."""
        nodes = [node for node in map(self._tree.find, keys) if node is not None]
        for node in reversed(nodes):
            self._lru.pin(node)
        for node in nodes:
            self._lru.unpin(node)

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

    def _reopen(self, namespace: bytes, page_bytes: int) -> None:
        for node in reversed(list(self._tree.preorder())):
            if node.value.readable:
                self._changes.removed(node.key)  # not Cleared, which would be of every tier
        layout = RecordLayout(page_bytes)
        self._begin(layout)
        self._epoch += 1
        self._failure = ""
        self._retry_at = None
        limit = self._settings.max_bytes
        self._hopeless = self._segments.needed > limit
        if self._hopeless:
            self._fail(f"disk.max_bytes is {limit}, too little for pages of {page_bytes} bytes; raise it")
        else:
            self._out.orders.append(Open(self._epoch, namespace, page_bytes, limit))

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
        nodes: list[Node[_Page]] = []
        for key, parent, checksum, number, index in event.records:
            above = self._tree.find(parent) if parent != START else None
            if key in self._tree or (above is None and parent != START):
                continue  # its parent has turned out to be unreadable meanwhile
            page = _Page(checksum)
            page.segment, page.record = self._segments.revive(number, index, page), index
            nodes.append(self._plant(page, key, above))
            self._tell(page)
        for node in nodes:
            self._lru.unpin(node)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _admit(self, page: DiskPage) -> tuple[Segment[_Page], int] | None:
        """A place for a page, which is on its way from now on."""
        if page.key in self._tree:
            return None
        above = self._tree.find(page.parent) if page.parent != START else None
        place = None
        if self.wants(page.key) and (above is not None or page.parent == START):
            place = self._segments.append(moving=False)
        if place is None:
            self._count.dropped_writes += 1
            return None
        written = _Page(page.checksum)
        self._plant(written, page.key, above)
        self._coming[place[0].number, place[1]] = _Coming(written, page.key, page.slot, None)
        self._writing += 1
        return place

    def _append(self, last: tuple[Segment[_Page], int] | None, run: list[WritePage]) -> None:
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
                if page.node is not None:
                    self._drop(page.node)
                self._segments.came(segment, index, None)
                continue
            self._count.written += 1
            if page.node is None:
                self._segments.came(segment, index, None)
                continue
            page.segment, page.record = segment, index
            self._segments.came(segment, index, page)
            self._tell(page)
            self._lru.unpin(page.node)
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
                if page.node is not None:
                    self._lru.unpin(page.node)
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

    def _spoilt(self, page: _Page, segment: Segment[_Page], index: int, corrupt: bool) -> None:
        """A record could not be read: it goes, and what hangs from it."""
        if corrupt:
            self._count.corrupt += 1
            self._out.orders.append(Invalidate(self._epoch, segment.number, index))
        else:
            self._count.errors += 1
        if page.node is not None:
            self._drop(page.node)

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
        """Start on what makes enough room: first what nobody can read, then sparse segments, then pages."""
        while self._segments.short:
            folder = self._segments.oldest_folder()
            if folder is not None:
                self._out.orders.append(DeleteFolder(self._epoch, folder))
                continue
            victim = self._segments.victim() if self._accepting else None
            if victim is not None:
                self._clean(victim)
            elif len(self._lru):
                self._evict()
            else:
                return

    def _delete(self) -> None:
        self._out.orders.extend(Delete(self._epoch, segment.number) for segment in self._segments.deletable())

    def _clean(self, victim: Segment[_Page]) -> None:
        """Move what is live in `victim` to the end of the open segment."""
        self._segments.clean(victim)
        run: list[MovePage] = []
        last: tuple[Segment[_Page], int] | None = None

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
        node = self._lru.pop()
        self._bury(node)
        self._tree.remove(node)
        self._count.evictions += 1

    def _drop(self, top: Node[_Page]) -> None:
        for node in self._tree.subtree(top):
            self._bury(node)
            self._lru.forget(node)
            self._tree.remove(node)

    def _bury(self, node: Node[_Page]) -> None:
        """A page goes from the tree: its record is dead from now on, or will be when it is written."""
        page = node.value
        page.node = None
        if page.readable:
            page.readable = False
            self._readable -= 1
            self._changes.removed(node.key)
        if page.segment is not None:
            self._segments.died(page.segment, page.record)
            page.segment = None

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _plant(self, page: _Page, key: bytes, above: Node[_Page] | None) -> Node[_Page]:
        """Put a page into the tree, pinned once."""
        page.node = self._tree.add(key, above, page)
        self._lru.insert(page.node)
        return page.node

    def _tell(self, page: _Page) -> None:
        """A page is written: if all before it can be read, so can it, and what waited below it."""
        node = page.node
        assert node is not None
        if node.parent is not None and not node.parent.value.readable:
            return
        waiting = [node]
        while waiting:
            here = waiting.pop()
            here.value.readable = True
            self._readable += 1
            self._changes.stored(here.key, here.parent_key)
            waiting.extend(child for child in here.children.values() if child.value.segment is not None)

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
        self._tree.validate()
        self._lru.validate(self._tree)
        self._segments.validate()
        assert self._segments.used <= self._settings.max_bytes or not self._coming
        live = {(s.number, index): page for s in self._segments for index, page in s.live.items()}
        seen = readable = 0
        for node in self._tree.preorder():
            page = node.value
            assert page.node is node
            above = node.parent is None or node.parent.value.readable
            assert page.readable == (page.segment is not None and above)
            readable += page.readable
            if page.segment is not None:
                seen += 1
                assert live[page.segment.number, page.record] is page
                assert intact(node.key, page.segment.number, page.record), "readable, but its record is not there"
        assert seen == len(live), "a record is live that no key leads to"
        assert readable == self._readable
        writes = sum(coming.source is None for coming in self._coming.values())
        assert writes == self._writing <= self._settings.queue_pages
        assert sum(map(len, self._reads.values())) == self._reading
        for segment in self._segments:
            assert segment.coming == sum(number == segment.number for number, _ in self._coming)
            reading = [each for reads in self._reads.values() for each in reads.values() if each.segment is segment]
            assert segment.reading == len(reading)


def _by_index(item: tuple[int, _Page]) -> int:
    return item[0]
