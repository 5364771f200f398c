"""A mover whose copies go on beside the worker's loop, on threads and on a device's streams.

The arena is pinned piece by piece on a thread of its own, which took 0.04 s for each GiB on an H200. Until a slot is
pinned, or where the driver refuses, its pages go through small pinned buffers: one more copy on the host. Checksums
are computed on the copying threads, since one core hashes slower than PCIe moves.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeAlias

from engine.runner import copied_in, copied_out
from kvstore.arena.memory import Arena
from kvstore.checksum import copy_heads, head_checksums, join_checksums
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy, CopyIn, CopyOut

log = logging.getLogger(__name__)

_PIECE = 2**28
"""Bytes pinned at a time. A piece can be used at once, some kernels of Linux pin at most 2 GiB, and CUDA refuses
512 GiB. From 64 MiB to 8 GiB a piece took the same time for each byte, and another process's steps went on."""
_STAGED = 8  # pages that a thread copies at a time
_PART = 2**22  # bytes that a thread is given at least: less takes as long as handing it over
_OUT_THREADS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""They hash most of the time. Three of them moved 11.6 GB/s out of an H200, and the driver alone 51.8."""
_CLOSING = 5.0  # seconds that the end of a mover waits for its copies


class DeviceCopies(Protocol):
    """The copies of a device: each is queued, and made later. May be called from several threads."""

    def pin(self, memory: memoryview) -> bool:
        """Let the device read and write this memory by itself; false if the driver refuses."""
        ...

    def unpin(self, memory: memoryview) -> None: ...

    def staging(self, count: int) -> Sequence[memoryview]:
        """Return new pinned buffers of one page each."""
        ...

    def copy_in(self, source: memoryview, page: int) -> None:
        """Queue a copy from pinned memory, behind all copies in and all duplicates that were queued before."""
        ...

    def copy_out(self, page: int, dest: memoryview) -> None:
        """Queue a copy to pinned memory."""
        ...

    def finish(self, *, inward: bool) -> None:
        """Wait until all copies of that direction have been made that were queued before."""
        ...


Sums: TypeAlias = list[list[int]]
"""Of each slot the checksums of its heads; none of a slot that was not to be verified."""


class MovingThreads:
    """Copies that threads make, each a part of them."""

    def __init__(self, copies: Sequence[Copy], parts: Sequence[Future[Sums]]) -> None:
        self._copies, self._parts = copies, parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> CopiedIn | CopiedOut:
        sums = self.sums()
        if isinstance(self._copies[0], CopyOut):
            return copied_out(self._copies, [join_checksums(heads) for heads in sums])
        copies = zip(self._copies, sums, strict=True)
        return copied_in(
            self._copies,
            [
                not (heads and isinstance(copy, CopyIn)) or join_checksums(heads) == copy.checksum
                for copy, heads in copies
            ],
        )

    def sums(self) -> Sums:
        """Return the checksums once all copies have been made."""
        return [heads for part in self._parts for heads in part.result()]


class OverlappedMover:
    """Copies between a device's pages and an arena."""

    def __init__(
        self,
        device: DeviceCopies,
        alarm: Callable[[], None],
        kv_heads: int,
        *,
        verify: bool,
        piece: int = _PIECE,
        part: slice = slice(None),
    ) -> None:
        """`alarm` is called on another thread whenever copies have been made. `kv_heads` of a page are hashed each on
        its own. `piece`: bytes pinned at a time. `part`: the bytes of a slot that the device has, with its heads."""
        self._device, self._alarm, self._verify, self._piece, self._part = device, alarm, verify, piece, part
        self._kv_heads = kv_heads
        self._arena: _PinnedArena | None = None
        # One thread for copies in: two requests may want the same page, and the later copy is to be the last.
        self._in = ThreadPoolExecutor(1, "copies-in")
        self._out = ThreadPoolExecutor(_OUT_THREADS, "copies-out")
        # A driver that refuses to pin leaves an error on the thread, for the next call there: so it has its own.
        self._pinning = ThreadPoolExecutor(1, "pinning")
        self._buffers = threading.local()
        self._under_way: set[Future[Sums]] = set()

    def attach(self, arena: Arena) -> None:
        self._detach()
        self._arena = _PinnedArena(self._device, arena, self._piece, self._part)
        self._pinning.submit(self._arena.pin)

    def start(self, copies: Sequence[Copy]) -> MovingThreads:
        return self._start(copies, self._verify)

    def copy(self, copies: Sequence[Copy], *, verify: bool = True) -> Sums:
        """Make copies in one direction now, and return the checksums."""
        return self._start(copies, verify).sums()

    def _start(self, copies: Sequence[Copy], verify: bool) -> MovingThreads:
        arena, share = self._arena, len(copies)
        assert arena is not None, "a copy without an arena"
        if isinstance(copies[0], CopyOut):
            share = max(-(-share // _OUT_THREADS), -(-_PART // arena.slot(copies[0].slot).nbytes))
        parts = [self._submit(arena, copies[at : at + share], verify) for at in range(0, len(copies), share)]
        moving = MovingThreads(copies, parts)
        for part in parts:
            part.add_done_callback(lambda _: self._alarm() if moving.done() else None)
        return moving

    def _submit(self, arena: _PinnedArena, copies: Sequence[Copy], verify: bool) -> Future[Sums]:
        arena.enter()
        if isinstance(copies[0], CopyOut):
            future = self._out.submit(self._copy_out, arena, copies)
        else:
            future = self._in.submit(self._copy_in, arena, copies, verify)
        self._under_way = {each for each in self._under_way if not each.done()} | {future}
        future.add_done_callback(lambda _: arena.leave())
        return future

    def close(self) -> bool:
        if left := wait(self._under_way, _CLOSING).not_done:
            log.warning("%d batches of page copies have not ended after %.0f s", len(left), _CLOSING)
        self._detach()
        for pool in (self._in, self._out, self._pinning):
            pool.shutdown(wait=False)
        return not left

    def _detach(self) -> None:
        if self._arena is not None:
            self._pinning.submit(self._arena.unpin)
            self._arena = None

    def _copy_out(self, arena: _PinnedArena, copies: Sequence[Copy]) -> Sums:
        sums: Sums = []
        heads = self._kv_heads
        for group in _groups(copies):
            staged = [None if arena.pinned(copy.slot) else self._staging(place) for place, copy in enumerate(group)]
            for copy, buffer in zip(group, staged, strict=True):
                self._device.copy_out(copy.page, arena.slot(copy.slot) if buffer is None else buffer)
            self._device.finish(inward=False)
            for copy, buffer in zip(group, staged, strict=True):
                slot = arena.slot(copy.slot)
                sums.append(head_checksums(slot, heads) if buffer is None else copy_heads(slot, buffer, heads))
        return sums

    def _copy_in(self, arena: _PinnedArena, copies: Sequence[Copy], verify: bool) -> Sums:
        sums: Sums = []
        for group in _groups(copies):
            for place, copy in enumerate(group):
                heads = self._start_copy_in(arena, copy, place, verify)
                sums.append(heads if verify else [])
            self._device.finish(inward=True)
        return sums

    def _start_copy_in(self, arena: _PinnedArena, copy: Copy, place: int, verify: bool) -> list[int]:
        slot = arena.slot(copy.slot)
        if arena.pinned(copy.slot):
            self._device.copy_in(slot, copy.page)
            return head_checksums(slot, self._kv_heads) if verify else []
        heads = copy_heads(self._staging(place), slot, self._kv_heads)
        self._device.copy_in(self._staging(place), copy.page)
        return heads

    def _staging(self, place: int) -> memoryview:
        """A buffer of this thread's."""
        buffers: Sequence[memoryview] | None = getattr(self._buffers, "pages", None)
        if buffers is None:
            buffers = self._buffers.pages = self._device.staging(_STAGED)
        return buffers[place]


class _PinnedArena:
    """An arena, of which a growing part is pinned. It stays mapped until its last copy has been made."""

    def __init__(self, device: DeviceCopies, arena: Arena, piece: int, part: slice) -> None:
        self._device, self._part = device, part
        self._view = arena.view[:]
        self._page_bytes = arena.page_bytes
        self._slots = arena.slots
        # Pieces must not meet within a page of the host's memory.
        whole = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, self._page_bytes)
        self._step = max(1, piece // self._page_bytes // whole) * whole
        self._pinned_slots = 0  # from the start
        self._users = 0
        self._closing = False
        self._changed = threading.Condition()

    def slot(self, index: int) -> memoryview:
        return self._view[index * self._page_bytes : (index + 1) * self._page_bytes][self._part]

    def pinned(self, slot: int) -> bool:
        return slot < self._pinned_slots

    def enter(self) -> None:
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def pin(self) -> None:
        for first, last in self._pieces():
            if self._closing:
                return
            if not self._device.pin(self._view[first * self._page_bytes : last * self._page_bytes]):
                log.warning(
                    "the driver does not pin the arena beyond slot %d of %d; pages there take one more copy",
                    *(first, self._slots),
                )
                return
            self._pinned_slots = last

    def unpin(self) -> None:
        """Once no copy is under way. Should one never end, its memory stays."""
        self._closing = True
        with self._changed:
            if not self._changed.wait_for(lambda: not self._users, _CLOSING):
                return
        pinned, self._pinned_slots = self._pinned_slots, 0
        for first, last in self._pieces():
            if last <= pinned:
                self._device.unpin(self._view[first * self._page_bytes : last * self._page_bytes])
        self._view = memoryview(b"")

    def _pieces(self) -> list[tuple[int, int]]:
        starts = range(0, self._slots, self._step)
        return [(first, min(first + self._step, self._slots)) for first in starts]


def _groups(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    for first in range(0, len(copies), _STAGED):
        yield copies[first : first + _STAGED]
