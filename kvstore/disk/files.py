"""The disk tier's directory: whose it is, and the files in it.

    <path>/<node>/                     0700, one store at a time
        lock                           0600, locked for as long as the store lives
        <namespace>-<page bytes>/      0700, one for each kind of page that was ever served
            segment-00000000.kv        0600

Only what bears these names is ever read, counted or deleted; other files are left alone. Nothing here knows what a
segment holds: that is `kvstore.disk.record_format`'s and `kvstore.disk.recovery_scan`'s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.errors import StartupError
from kvstore.disk.orders import FoundFolder
from kvstore.disk.record_format import BLOCK, RecordLayout, segment_header

_SEGMENT = re.compile(r"segment-(\d{8})\.kv")
_FOLDER = re.compile(r"(?:[0-9a-f]{2}){1,64}-[1-9]\d{0,11}")
_PROBE = ".probe"
_MOST_OPEN = 32  # files per thread


class NodeDirectory:
    """One node's directory, locked. Raises StartupError when it can't be made, is another user's, or is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        found: list[tuple[float, FoundFolder]] = []
        for folder in self.path.iterdir():
            if folder == own or not _FOLDER.fullmatch(folder.name):
                continue
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode):
                size = sum(size for _, size in segment_files(folder))
                found.append((info.st_mtime, FoundFolder(folder.name, size)))
        return [folder for _, folder in sorted(found)]

    def delete(self, name: str) -> None:
        """Delete the segments in another kind's folder, and the folder if nothing else is in it. Raises OSError."""
        folder = self.path / name
        with contextlib.suppress(FileNotFoundError):
            for number, _ in segment_files(folder):
                segment_path(folder, number).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files that are not ours stay, and so does the folder
                folder.rmdir()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        path = self.path / "lock"
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), path.stat()):
                    return
            self.close()
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
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


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.kv"


def segment_files(folder: Path) -> Iterator[tuple[int, int]]:
    """Number and size of each regular file in `folder` that is named like a segment. Raises OSError."""
    for path in folder.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                yield int(match[1]), info.st_size


def takes_direct_io(folder: Path) -> bool:
    """Whether files here can be written past the page cache. Raises OSError when no file can be made at all."""
    probe = folder / _PROBE
    probe.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(probe, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        probe.unlink(missing_ok=True)  # some kernels make the file before they refuse
        os.close(os.open(probe, flags, 0o600))
        probe.unlink()
        return False
    try:
        with mmap.mmap(-1, BLOCK) as block:
            return os.pwrite(fd, block, 0) == BLOCK
    except OSError as error:
        return error.errno != errno.EINVAL  # a disk that is full may take direct I/O another time
    finally:
        os.close(fd)
        probe.unlink()


class SegmentFiles:
    """The files of one namespace's segments, opened when they are needed. Each thread has its own; but any may make it
    forget a segment that it does not use.

    With `direct`, bytes pass the page cache by: the arena is the cache, and its bytes go from and to the disk without a
    copy. Where that is refused for these buffers, the files are opened the usual way and dropped from the page cache
    once they are done with."""

    def __init__(self, folder: Path, layout: RecordLayout, namespace: bytes, direct: bool, writable: bool) -> None:
        self.folder = folder
        self._layout = layout
        self._header = memoryview(mmap.mmap(-1, layout.header_bytes))
        self._header[:] = segment_header(layout, namespace)
        self._direct = direct and layout.aligned
        self._access = os.O_RDWR if writable else os.O_RDONLY
        self._fds: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # of _fds

    def create(self, number: int) -> memoryview:
        """Make the file of a segment, which must not be there yet, and return the header that it begins with."""
        flags = os.O_CREAT | os.O_EXCL | self._access | os.O_NOFOLLOW
        self._keep(number, os.open(segment_path(self.folder, number), self._flags(flags), 0o600))
        return self._header

    def read(self, number: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` from one place on, and return how many bytes there were. Raises OSError."""
        total = sum(map(len, buffers))
        done = self._retried(os.preadv, number, offset, buffers)
        while 0 < done < total:
            more = self._retried(os.preadv, number, offset + done, _rest(buffers, done))
            if not more:
                break
            done += more
        if not self._direct:
            os.posix_fadvise(self._fd(number), offset, total, os.POSIX_FADV_DONTNEED)
        return done

    def write(self, number: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all of `buffers` at one place. Raises OSError; then part of it may be written."""
        total = sum(map(len, buffers))
        done = self._retried(os.pwritev, number, offset, buffers)
        while done < total:
            more = self._retried(os.pwritev, number, offset + done, _rest(buffers, done))
            if not more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += more

    def finish(self, number: int) -> None:
        """Nothing will be written to a segment any more. Raises OSError when it did not reach the disk."""
        fd = self._fds.get(number)
        if fd is None:
            return
        try:
            os.fdatasync(fd)
            if not self._direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.forget(number)

    def forget(self, number: int) -> None:
        with self._lock:
            fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for number in list(self._fds):
            self.forget(number)

    def _retried(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        number: int,
        offset: int,
        buffers: Sequence[memoryview],
    ) -> int:
        try:
            return call(self._fd(number), buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        # These buffers, or this file system, are not what direct I/O asks for.
        self._direct = False
        self.close()
        return call(self._fd(number), buffers, offset)

    def _fd(self, number: int) -> int:
        with self._lock:
            fd = self._fds.get(number)
            if fd is not None:
                self._fds.move_to_end(number)
                return fd
        flags = self._flags(self._access | os.O_NOFOLLOW)
        return self._keep(number, os.open(segment_path(self.folder, number), flags))

    def _keep(self, number: int, fd: int) -> int:
        with self._lock:
            self._fds[number] = fd
            oldest = next(iter(self._fds))
            full = len(self._fds) > _MOST_OPEN
        if full:
            self.forget(oldest)
        return fd

    def _flags(self, flags: int) -> int:
        return flags | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
