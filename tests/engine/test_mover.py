"""The mover that goes on beside the loop, over a CPU's pages: pinned slots and others, checksums, the end. Its order is
that of `tests/cuda/test_copies.py`."""

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from engine.cuda.mover import OverlappedMover
from engine.device.page_pool import PagePool
from engine.runner import Mover
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy, CopyIn, CopyOut
from tests.support.threaded_device import ThreadedCopies

PAGE_BYTES, HEADS = 4_096, 4
PAGES, SLOTS = 24, 40


class Memory:
    slots, page_bytes = SLOTS, PAGE_BYTES

    def __init__(self) -> None:
        self.view = memoryview(bytearray(random.Random(1).randbytes(SLOTS * PAGE_BYTES)))

    def slot(self, index: int) -> memoryview:
        return self.view[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]


class Rig:
    def __init__(self, pieces: int) -> None:
        self.pool = PagePool(
            torch.arange(PAGES * PAGE_BYTES, dtype=torch.float64).to(torch.uint8).view(PAGES, -1), PAGE_BYTES, HEADS
        )
        for page in range(PAGES):
            self.pool.view(page)[:] = page
        self.copies = ThreadedCopies(self.pool, pieces)
        self.arena = Memory()
        self.rung = threading.Event()
        self.mover: Mover = OverlappedMover(self.copies, self.rung.set, HEADS, verify=True, piece=8 * PAGE_BYTES)
        self.mover.attach(self.arena)
        self.mover._pinning.submit(lambda: None).result()  # pinning has ended

    def page(self, number: int) -> bytes:
        return bytes(self.pool.view(number).numpy())


@pytest.fixture(params=[100, 2, 0], ids=["all pinned", "some pinned", "none pinned"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    assert rig.mover.close()


def test_pages_go_out_with_their_checksums(rig: Rig) -> None:
    copies = [CopyOut(3, index, index, SLOTS - 1 - index) for index in range(PAGES)]
    moving = rig.mover.start(copies)
    assert rig.rung.wait(5)
    result = moving.wait()
    assert moving.done()
    assert result == CopiedOut(3, 0, tuple(page_checksum(rig.arena.slot(copy.slot), HEADS) for copy in copies))
    assert [bytes(rig.arena.slot(copy.slot)) for copy in copies] == [rig.page(copy.page) for copy in copies]


@pytest.mark.parametrize(("part", "starts"), [(1, [0, 8, 16]), (10, [0, 10, 20]), (100, [0])])
def test_the_threads_share_what_goes_out(part: int, starts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.mover._OUT_THREADS", 3)
    monkeypatch.setattr("engine.cuda.mover._PART", part * PAGE_BYTES)
    begun: list[int] = []
    right = OverlappedMover._copy_out

    def copy_out(self: OverlappedMover, arena: Any, copies: Sequence[Copy]) -> Any:
        begun.append(copies[0].index)
        return right(self, arena, copies)

    monkeypatch.setattr(OverlappedMover, "_copy_out", copy_out)
    rig = Rig(100)
    test_pages_go_out_with_their_checksums(rig)
    assert sorted(begun) == starts
    assert rig.mover.close()


def test_pages_come_in_and_a_damaged_one_is_told(rig: Rig) -> None:
    sums = [page_checksum(rig.arena.slot(slot), HEADS) for slot in range(PAGES)]
    sums[5] += 1
    copies = [CopyIn(4, index, index, PAGES - 1 - index, sums[index]) for index in range(PAGES)]
    result = rig.mover.start(copies).wait()
    assert result == CopiedIn(4, tuple(index for index in range(PAGES) if index != 5), (5,))
    assert [rig.page(copy.page) for copy in copies] == [bytes(rig.arena.slot(copy.slot)) for copy in copies]


def test_slots_beyond_what_the_driver_pins_are_staged() -> None:
    for pieces, staged in ((100, 0), (2, PAGES - 16), (0, PAGES)):
        rig = Rig(pieces)
        rig.mover.start([CopyOut(1, index, index, index) for index in range(PAGES)]).wait()
        assert rig.copies.staged == staged
        rig.mover.close()


def test_an_arena_is_unpinned_when_its_last_copy_has_ended() -> None:
    rig = Rig(100)
    assert sum(each.nbytes for each in rig.copies.pinned) == SLOTS * PAGE_BYTES
    rig.copies.duplicated = duplicate = Future[None]()
    moving = rig.mover.start([CopyIn(1, 0, 9, 2, page_checksum(rig.arena.slot(9), HEADS))])
    other = Memory()
    rig.mover.attach(other)
    assert len(rig.copies.pinned) == 5, "a copy still reads the arena"
    duplicate.set_result(None)
    moving.wait()
    rig.mover._pinning.submit(lambda: None).result()
    assert all(each.obj is other.view.obj for each in rig.copies.pinned)
    assert len(rig.copies.pinned) == 5
    rig.mover.start([CopyOut(1, 0, 3, 4)]).wait()
    assert bytes(other.slot(4)) == rig.page(3)
    assert rig.mover.close()


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.mover._CLOSING", 0.05)
    rig = Rig(100)
    rig.copies.duplicated = duplicate = Future[None]()
    rig.mover.start([CopyIn(1, 0, 9, 2, 0)])
    assert not rig.mover.close()
    duplicate.set_result(None)
