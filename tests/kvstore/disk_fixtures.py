"""A disk on paper: it carries out the index's orders one by one, as well or as badly as it is told to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.disk.interface import DiskEvent, DiskOrder
from kvstore.disk.orders import (
    Delete,
    Deleted,
    DeleteFolder,
    Finish,
    FolderDeleted,
    Found,
    FoundFolder,
    FoundRecord,
    FoundSegment,
    Invalidate,
    Move,
    Moved,
    Open,
    Opened,
    PagesRead,
    Read,
    ReadFinished,
    ReadOutcome,
    Scanned,
    Write,
    Written,
)
from kvstore.disk.record_format import RecordLayout


class PaperRecord(NamedTuple):
    key: bytes
    parent: bytes
    checksum: int
    sequence: int
    intact: bool = True


@dataclass
class PaperRead:
    order: Read
    left: list[int]


@dataclass
class PaperDisk:
    """Segments as dictionaries. `rotten` are records that were spoilt behind the index's back."""

    layout: RecordLayout
    segments: dict[int, dict[int, PaperRecord | None]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # records appended, dead ones and gaps included
    folders: dict[str, int] = field(default_factory=dict)
    rotten: set[tuple[int, int]] = field(default_factory=set)
    orders: deque[DiskOrder] = field(default_factory=deque)
    reads: list[PaperRead] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)
    done: int = 0  # pages of the first order

    @property
    def bytes(self) -> int:
        return sum(map(self.layout.offset, self.sizes.values())) + sum(self.folders.values())

    def submit(self, order: DiskOrder) -> None:
        if isinstance(order, Read):
            self.reads.append(PaperRead(order, list(range(len(order.pages)))))
        else:
            self.orders.append(order)

    def holds(self, key: bytes, segment: int, record: int) -> bool:
        """Whether a sound record of `key` is there; what has rotted unseen counts as sound."""
        found = self.segments.get(segment, {}).get(record)
        return found is not None and found.key == key and (found.intact or (segment, record) in self.rotten)

    def step(self, pages: int, fault: str, damaged: frozenset[bytes] = frozenset()) -> list[DiskEvent]:
        """Carry out the first order, or some pages of it. With a fault ("full" or "broken") it fails."""
        order = self.orders[0]
        match order:
            case Write() | Move():
                run = order.pages[self.done : self.done + pages]
                first = order.first + self.done
                self.done += len(run)
                if self.done == len(order.pages):
                    self.orders.popleft()
                    self.done = 0
                if isinstance(order, Write):
                    return [self._write(order, first, fault, damaged)]
                return [self._move(order, first, len(run), fault)]
            case _:
                self.orders.popleft()
        match order:
            case Open():
                return self._scan(order.epoch, pages)
            case Delete(epoch=epoch, segment=segment):
                self._unneeded(segment)
                if fault:
                    return [Deleted(epoch, segment, fault)]
                self.segments.pop(segment, None)
                self.sizes.pop(segment, None)
                self.rotten = {place for place in self.rotten if place[0] != segment}
                return [Deleted(epoch, segment)]
            case DeleteFolder(epoch=epoch, name=name):
                if not fault:
                    del self.folders[name]
                return [FolderDeleted(epoch, name, fault)]
            case Invalidate(segment=segment, record=record):
                self.segments[segment][record] = None
                self.rotten.discard((segment, record))
                return []
            case Finish():
                return []
        raise AssertionError(order)

    def read(self, chosen: int, count: int, unreadable: bool) -> list[DiskEvent]:
        """Bring some pages of one of the reads, the last first."""
        read = self.reads[chosen]
        order = read.order
        outcomes: list[tuple[int, ReadOutcome]] = []
        for _ in range(min(count, len(read.left))):
            place = read.left.pop()
            page = order.pages[place]
            found = self.segments[page.segment][page.record]  # none: invalidated since
            assert found is None or found.key == page.key, "a read was sent to a place where its page is not"
            sound = found is not None and found.intact and found.checksum == page.checksum
            outcomes.append((place, "unreadable" if unreadable else "ok" if sound else "corrupt"))
        events: list[DiskEvent] = [PagesRead(order.epoch, order.number, tuple(outcomes))]
        if not read.left:
            del self.reads[chosen]
            events.append(ReadFinished(order.epoch, order.number, 0.001, 0.002))
        return events

    def rot(self, segment: int, record: int) -> None:
        found = self.segments[segment][record]
        if found is not None and found.intact:
            self.segments[segment][record] = found._replace(intact=False)
            self.rotten.add((segment, record))

    def kill(self, written: int) -> None:
        """The process dies: of the write that was under way some pages are there, the next one is torn."""
        if self.orders and isinstance(order := self.orders[0], Write):
            run = order.pages[self.done : self.done + written + 1]
            for record, page in enumerate(run, order.first + self.done):
                torn = record == order.first + self.done + written
                self._put(order.segment, record, PaperRecord(*page[:4], intact=not torn))
        self.orders.clear()
        self.reads.clear()
        self.broken.clear()
        self.done = 0

    def _write(self, order: Write, first: int, fault: str, damaged: frozenset[bytes]) -> Written:
        count = (self.done or len(order.pages)) - (first - order.first)
        pages = order.pages[first - order.first :][:count]
        if order.segment in self.broken or fault:
            # A failed write may have left anything.
            self.broken.add(order.segment)
            for record, page in enumerate(pages[: len(pages) // 2], first):
                self._put(order.segment, record, PaperRecord(*page[:4]))
            return Written(order.epoch, order.segment, first, (True,) * len(pages), fault or "broken", fault == "full")
        intact = tuple(page.key not in damaged for page in pages)
        for record, (page, sound) in enumerate(zip(pages, intact, strict=True), first):
            self._put(order.segment, record, PaperRecord(*page[:4]) if sound else None)
        return Written(order.epoch, order.segment, first, intact)

    def _move(self, order: Move, first: int, count: int, fault: str) -> Moved:
        pages = order.pages[first - order.first :][:count]
        outcomes: list[ReadOutcome] = []
        for page in pages:
            found = self.segments[page.segment].get(page.record)
            sound = found is not None and found.key == page.key and found.intact
            outcomes.append("ok" if sound else "corrupt")
        if order.segment in self.broken or fault:
            self.broken.add(order.segment)
            return Moved(order.epoch, order.segment, first, tuple(outcomes), fault or "broken", fault == "full")
        for record, (page, outcome) in enumerate(zip(pages, outcomes, strict=True), first):
            self._put(order.segment, record, PaperRecord(*page[:4]) if outcome == "ok" else None)
        return Moved(order.epoch, order.segment, first, tuple(outcomes))

    def _put(self, segment: int, record: int, content: PaperRecord | None) -> None:
        self.segments.setdefault(segment, {})[record] = content
        self.sizes[segment] = max(self.sizes.get(segment, 0), record + 1)

    def _unneeded(self, segment: int) -> None:
        for read in self.reads:
            assert all(read.order.pages[place].segment != segment for place in read.left), "deleted under a reader"
        for order in self.orders:
            match order:
                case Write(segment=target) | Move(segment=target) | Invalidate(segment=target):
                    assert target != segment, "deleted with a write on its way"
                case _:
                    pass
            if isinstance(order, Move):
                assert all(page.segment != segment for page in order.pages), "deleted before it was moved"

    def _scan(self, epoch: int, chunk: int) -> list[DiskEvent]:
        records = sorted(
            (record.sequence, segment, place, record)
            for segment, places in self.segments.items()
            for place, record in places.items()
            if record is not None and (record.intact or (segment, place) in self.rotten)
        )
        latest = {record.key: (segment, place, record) for _, segment, place, record in records}
        linked: dict[bytes, FoundRecord] = {}
        waiting = list(latest.values())
        before = -1
        while len(linked) > before:
            before = len(linked)
            for segment, place, record in waiting:
                if record.key not in linked and (not record.parent or record.parent in linked):
                    linked[record.key] = FoundRecord(record.key, record.parent, record.checksum, segment, place)
        found = list(linked.values())
        segments = tuple(
            FoundSegment(number, self.layout.offset(size), size) for number, size in sorted(self.sizes.items())
        )
        folders = tuple(FoundFolder(*folder) for folder in self.folders.items())
        sequence = records[-1][0] + 1 if records else 1
        counts = (0, 0, len(latest) - len(found), len(records) - len(latest))
        return [
            Scanned(epoch, segments, folders, sequence, *counts),
            *(Found(epoch, tuple(found[at : at + chunk])) for at in range(0, len(found), chunk)),
            Opened(epoch, ""),
        ]
