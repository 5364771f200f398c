"""The disk tier's directory: whose it is, and the files in it.

    <path>/<node>/                         0700, one store at a time
        lock                               0600, locked for as long as the store lives
        <namespace>-<page bytes>/          0700, one for each kind of page that was ever served
            00/ … ff/                      0700, by the last byte of the key
                <name>.kv                  0600, one page (`kvstore.disk.file_names`)
                <name>.kv.old              the file of an evicted page, which another page is written over
                <name>.kv.tmp              a page that is being written, or whose writing was cut off

Only files with these names are ever read, counted or deleted. Other files are left alone.

A page is written beside its place and then renamed, so a file with a page's name is whole when a process is killed.
Nothing is synced. After a power loss the pages of the last seconds may be missing. If the file system kept a name but
not all of its bytes, the file's size or the page's checksum shows it, and the page is computed again.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from baton.errors import StartupError
from kvstore.disk.file_names import BLOCK, PAGE_NAME, SPARE, UNFINISHED, FileNames, PageFile, footprint
from kvstore.disk.orders import FoundFolder

T = TypeVar("T")

_FOLDER = re.compile(r"(?:[0-9a-f]{2}){1,64}-([1-9]\d{0,11})")
_SPREAD = re.compile(r"[0-9a-f]{2}")


class NodeDirectory:
    """One node's directory, locked. Raises StartupError when it can't be made, is another user's, or is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_only = ""  # why nothing can be written
        self._lock = -1
        self.renew()

    def renew(self) -> None:
        """Make and lock the directory again if it has been removed. Raises StartupError as at first."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.path.stat()
            if info.st_uid != os.geteuid():
                raise StartupError(f"{self.path} belongs to user {info.st_uid}; name another directory in disk.path")
            if stat.S_IMODE(info.st_mode) & 0o077:
                self.path.chmod(0o700)
            self._take_lock()
        except OSError as error:
            raise StartupError(f"can't use {self.path} for the disk tier: {error.strerror}") from None

    def folder(self, namespace: bytes, page_bytes: int) -> Path:
        """The folder of one kind of page, made if it is missing. Raises OSError."""
        folder = self.path / f"{namespace.hex()}-{page_bytes}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def others(self, own: Path) -> list[FoundFolder]:
        """The folders of other kinds of pages, the one that was not used for longest first. Raises OSError."""
        folders: list[tuple[float, FoundFolder]] = []
        for folder in self._folders():
            if folder != own:
                pages = sum(1 for _ in page_files(folder))
                size = pages * footprint(int(folder.name.rpartition("-")[2]))
                folders.append((folder.lstat().st_mtime, FoundFolder(folder.name, size)))
        return [folder for _, folder in sorted(folders)]

    def delete(self, name: str) -> None:
        """Delete the pages in another kind's folder, and the folder if nothing else is in it. Raises OSError."""
        folder = self.path / name
        with contextlib.suppress(FileNotFoundError):
            for entry in page_files(folder):
                remove(entry.path)
            with contextlib.suppress(OSError):  # files that are not ours stay, and so does their folder
                for spread in sorted(folder.iterdir()):
                    spread.rmdir()
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _folders(self) -> Iterator[Path]:
        """The folders that are named like those of a kind of page."""
        for folder in self.path.iterdir():
            if _FOLDER.fullmatch(folder.name) and stat.S_ISDIR(folder.lstat().st_mode):
                yield folder

    def _take_lock(self) -> None:
        path = self.path / "lock"
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), path.stat()):
                    return
            self.close()
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        self.read_only = ""
        try:
            lock = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            self.read_only = os.strerror(error.errno)
            lock = os.open(path, flags | os.O_RDONLY)  # a directory that can only be read is better than none
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StartupError(
                f"{self.path} is in use by another store; give each store of a machine its own node name or disk.path"
            ) from None
        self._lock = lock


def page_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a kind's folder that are named like a page's file, finished or not. Raises OSError."""
    with os.scandir(folder) as entries:
        spreads = [each.path for each in entries if _SPREAD.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    for spread in spreads:
        with os.scandir(spread) as entries:
            for entry in entries:
                named = PAGE_NAME.fullmatch(entry.name.removesuffix(UNFINISHED).removesuffix(SPARE))
                if named and entry.is_file(follow_symlinks=False):
                    yield entry


class PageFiles:
    """The pages of one namespace. Any thread may use it: two never write or delete the same page.

    Where the file system takes it, bytes pass the page cache by: the arena is the cache, and its bytes go from and to
    the disk without a copy."""

    def __init__(self, folder: Path, names: FileNames, spares: int = 0) -> None:
        """`spares`: so many files of evicted pages are kept."""
        self.folder = folder
        self._names = names
        self._spares = spares
        self._spare: dict[str, None] = {}  # paths of these
        self._lock = threading.Lock()  # of _spare and the places of its files
        self._aligned = names.page_bytes % BLOCK == 0

    def write_page(self, page: PageFile, content: memoryview) -> None:
        """Make a page's file, which is there whole or not at all. Raises OSError."""
        place = self._place(page)
        beside = place + UNFINISHED

        def put(fd: int) -> None:
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:])

        try:
            self._take_spare(beside)
            self._opened(beside, os.O_WRONLY | os.O_CREAT, put)
            os.rename(beside, place)  # noqa: PTH104
        except OSError:
            with contextlib.suppress(OSError):
                remove(beside)
            raise

    def read_page(self, page: PageFile, room: memoryview) -> int:
        """Fill `room` with a page, and return how many bytes of it there were. Raises OSError."""

        def get(fd: int) -> int:
            done = 0
            while done < len(room) and (more := os.readv(fd, [room[done:]])):
                done += more
            return done

        return self._opened(self._place(page), os.O_RDONLY, get)

    def delete(self, page: PageFile) -> None:
        """Remove a page's file, if it is there. A read that has begun is not disturbed. Raises OSError."""
        remove(self._place(page))

    def evict(self, page: PageFile) -> None:
        """Keep the file of a page for another page, or remove it. Raises OSError.

        At the limit this writes pages of 2 MiB 1.4 times as fast as deleting and making files, smaller ones more so."""
        place = self._place(page)
        with self._lock, contextlib.suppress(FileNotFoundError):
            if len(self._spare) < self._spares:
                os.rename(place, place + SPARE)  # noqa: PTH104
                self._spare[place + SPARE] = None
                return
        remove(place)

    def make_folders(self) -> None:
        """Make the folders of all files, where they are missing. Raises OSError."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for spread in range(256):
            (self.folder / f"{spread:02x}").mkdir(mode=0o700, exist_ok=True)

    def _take_spare(self, beside: str) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError, KeyError):
            os.rename(self._spare.popitem()[0], beside)  # noqa: PTH104

    def _opened(self, path: str, flags: int, use: Callable[[int], T]) -> T:
        """Open a file, use it and close it, by direct I/O if that works here."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if self._aligned:
            try:
                return _used(path, flags | os.O_DIRECT, use)
            except OSError as error:
                # This file system, or this memory, is not what direct I/O asks for.
                if error.errno != errno.EINVAL:
                    raise
        return _used(path, flags, use)

    def _place(self, page: PageFile) -> str:
        return f"{self.folder}/{self._names.name(page)}"


def remove(path: str) -> None:
    """Delete a file, if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def _used(path: str, flags: int, use: Callable[[int], T]) -> T:
    fd = os.open(path, flags, 0o600)
    try:
        result = use(fd)
        if not flags & os.O_DIRECT:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # starts writing, and drops what is written
        return result
    finally:
        os.close(fd)
