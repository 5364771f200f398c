"""The disk tier's hands: the threads that own its files and carry out what the index orders.

    Write ──▶ some threads: check a page's bytes in the arena, make its file ──▶ Written …
    Read ───▶ some threads: bring a page into its slot, check its bytes ───────▶ PagesRead …, ReadFinished
    all else ──▶ the threads that write

So taking one page's checksum overlaps with moving another one's bytes. Each order ends in its events whatever happens.
The index bounds the queues, since it knows what is in flight. A disk that hangs blocks these threads only.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from baton.errors import StartupError
from kvstore.checksum import page_checksum
from kvstore.disk import orders as disk
from kvstore.disk.file_names import FileNames, PageFile
from kvstore.disk.files import NodeDirectory, PageFiles
from kvstore.disk.listing import list_pages

log = logging.getLogger(__name__)

_PAGES_PER_EVENT = 1_024  # pages, so that the index never takes long over one event
_RUN_BYTES = 2**20  # of small pages that one thread moves before it tells of them
_CLOSE_SECONDS = 2.0
_WRITERS = 4  # small pages need several writes at a time
_READERS = 8  # and many reads

_NOT_OPEN = OSError(errno.ESTALE, "another namespace is open")
_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Namespace:
    """An opened namespace."""

    epoch: int
    page_bytes: int
    kv_heads: int
    files: PageFiles


class _ReadProgress:
    """A Read on its way, whose runs several threads may have taken."""

    def __init__(self, order: disk.Read) -> None:
        self.order = order
        self.lock = threading.Lock()
        self.began = 0.0  # when the first run was
        self.first_seconds = 0.0
        self.left = len(order.pages)


_Run: TypeAlias = tuple[_ReadProgress, range]  # places in the order
_Task: TypeAlias = "disk.Write | disk.Open | disk.Delete | disk.DeleteFolder"


class DiskTier:
    """The threads and files of one node's disk tier. Makes and locks its directory when it is first told to open."""

    def __init__(self, directory: Path, arena: Callable[[int], memoryview]) -> None:
        """`arena` gives the memory of a slot, as large as a page of the namespace that is open."""
        self._path = directory
        self._arena = arena
        self._directory: NodeDirectory | None = None
        self._namespace: _Namespace | None = None
        self._renewing = threading.Lock()
        self._epoch = 0  # of the latest Open
        self._page_bytes = 1  # of the latest Open
        self._closing = False
        self._failure: BaseException | None = None  # what one of the threads has died of
        self._events: deque[disk.DiskEvent] = deque()
        self._signalled = False  # the store's loop has been told of events, and has not looked yet
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._to_write: SimpleQueue[_Task | None] = SimpleQueue()
        self._to_read: SimpleQueue[_Run | None] = SimpleQueue()
        self._threads = [
            *(self._thread(f"write-{n}", self._to_write, self._carry_out) for n in range(_WRITERS)),
            *(self._thread(f"read-{n}", self._to_read, self._read) for n in range(_READERS)),
        ]
        for thread in self._threads:
            thread.start()

    # --- the store's loop ---------------------------------------------------------------------------------------------

    def submit(self, order: disk.DiskOrder) -> None:
        match order:
            case disk.Read(pages=pages):
                read = _ReadProgress(order)
                # The first run is one page, so that the waiter for it need not wait for more.
                self._to_read.put((read, range(1)))
                for run in _runs(1, len(pages), self._page_bytes):
                    self._to_read.put((read, run))
            case disk.Write(epoch=epoch, pages=pages):
                for run in _runs(0, len(pages), self._page_bytes):
                    self._to_write.put(disk.Write(epoch, pages[run.start : run.stop]))
            case disk.Open(epoch=epoch, page_bytes=page_bytes):
                self._epoch, self._page_bytes = epoch, page_bytes
                self._to_write.put(order)
            case disk.Delete() | disk.DeleteFolder():
                self._to_write.put(order)
            case _:
                raise AssertionError(f"{type(order).__name__} is no order for the disk's threads")

    def fileno(self) -> int:
        return self._signal

    def poll(self) -> list[disk.DiskEvent]:
        """What has happened. Not more than one large event at a time, so that the caller's turn stays short. Raises
        what a thread has died of, which no disk can bring about."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        self._signalled = False  # before looking: what comes after this tells again
        events: list[disk.DiskEvent] = []
        while self._events:
            events.append(self._events.popleft())
            if isinstance(events[-1], disk.PagesListed) and self._events:
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
        for queue, threads in ((self._to_write, _WRITERS), (self._to_read, _READERS)):
            for _ in range(threads):
                queue.put(None)
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the disk below %s hangs; its threads are left behind", self._path)
            return  # with the lock
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

    def _tell(self, event: disk.DiskEvent) -> None:
        self._events.append(event)
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._signal, 1)

    def _carry_out(self, task: _Task) -> None:
        match task:
            case disk.Write():
                self._write(task)
            case disk.Delete():
                self._delete(task)
            case disk.DeleteFolder(epoch=epoch, name=name):
                self._tell(disk.FolderDeleted(epoch, name, self._delete_folder(name)))
            case disk.Open():
                try:
                    self._open(task)
                except (StartupError, OSError) as error:
                    self._tell(disk.OpenFailed(task.epoch, _reason(error)))

    def _opened(self, epoch: int) -> _Namespace:
        """The namespace of an order. Raises OSError when another one is open."""
        namespace = self._namespace
        if namespace is None or namespace.epoch != epoch:
            raise _NOT_OPEN
        return namespace

    def _open(self, order: disk.Open) -> None:
        if self._directory is None:
            self._directory = NodeDirectory(self._path)
        else:
            self._directory.renew()
        directory = self._directory
        folder = directory.folder(order.namespace, order.page_bytes)
        names = FileNames(order.namespace, order.page_bytes)
        listing = list_pages(folder, names, lambda: self._epoch != order.epoch)
        if listing is None:
            return
        others = tuple(directory.others(folder))
        files = PageFiles(folder, names, order.spares)
        if not directory.read_only:
            files.make_folders()
        self._namespace = _Namespace(order.epoch, order.page_bytes, order.kv_heads, files)
        for start in range(0, len(listing.pages), _PAGES_PER_EVENT):
            self._tell(disk.PagesListed(order.epoch, tuple(listing.pages[start : start + _PAGES_PER_EVENT])))
        counts = (listing.stray_bytes, listing.torn, listing.corrupt, listing.orphans, listing.duplicates)
        self._tell(disk.Opened(order.epoch, others, *counts, directory.read_only))

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, order: disk.Write) -> None:
        outcomes: list[tuple[bytes, disk.WriteOutcome]] = []
        failure: OSError | None = None
        for page, slot in order.pages:
            outcome: disk.WriteOutcome = "failed"
            if failure is None:
                try:
                    outcome = self._put(self._opened(order.epoch), page, slot)
                except OSError as error:
                    failure = error
            outcomes.append((page.key, outcome))
        self._tell(disk.Written(order.epoch, tuple(outcomes), _reason(failure), _is_full(failure)))

    def _put(self, namespace: _Namespace, page: PageFile, slot: int) -> disk.WriteOutcome:
        """Write one page. Raises OSError."""
        content = self._arena(slot)
        if page_checksum(content, namespace.kv_heads) != page.checksum:
            return "damaged"
        try:
            namespace.files.write_page(page, content)
        except FileNotFoundError:
            self._restore(namespace)
            namespace.files.write_page(page, content)
        return "ok"

    def _restore(self, namespace: _Namespace) -> None:
        """Make the directory again, which has been removed. Raises OSError."""
        assert self._directory is not None
        with self._renewing:
            try:
                self._directory.renew()
            except StartupError as error:
                raise OSError(errno.ENOENT, str(error)) from None
            namespace.files.make_folders()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, run: _Run) -> None:
        read, places = run
        with read.lock:
            read.began = read.began or time.monotonic()
        pages = read.order.pages
        self._came(read, tuple((place, self._get(read.order.epoch, *pages[place])) for place in places))

    def _get(self, epoch: int, page: PageFile, slot: int) -> disk.ReadOutcome:
        try:
            namespace = self._opened(epoch)
            room = self._arena(slot)
            if namespace.files.read_page(page, room) < len(room):
                return "corrupt"
        except OSError as error:
            return "busy" if error.errno in _BUSY else "unreadable"
        return "ok" if page_checksum(room, namespace.kv_heads) == page.checksum else "corrupt"

    def _came(self, read: _ReadProgress, outcomes: tuple[tuple[int, disk.ReadOutcome], ...]) -> None:
        order = read.order
        with read.lock:
            seconds = time.monotonic() - read.began
            if read.left == len(order.pages):
                read.first_seconds = seconds
            read.left -= len(outcomes)
            self._tell(disk.PagesRead(order.epoch, order.number, outcomes))
            if not read.left:
                self._tell(disk.ReadFinished(order.epoch, order.number, read.first_seconds, seconds))

    # --- making room --------------------------------------------------------------------------------------------------

    def _delete(self, order: disk.Delete) -> None:
        deleted: list[PageFile] = []
        left: list[PageFile] = []
        reason = ""
        for page in order.pages:
            try:
                files = self._opened(order.epoch).files
                (files.evict if isinstance(order, disk.Evict) else files.delete)(page)
                deleted.append(page)
            except OSError as error:
                left.append(page)
                reason = _reason(error)
        self._tell(disk.Deleted(order.epoch, tuple(deleted), tuple(left), reason))

    def _delete_folder(self, name: str) -> str:
        """Delete another namespace. Return why that failed."""
        assert self._directory is not None
        try:
            self._directory.delete(name)
        except OSError as error:
            return _reason(error)
        return ""


def _runs(start: int, stop: int, page_bytes: int) -> Iterator[range]:
    length = max(1, _RUN_BYTES // page_bytes)
    for first in range(start, stop, length):
        yield range(first, min(first + length, stop))


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return str(error)


def _is_full(error: OSError | None) -> bool:
    return error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)
