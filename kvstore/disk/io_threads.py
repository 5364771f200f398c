"""The disk tier's hands: the threads that own its files and carry out what the index orders.

    Write ──▶ check the arena's bytes ──▶ append ─────────────▶ Written …
    Read ───▶ some threads: bring a run into its slots, check it ─▶ PagesRead …, ReadFinished
    all else ──▶ the thread that appends, in the order given

So taking checksums overlaps with moving bytes: while one run is on its way to or from the disk, its neighbour is being
checked. Each order ends in its events whatever happens. The index bounds the queues, since it knows what is in flight.
A disk that hangs blocks these threads only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from baton.errors import StartupError
from kvstore.checksum import page_checksum
from kvstore.disk.files import NodeDirectory, SegmentFiles, segment_path, takes_direct_io
from kvstore.disk.interface import DiskEvent, DiskOrder
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
    ReadOutcome,
    Scanned,
    Trouble,
    Write,
    Written,
)
from kvstore.disk.record_format import RecordFormat, RecordHeader, RecordLayout
from kvstore.disk.records import HeaderRoom, RecordReader, RecordWriter, Wanted, run_length, runs
from kvstore.disk.recovery_scan import scan

log = logging.getLogger(__name__)

_FOUND_PER_EVENT = 1_024  # records, so that the index never takes long over one
_CLOSE_SECONDS = 2.0
_ROOMS = 8  # runs that are checked or being appended
_FETCHERS = 3  # threads: one's checking overlaps with another's reading

_NOT_OPEN = OSError(errno.ESTALE, "another namespace is open")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _WriteRun:
    """Part of a Write, checked and ready to be appended; `room`, which its headers lie in, is used again after that."""

    epoch: int
    segment: int
    first: int
    intact: tuple[bool, ...]
    gathered: Sequence[memoryview] = ()
    room: HeaderRoom | None = None


class _ReadOrder:
    """A Read on its way: the threads that fetch take its runs from it, one after another."""

    def __init__(self, order: Read) -> None:
        self.order = order
        self.lock = threading.Lock()
        self.runs: deque[list[Wanted]] | None = None  # none until a thread has begun
        self.began = 0.0
        self.first_seconds = 0.0
        self.left = len(order.pages)


@dataclass(slots=True)
class _OpenNamespace:
    """An opened namespace: what each thread needs of it. Made by the thread that appends, before anybody knows of a
    record in it."""

    epoch: int
    layout: RecordLayout
    form: RecordFormat
    rooms: SimpleQueue[HeaderRoom | None]  # that no run is using
    files: SegmentFiles  # of the thread that appends
    writer: RecordWriter
    mover: RecordReader
    moved: list[memoryview]  # room for pages that are moved
    moved_headers: HeaderRoom
    fetching: list[SegmentFiles]  # of each thread that fetches
    readers: list[RecordReader]
    broken: dict[int, OSError] = field(default_factory=dict[int, OSError])  # segments that could not be written


_Append: TypeAlias = "Open | _WriteRun | Move | Finish | Delete | DeleteFolder | Invalidate"


class DiskTier:
    """The threads and files of one node's disk tier. Makes and locks its directory when it is first told to open."""

    def __init__(self, directory: Path, arena: Callable[[int], memoryview]) -> None:
        """`arena` gives the memory of a slot, as large as a page of the namespace that is open."""
        self._path = directory
        self._arena = arena
        self._directory: NodeDirectory | None = None
        self._folder: _OpenNamespace | None = None
        self._epoch = 0  # of the latest Open
        self._closing = False
        self._failure: BaseException | None = None  # what one of the threads has died of
        self._events: deque[DiskEvent] = deque()
        self._signalled = False  # the store's loop has been told of events, and has not looked yet
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._to_check: SimpleQueue[Write | _Append | None] = SimpleQueue()
        self._to_append: SimpleQueue[_Append | None] = SimpleQueue()
        self._to_fetch: SimpleQueue[_ReadOrder | None] = SimpleQueue()
        self._threads = [
            self._thread("check", self._to_check, self._check),
            self._thread("append", self._to_append, self._append),
            *(self._thread(f"fetch-{n}", self._to_fetch, partial(self._fetch, n)) for n in range(_FETCHERS)),
        ]
        for thread in self._threads:
            thread.start()

    # --- the store's loop ---------------------------------------------------------------------------------------------

    def submit(self, order: DiskOrder) -> None:
        match order:
            case Read():
                self._to_fetch.put(_ReadOrder(order))
            case Open(epoch=epoch):
                self._epoch = epoch
                self._to_check.put(order)
            case Write() | Move() | Finish() | Delete() | DeleteFolder() | Invalidate():
                self._to_check.put(order)
            case _:
                raise AssertionError(f"{type(order).__name__} is no order for the disk's threads")

    def fileno(self) -> int:
        return self._signal

    def poll(self) -> list[DiskEvent]:
        """What has happened. Not more than one large event at a time, so that the caller's turn stays short. Raises
        what a thread has died of, which no disk can bring about."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        self._signalled = False  # before looking: what comes after this tells again
        events: list[DiskEvent] = []
        while self._events:
            events.append(self._events.popleft())
            if isinstance(events[-1], Found) and self._events:
                self._signalled = True
                os.eventfd_write(self._signal, 1)
                break
        return events

    def close(self) -> None:
        """End the threads after what they are doing. Those that a disk does not let go of are left behind."""
        if self._closing:
            return
        self._closing = True
        self._epoch = -1
        for queue in (self._to_check, self._to_append, *[self._to_fetch] * _FETCHERS):
            queue.put(None)
        if self._folder is not None:
            self._folder.rooms.put(None)
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the disk below %s hangs; its threads are left behind", self._path)
            return  # with their files, the lock among them
        self._leave_folder()
        if self._directory is not None:
            self._directory.close()
        os.close(self._signal)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _thread(self, name: str, queue: SimpleQueue[T | None], work: Callable[[T], None]) -> threading.Thread:
        return threading.Thread(target=self._serve, args=(queue, work), name=f"disk-{name}", daemon=True)

    def _serve(self, queue: SimpleQueue[T | None], work: Callable[[T], None]) -> None:
        try:
            while (item := queue.get()) is not None and not self._closing:
                work(item)
        except BaseException as error:  # noqa: BLE001 - the loop shall hear of it, whatever it is
            self._failure = error
            os.eventfd_write(self._signal, 1)

    def _tell(self, event: DiskEvent) -> None:
        self._events.append(event)
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._signal, 1)

    def _opened(self, epoch: int) -> _OpenNamespace:
        folder = self._folder
        if folder is None or folder.epoch != epoch:
            raise _NOT_OPEN
        return folder

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self, order: Open) -> None:
        try:
            self._leave_folder()
            if self._directory is None:
                self._directory = NodeDirectory(self._path)
            else:
                self._directory.renew()
            self._scan(self._directory, order)
        except (StartupError, OSError) as error:
            self._tell(OpenFailed(order.epoch, _reason(error)))

    def _scan(self, directory: NodeDirectory, order: Open) -> None:
        path = directory.folder(order.namespace, order.page_bytes)
        layout = RecordLayout(order.page_bytes, order.kv_heads)
        read_only = ""
        direct = False
        try:
            direct = takes_direct_io(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                read_only = _reason(error)
        files, *fetching = [
            SegmentFiles(path, layout, order.namespace, direct, writable=number == 0 and not read_only)
            for number in range(1 + _FETCHERS)
        ]
        folder = self._folder = _OpenNamespace(
            order.epoch,
            layout,
            RecordFormat(layout, order.namespace),
            SimpleQueue(),
            files,
            RecordWriter(files, layout),
            RecordReader(files, layout),
            _pages(layout),
            HeaderRoom(layout),
            fetching,
            [RecordReader(each, layout) for each in fetching],
        )
        for _ in range(_ROOMS):
            folder.rooms.put(HeaderRoom(layout))
        found = scan(path, layout, order.namespace, order.max_bytes, lambda: self._epoch != order.epoch)
        if found is None:
            return
        if not read_only:
            for segment, record in found.spoilt:
                with contextlib.suppress(OSError):
                    self._spoil(folder, segment, record)
        self._tell(
            Scanned(
                order.epoch,
                tuple(found.segments),
                tuple(directory.others(path)),
                found.next_sequence,
                found.torn,
                found.corrupt,
                found.orphans,
                found.duplicates,
            )
        )
        for start in range(0, len(found.records), _FOUND_PER_EVENT):
            self._tell(Found(order.epoch, tuple(found.records[start : start + _FOUND_PER_EVENT])))
        self._tell(Opened(order.epoch, read_only))

    def _leave_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            for files in (folder.files, *folder.fetching):
                files.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def _check(self, order: Write | _Append) -> None:
        """Check pages of the arena, run by run, and hand them on; all else as it is, to keep the order."""
        if not isinstance(order, Write):
            self._to_append.put(order)
            return
        folder = self._folder
        if folder is None or folder.epoch != order.epoch:
            self._to_append.put(_WriteRun(order.epoch, order.segment, order.first, (True,) * len(order.pages)))
            return
        length = run_length(folder.layout)
        for start in range(0, len(order.pages), length):
            room = folder.rooms.get()
            if room is None:
                return  # closing
            records: list[tuple[RecordHeader | None, memoryview]] = []
            for key, parent, checksum, sequence, slot in order.pages[start : start + length]:
                page = self._arena(slot)
                intact = page_checksum(page, folder.layout.kv_heads) == checksum
                records.append((RecordHeader(key, parent, checksum, sequence) if intact else None, page))
            intact = tuple(header is not None for header, _ in records)
            gathered = room.gather(folder.form, records)
            self._to_append.put(_WriteRun(order.epoch, order.segment, order.first + start, intact, gathered, room))

    def _append(self, order: _Append) -> None:
        match order:
            case _WriteRun():
                self._write(order)
            case Open():
                self._open(order)
            case Move():
                self._move(order)
            case Delete(epoch=epoch, segment=segment):
                self._tell(Deleted(epoch, segment, _attempt(lambda: self._delete(epoch, segment))))
            case DeleteFolder(epoch=epoch, name=name):
                self._tell(FolderDeleted(epoch, name, _attempt(lambda: self._delete_folder(name))))
            case Finish(epoch=epoch, segment=segment):
                self._attempt(epoch, lambda: self._opened(epoch).files.finish(segment))
            case Invalidate(epoch=epoch, segment=segment, record=record):
                self._attempt(epoch, lambda: self._spoil(self._opened(epoch), segment, record))

    def _write(self, run: _WriteRun) -> None:
        error = self._put(run.epoch, run.segment, run.first, run.gathered)
        if run.room is not None and self._folder is not None:
            self._folder.rooms.put(run.room)
        self._tell(Written(run.epoch, run.segment, run.first, run.intact, _reason(error), _is_full(error)))

    def _put(self, epoch: int, segment: int, first: int, gathered: Sequence[memoryview]) -> OSError | None:
        """Append to a segment, unless that has failed before: what follows a gap would never be missed."""
        folder = self._folder
        if folder is None or folder.epoch != epoch:
            return _NOT_OPEN
        if segment in folder.broken:
            return folder.broken[segment]
        try:
            try:
                folder.writer.append(segment, first, gathered)
            except FileNotFoundError:
                if first:
                    raise
                self._restore(folder)
                folder.writer.append(segment, first, gathered)
        except OSError as error:
            folder.broken[segment] = error
            return error
        return None

    def _spoil(self, folder: _OpenNamespace, segment: int, record: int) -> None:
        """Make a record one that holds no page. Raises OSError."""
        header = memoryview(mmap.mmap(-1, folder.layout.header_bytes))
        folder.form.void(header)
        folder.writer.overwrite(segment, record, header)

    def _restore(self, folder: _OpenNamespace) -> None:
        """Raise OSError because the directory has been removed."""
        assert self._directory is not None
        try:
            self._directory.renew()
        except StartupError as error:
            raise OSError(errno.ENOENT, str(error)) from None
        folder.files.folder.mkdir(mode=0o700, exist_ok=True)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, fetch: _ReadOrder) -> None:
        """Thread `number` brings what is left of a Read."""
        order, folder = fetch.order, self._folder
        if folder is None or folder.epoch != order.epoch:
            self._fetched(fetch, tuple((place, "unreadable") for place in range(len(order.pages))))
            return
        if fetch.runs is None:
            fetch.began = time.monotonic()
            fetch.runs = deque(runs(folder.layout, self._wanted(order)))
            if len(fetch.runs) > 1:
                self._to_fetch.put(fetch)  # an idle thread helps
        reader = folder.readers[number]
        while fetch.runs and not self._closing:
            with contextlib.suppress(IndexError):  # another thread took the last
                run = fetch.runs.popleft()
                here = reader.read(run)
                self._fetched(
                    fetch,
                    tuple(
                        (
                            each.tag,
                            _outcome(filled, each.buffer, folder.layout.kv_heads, order.pages[each.tag].checksum),
                        )
                        for each, filled in zip(run, here, strict=True)
                    ),
                )

    def _fetched(self, fetch: _ReadOrder, outcomes: tuple[tuple[int, ReadOutcome], ...]) -> None:
        order = fetch.order
        with fetch.lock:
            seconds = time.monotonic() - fetch.began
            if fetch.left == len(order.pages):
                fetch.first_seconds = seconds
            fetch.left -= len(outcomes)
            self._tell(PagesRead(order.epoch, order.number, outcomes))
            if not fetch.left:
                self._tell(ReadFinished(order.epoch, order.number, fetch.first_seconds, seconds))

    def _wanted(self, order: Read) -> list[Wanted]:
        return [
            Wanted(page.segment, page.record, self._arena(page.slot), place) for place, page in enumerate(order.pages)
        ]

    # --- making room --------------------------------------------------------------------------------------------------

    def _move(self, order: Move) -> None:
        for start, pages in _batches(order.pages, self._folder.layout if self._folder is not None else None):
            outcomes: list[ReadOutcome] = ["unreadable"] * len(pages)
            try:
                folder = self._opened(order.epoch)
                outcomes = self._bring(folder, pages)
                gathered = folder.moved_headers.gather(folder.form, _records(folder, pages, outcomes))
                error = self._put(order.epoch, order.segment, order.first + start, gathered)
            except OSError as failure:
                error = failure
            self._tell(
                Moved(order.epoch, order.segment, order.first + start, tuple(outcomes), _reason(error), _is_full(error))
            )

    def _bring(self, folder: _OpenNamespace, pages: Sequence[MovePage]) -> list[ReadOutcome]:
        """Read and check records that are to be moved."""
        outcomes: list[ReadOutcome] = ["unreadable"] * len(pages)
        wanted = [Wanted(page.segment, page.record, folder.moved[place], place) for place, page in enumerate(pages)]
        kv_heads = folder.layout.kv_heads
        for run in runs(folder.layout, wanted):
            for each, here in zip(run, folder.mover.read(run), strict=True):
                outcomes[each.tag] = _outcome(here, each.buffer, kv_heads, pages[each.tag].checksum)
        return outcomes

    def _delete(self, epoch: int, segment: int) -> None:
        folder = self._opened(epoch)
        for files in (folder.files, *folder.fetching):  # a file that is open keeps its bytes on the disk
            files.forget(segment)
        folder.broken.pop(segment, None)
        segment_path(folder.files.folder, segment).unlink(missing_ok=True)

    def _delete_folder(self, name: str) -> None:
        assert self._directory is not None
        self._directory.delete(name)

    def _attempt(self, epoch: int, action: Callable[[], None]) -> None:
        reason = _attempt(action)
        if reason:
            self._tell(Trouble(epoch, reason))


def _pages(layout: RecordLayout) -> list[memoryview]:
    """Room for a run of pages, which only takes memory once it is used."""
    size = layout.page_bytes
    room = memoryview(mmap.mmap(-1, run_length(layout) * size))
    return [room[at : at + size] for at in range(0, len(room), size)]


def _batches(pages: Sequence[MovePage], layout: RecordLayout | None) -> Iterator[tuple[int, Sequence[MovePage]]]:
    length = run_length(layout) if layout is not None else len(pages)
    for start in range(0, len(pages), length):
        yield start, pages[start : start + length]


def _records(
    folder: _OpenNamespace, pages: Sequence[MovePage], outcomes: Sequence[ReadOutcome]
) -> list[tuple[RecordHeader | None, memoryview]]:
    return [
        (RecordHeader(page.key, page.parent, page.checksum, page.sequence) if outcome == "ok" else None, room)
        for page, outcome, room in zip(pages, outcomes, folder.moved, strict=False)
    ]


def _outcome(here: bool, page: memoryview, kv_heads: int, checksum: int) -> ReadOutcome:
    if not here:
        return "unreadable"
    return "ok" if page_checksum(page, kv_heads) == checksum else "corrupt"


def _attempt(action: Callable[[], None]) -> str:
    """Why an action failed; empty when it did not."""
    try:
        action()
    except OSError as error:
        return _reason(error)
    return ""


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return str(error)


def _is_full(error: OSError | None) -> bool:
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)
