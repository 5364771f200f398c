"""Pages between a GPU and host memory, alone and beside a step; and a process that is killed while it copies."""

from __future__ import annotations

import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.unix import readable
from bench.gpu_device import Device
from engine.cuda.copies import CudaCopies
from engine.device.page_pool import PagePool
from engine.engine import Engine
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopyIn, CopyOut

KV_HEADS = 8  # of a page: each is hashed on its own
PAGES = {"2 MiB": 2 * 2**20, "128 KiB": 128 * 2**10}
_BYTES, _FAKE_BYTES = 256 * 2**20, 8 * 2**20  # of one measurement
_BUSY_SIZE, _FAKE_BUSY_SIZE = 8_192, 256  # of the matrices of the step in the background
_CHILD_PAGE = 2 * 2**20
_ROUNDS = 4  # of copies that are queued at a time
_POPULATE_WRITE = 23  # of madvise; Python has no name for it
_DEADLINE = 120.0  # seconds, for the child's first copies
_ROOT = Path(__file__).parent.parent
_SETTLED = 0.5  # seconds for which nothing may change after a process is gone


@dataclass(frozen=True)
class Copied:
    """Bytes per second of one way to copy."""

    case: str
    rate: float


def copies(device: Device) -> Iterator[Copied]:
    """Yield each way, each size of pages, each direction, without and with a step beside it."""
    total = _FAKE_BYTES if device.fake else _BYTES
    for name, size in PAGES.items():
        count = total // size
        pool = torch.zeros((count, size), dtype=torch.uint8, device=device.name)
        pages = PagePool(pool, size, KV_HEADS)
        plain = mmap.mmap(-1, total)
        try:
            yield from _each(device, name, "one at a time", total, pages, memoryview(plain), count, size)
        finally:
            del pages
        if device.is_cuda:
            yield from _pinned(device, name, total, pool, count)


def _each(
    device: Device, name: str, way: str, total: int, pages: PagePool, host: memoryview, count: int, size: int
) -> Iterator[Copied]:
    """The plainest way: one page after the other, in pageable memory, each ended before the next."""

    def out() -> None:
        for page in range(count):
            pages.copy_out(page, host[page * size : (page + 1) * size])

    def back() -> None:
        for page in range(count):
            pages.copy_in(host[page * size : (page + 1) * size], page)

    def checked() -> None:
        out()
        for page in range(count):
            page_checksum(host[page * size : (page + 1) * size], KV_HEADS)

    for direction, work in (("out", out), ("in", back), ("out with checksums", checked)):
        yield Copied(f"{name} {direction}, {way}, alone", total / device.seconds(work, 3))
        yield Copied(f"{name} {direction}, {way}, beside a step", total / beside_a_step(device, work))


def _pinned(device: Device, name: str, total: int, pool: torch.Tensor, count: int) -> Iterator[Copied]:
    """On a side stream, from pinned memory, all pages in flight at a time."""
    host = torch.empty(pool.shape, dtype=torch.uint8, pin_memory=True)

    stream = torch.cuda.Stream(device.name)

    def out() -> None:
        with torch.cuda.stream(stream):  # pyright: ignore[reportArgumentType]
            for page in range(count):
                host[page].copy_(pool[page], non_blocking=True)
        stream.synchronize()

    def back() -> None:
        with torch.cuda.stream(stream):  # pyright: ignore[reportArgumentType]
            for page in range(count):
                pool[page].copy_(host[page], non_blocking=True)
        stream.synchronize()

    for direction, work in (("out", out), ("in", back)):
        yield Copied(f"{name} {direction}, pinned, alone", total / device.seconds(work, 3))
        yield Copied(f"{name} {direction}, pinned, beside a step", total / beside_a_step(device, work))


class _Arena:
    """A store's arena as a mover sees it, without a store."""

    def __init__(self, slots: int, page_bytes: int) -> None:
        self.slots, self.page_bytes = slots, page_bytes
        self.view = memoryview(mmap.mmap(-1, slots * page_bytes))

    def slot(self, index: int) -> memoryview:
        return self.view[index * self.page_bytes : (index + 1) * self.page_bytes]


def moved(device: Device, engine: Engine) -> Iterator[Copied]:
    """Yield the speed of the worker's own mover, checksums included, on the pages of an engine."""
    count, size = engine.num_pages, engine.layout.page_bytes
    mover = engine.mover(verify=False)
    mover.attach(_Arena(count, size))

    def out() -> None:
        moving = [
            mover.start([CopyOut(first, page - first, page, page) for page in range(first, min(first + 64, count))])
            for first in range(0, count, 64)
        ]
        for each in moving:
            each.wait()

    def back() -> None:
        moving = [
            mover.start([CopyIn(first, page - first, page, page, 0) for page in range(first, min(first + 64, count))])
            for first in range(0, count, 64)
        ]
        for each in moving:
            each.wait()

    try:
        for direction, work in (("out", out), ("in", back)):
            case = f"{size // 1024:,} KiB {direction}, the worker's mover"
            yield Copied(f"{case}, alone", count * size / device.seconds(work, 3))
            yield Copied(f"{case}, beside a step", count * size / beside_a_step(device, work))
    finally:
        mover.close()


def beside_a_step(device: Device, work: Callable[[], object]) -> float:
    """Seconds of `work`, which ends with its last copy, while matrix products keep the device busy. On a CPU they run
    on another thread."""
    size = _FAKE_BUSY_SIZE if device.fake else _BUSY_SIZE
    left = torch.randn(size, size, device=device.name)
    if device.is_cuda:
        _ = left @ left  # warm
        device.sync()
        for _ in range(20):
            _ = left @ left
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        device.sync()
        return taken
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: [left @ left for _ in range(20)])
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        busy.result()
    return taken


# --- a process that is killed -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """What was seen of a process that was killed while it copied pages out of its device into shared memory."""

    until_gone: float  # seconds from SIGKILL until its pidfd was readable
    writes_after: int  # slots that changed after that: must be 0
    until_free: float | None  # seconds from there until the device's memory was back; None if it never was taken


def kill_while_copying(device: Device, pages: int = 32) -> Killed:
    """Start a process that copies pages into shared memory without end, kill it, and look at the memory.

    The store gives the slots of a dead process to others as soon as its pidfd is readable. So no copy of the dead
    process may write after that. Raises TimeoutError if the process does not begin.
    """
    arena = os.memfd_create("bench-gpu")
    os.ftruncate(arena, (pages + 1) * _CHILD_PAGE)
    shared = mmap.mmap(arena, 0)
    before = device.free_bytes()
    command = [sys.executable, "-m", "bench.gpu_pages", str(arena), device.name, str(pages)]
    child = subprocess.Popen(command, pass_fds=[arena], cwd=_ROOT)
    gone = os.pidfd_open(child.pid)
    try:
        deadline = time.monotonic() + _DEADLINE
        while not shared[pages * _CHILD_PAGE]:  # it has made its first round
            if time.monotonic() > deadline or child.poll() is not None:
                raise TimeoutError(f"the process that copies has not begun; status {child.poll()}")
            time.sleep(0.01)
        time.sleep(0.05)
        taken = before - device.free_bytes()
        began = time.perf_counter()
        child.send_signal(signal.SIGKILL)
        if not readable(gone, _DEADLINE):
            raise TimeoutError("the process is not gone")
        until_gone = time.perf_counter() - began
        seen = [page_checksum(_slot(shared, page), KV_HEADS) for page in range(pages)]
        free = _until_free(device, before - taken // 10) if taken > 2**26 else None
        time.sleep(_SETTLED)
        changed = sum(page_checksum(_slot(shared, page), KV_HEADS) != seen[page] for page in range(pages))
        return Killed(until_gone, changed, free)
    finally:
        child.kill()
        child.wait()
        os.close(gone)
        os.close(arena)


def _slot(shared: mmap.mmap, page: int) -> memoryview:
    return memoryview(shared)[page * _CHILD_PAGE : (page + 1) * _CHILD_PAGE]


def _until_free(device: Device, wanted: int) -> float:
    """Seconds until so many bytes of the device are free, 10 at most."""
    began = time.perf_counter()
    while device.free_bytes() < wanted and time.perf_counter() < began + 10.0:
        time.sleep(0.001)
    return time.perf_counter() - began


def _copy_for_ever(arena: int, device: str, pages: int) -> None:
    """The process that is killed: writes other bytes into every slot, round after round. On a GPU all copies of several
    rounds are queued at once, from a pinned arena: the device makes them by itself."""
    shared = mmap.mmap(arena, 0)
    pool = torch.zeros((pages, _CHILD_PAGE), dtype=torch.uint8, device=device)
    copies = CudaCopies(pool) if device.startswith("cuda") else None
    if copies is not None and not copies.pin(memoryview(shared)[: pages * _CHILD_PAGE]):
        raise OSError("the driver does not pin the arena")
    copier = PagePool(pool, _CHILD_PAGE, KV_HEADS)
    for number in range(10**9):
        pool.fill_(number % 251)
        for page in range(pages):
            (copier if copies is None else copies).copy_out(page, _slot(shared, page))
        if copies is not None and number % _ROUNDS == 0:
            copies.finish(inward=False)
        shared[pages * _CHILD_PAGE] = 1


# --- pinning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pinned:
    """What it took to pin memory, and the longest step of another process meanwhile and before, in seconds."""

    seconds_a_gib: float
    longest: float
    longest_before: float


def pinning(device: Device, piece: int, total: int) -> Pinned:
    """Pin `total` bytes of shared memory in pieces while another process runs short steps on the device. Raises
    TimeoutError if that does not begin."""
    arena = os.memfd_create("bench-gpu")
    os.ftruncate(arena, total)
    memory = mmap.mmap(arena, total)
    memory.madvise(_POPULATE_WRITE)  # else that is timed
    command = [sys.executable, "-m", "bench.gpu_pages", device.name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    assert child.stdin is not None
    assert child.stdout is not None

    def longest() -> float:
        """The child's longest step since the last question."""
        assert child.stdin is not None
        assert child.stdout is not None
        print(file=child.stdin, flush=True)
        if not (line := child.stdout.readline()):
            raise TimeoutError(f"the process with steps has ended; status {child.poll()}")
        return float(line)

    try:
        longest()
        time.sleep(1.0)
        before = longest()
        copies = CudaCopies(torch.zeros((1, 1), dtype=torch.uint8, device=device.name)) if device.is_cuda else None
        pieces = [memoryview(memory)[first : first + piece] for first in range(0, total, piece)]
        longest()
        began = time.perf_counter()
        for each in pieces:
            if copies is not None and not copies.pin(each):
                raise OSError(f"the driver does not pin a piece of {piece} bytes")
        taken = time.perf_counter() - began
        meanwhile = longest()
        for each in pieces:
            if copies is not None:
                copies.unpin(each)
        return Pinned(taken * 2**30 / total, meanwhile, before)
    finally:
        child.kill()
        child.communicate()
        os.close(arena)


def _step_for_ever(device: str) -> None:
    """The process with steps: for each line it tells the longest one since the last."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line) for line in sys.stdin], daemon=True).start()
    values = torch.randn(256, 256, device=device)
    longest = 0.0
    while True:
        began = time.perf_counter()
        values = (values @ values).tanh()
        _ = values[0, 0].item()  # waits for the device
        longest = max(longest, time.perf_counter() - began)
        if not lines.empty():
            lines.get()
            print(longest, flush=True)
            longest = 0.0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _copy_for_ever(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    _step_for_ever(sys.argv[1])
