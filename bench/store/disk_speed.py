"""The disk tier against the disk: pages through its index, threads, checks and records, and the same bytes raw.

    python -m bench.store.disk_speed --quick
    python -m bench.store.disk_speed --dir /mnt/nvme --megabytes 1024 --runs 9

The limit is one thread that writes, or reads, one file from end to end in blocks of 4 MiB, between the same memory and
the same directory. Both sides keep the same rules: direct I/O where the file system has it, so that nothing comes from
the page cache; where it has not, the cache is dropped before each reading; the file system is synced before a writing
counts as done, although the tier does not wait for that. Sides alternate, each first in turn. With `--full` the tier is
at its limit, 16 times what a run writes, and each page takes the place of another one.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import secrets
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.config import Bytes, DiskConfig
from bench import report
from kvstore.checksum import page_checksum
from kvstore.disk.file_names import BLOCK, footprint
from kvstore.disk.index import DiskIndex
from kvstore.disk.io_threads import DiskTier
from kvstore.disk.orders import DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded

KV_HEADS = 8  # of a page: each is hashed on its own
PAGE_SIZES = (128 * 2**10, 2 * 2**20)
TARGET = 0.8

_BLOCK = 4 * 2**20  # of raw access
_CHAIN = 64  # pages of a prompt
_BATCH = 64  # pages that become ready for writing together
_READ = 256  # pages that are asked for together
_READS = 2  # such reads at a time


@dataclass(frozen=True)
class Speed:
    """Bytes per second of one direction and page size, raw and through the tier, run by run."""

    direction: Literal["write", "read"]
    page_bytes: int
    direct: bool  # past the page cache
    tier: tuple[float, ...]
    raw: tuple[float, ...]


def measure(directory: Path, page_bytes: int, size: int, runs: int, full: bool = False) -> tuple[Speed, Speed]:
    """Write and read about `size` bytes `runs` times on either side, in a folder of its own below `directory`."""
    with tempfile.TemporaryDirectory(prefix="baton-disk-", dir=directory) as name:
        folder = Path(name)
        setting = DiskConfig(path=name, max_bytes=Bytes(16 * size if full else 4 * size + 2**30))
        memory = _Memory(page_bytes, size // footprint(page_bytes))
        direct = page_bytes % BLOCK == 0 and _takes_direct_io(folder)
        rates: dict[str, list[float]] = {"tier write": [], "raw write": [], "tier read": [], "raw read": []}
        steady = _Tier(setting, folder / "full", memory) if full else None
        while steady and not steady.evicts():
            steady.write()
        for run in range(runs + 1):
            sides: list[tuple[str, _Raw | _Tier]] = [
                ("tier", steady or _Tier(setting, folder / f"tier{run}", memory)),
                ("raw", _Raw(folder / "raw", memory, direct)),
            ]
            for direction in ("write", "read"):
                for side, access in sides if run % 2 else sides[::-1]:
                    rate = len(memory.view) / (access.write() if direction == "write" else access.read())
                    if run:  # the first one warms up
                        rates[f"{side} {direction}"].append(rate)
            for _, access in sides:
                if access is not steady:
                    access.close()
        if steady:
            steady.close()
    return (
        Speed("write", page_bytes, direct, tuple(rates["tier write"]), tuple(rates["raw write"])),
        Speed("read", page_bytes, direct, tuple(rates["tier read"]), tuple(rates["raw read"])),
    )


def result(speed: Speed, full: bool = False) -> report.Result:
    """Return the line that says how one direction went."""
    how = "direct I/O" if speed.direct else "page cache"
    case = f"disk {speed.direction}, pages of {speed.page_bytes // 1_024} KiB, {how}{', at the limit' * full}"
    tier, raw = ([rate / 1e9 for rate in rates] for rates in (speed.tier, speed.raw))
    return report.judged(report.beside("disk_speed", case, "GB/s", tier, raw), TARGET, "high")


class _Memory:
    """An arena full of pages that no disk can compress."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self.page_bytes = page_bytes
        self.pages = pages
        fd = os.memfd_create("bench")
        os.truncate(fd, pages * page_bytes)
        self.view = memoryview(mmap.mmap(fd, pages * page_bytes))
        os.close(fd)
        for page in range(pages):
            self.slot(page)[:] = os.urandom(page_bytes)
        self.checksums = [page_checksum(self.slot(page), KV_HEADS) for page in range(pages)]

    def slot(self, number: int) -> memoryview:
        return self.view[number * self.page_bytes : (number + 1) * self.page_bytes]


class _Raw:
    """One file, one thread, large blocks."""

    def __init__(self, path: Path, memory: _Memory, direct: bool) -> None:
        self._path = path
        self._memory = memory
        self._flags = os.O_DIRECT if direct else 0

    def write(self) -> float:
        began = time.perf_counter()
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | self._flags, 0o600)
        for at, block in self._blocks():
            assert os.pwrite(fd, block, at) == len(block)
        _sync(self._path.parent)
        seconds = time.perf_counter() - began
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return seconds

    def read(self) -> float:
        fd = os.open(self._path, os.O_RDONLY | self._flags)
        began = time.perf_counter()
        for at, block in self._blocks():
            assert os.preadv(fd, [block], at) == len(block)
        seconds = time.perf_counter() - began
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return seconds

    def close(self) -> None:
        self._path.unlink()

    def _blocks(self) -> Iterator[tuple[int, memoryview]]:
        for at in range(0, len(self._memory.view), _BLOCK):
            yield at, self._memory.view[at : at + _BLOCK]


class _Tier:
    """The tier as a store uses it: batches of pages, as many as its queue takes."""

    def __init__(self, setting: DiskConfig, folder: Path, memory: _Memory) -> None:
        self._folder = folder
        self._memory = memory
        self._setting = setting
        self._index = DiskIndex(setting)
        self._tier = DiskTier(folder, memory.slot)
        self._ended: list[DiskOutcome] = []
        self._carry_out(self._index.open(b"bench", memory.page_bytes, KV_HEADS))
        self._until(lambda: self._index.stats().state == "on")

    def write(self) -> float:
        self._ended.clear()
        self._keys = [secrets.token_bytes(16) for _ in range(self._memory.pages)]
        pages = [
            DiskPage(key, self._keys[slot - 1] if slot % _CHAIN else b"", slot, self._memory.checksums[slot])
            for slot, key in enumerate(self._keys)
        ]
        began = time.perf_counter()
        for start in range(0, len(pages), _BATCH):
            batch = pages[start : start + _BATCH]
            self._room_for(start + len(batch))
            self._carry_out(self._index.write(batch))
        self._until(lambda: len(self._ended) == len(pages))
        _sync(self._folder)
        seconds = time.perf_counter() - began
        assert all(isinstance(ended, WriteEnded) and ended.intact for ended in self._ended)
        assert self._index.prefix(self._keys[:_CHAIN]) == min(_CHAIN, len(pages)), self._index.stats()
        assert self._index.stats().pages >= len(pages), self._index.stats()
        return seconds

    def read(self) -> float:
        self._ended.clear()
        slots = [(key, slot) for slot, key in enumerate(self._keys)]
        began = time.perf_counter()
        for start in range(0, len(slots), _READ):
            self._until(lambda start=start: start - len(self._ended) <= (_READS - 1) * _READ)
            self._carry_out(self._index.read_pages(slots[start : start + _READ]))
        self._until(lambda: len(self._ended) == len(slots))
        seconds = time.perf_counter() - began
        assert all(isinstance(ended, ReadEnded) and ended.ok for ended in self._ended)
        return seconds

    def close(self) -> None:
        self._tier.close()  # its files stay: a file system may be slow to make files after some were deleted

    def _room_for(self, pages: int) -> None:
        """Wait until the queue takes so many of all pages, and the disk a batch."""
        room = self._setting.max_bytes - _BATCH * footprint(self._memory.page_bytes)
        queue = self._setting.queue_pages
        self._until(lambda: pages - len(self._ended) <= queue and self._index.stats().bytes <= room)

    def evicts(self) -> bool:
        return self._index.stats().evictions > 0

    def _carry_out(self, result: DiskResult) -> None:
        for order in result.orders:
            self._tier.submit(order)
        self._ended += result.ended

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            select.select([self._tier.fileno()], [], [])
            for event in self._tier.poll():
                self._carry_out(self._index.handle(event))


def _takes_direct_io(folder: Path) -> bool:
    """Whether files here can be opened to pass the page cache by."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Wait until the file system of a folder has written everything."""
    fd = os.open(folder, os.O_RDONLY)
    ctypes.CDLL(None).syncfs(fd)
    os.close(fd)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured (default: here)")
    parser.add_argument("--megabytes", type=int, metavar="N", help="per run and side (default 128)")
    parser.add_argument("--runs", type=int, metavar="N", help="so many are compared (default 15)")
    parser.add_argument("--quick", action="store_true", help="64 MB and 5 runs")
    parser.add_argument("--full", action="store_true", help="the tier is at its limit")
    arguments = parser.parse_args(argv)
    megabytes = arguments.megabytes or (64 if arguments.quick else 128)
    runs = arguments.runs or (5 if arguments.quick else 15)
    report.say(report.machine())
    for page_bytes in PAGE_SIZES:
        for speed in measure(arguments.dir, page_bytes, megabytes * 2**20, runs, arguments.full):
            report.emit(result(speed, arguments.full))
    return 0


if __name__ == "__main__":
    sys.exit(main())
