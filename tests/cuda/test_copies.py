"""Page copies beside steps, on a GPU that makes them late and in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.cuda.copies import CudaCopies
from engine.cuda.mover import OverlappedMover, _PinnedArena
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut
from tests.cuda.fake_gpu import FakeGpu, HostWaits, Race
from tests.support.thorough import cases

pytestmark = pytest.mark.slow

PAGE_BYTES, HEADS, PAGES, SLOTS = 4_096, 4, 48, 40
PIECE = 8  # slots that are pinned at a time


class Memory:
    slots, page_bytes = SLOTS, PAGE_BYTES

    def __init__(self, seed: int) -> None:
        self.view = memoryview(bytearray(random.Random(seed).randbytes(SLOTS * PAGE_BYTES)))

    def slot(self, index: int) -> memoryview:
        return self.view[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]


def run(seed: int, pieces: int) -> None:
    """Move pages out of the device and back beside steps, some to pages that were copied within the device before; then
    to another arena. Raises for a race, and for a wrong page."""
    with FakeGpu(seed) as gpu, patch("engine.cuda.mover._PART", gpu.rng.choice([2, 1_000]) * PAGE_BYTES):
        gpu.pinnable = pieces
        pool = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        gpu.watch_pages(pool, PAGE_BYTES)
        copies = CudaCopies(pool)
        mover = OverlappedMover(copies, lambda: None, HEADS, verify=True, piece=PIECE * PAGE_BYTES)
        first, second = Memory(1), Memory(2)
        mover.attach(first)
        _step(pool, range(24), 1).synchronize()
        torch.cuda.set_sync_debug_mode("error")
        out = [
            mover.start([CopyOut(lease, index, 8 * lease + index, 8 * lease + index) for index in range(8)])
            for lease in range(3)
        ]
        ended = _step(pool, range(24, 32), 2)
        sums: list[int] = []
        for moving in out:
            result = moving.wait()
            assert isinstance(result, CopiedOut)
            sums += result.checksums
        for slot, checksum in enumerate(sums):
            assert page_checksum(first.slot(slot), HEADS) == checksum
            assert set(first.slot(slot)) == {slot + 1}
        _step(pool, range(24), 3)  # a copy out has ended: its page may be written
        ended.synchronize()
        copies.duplicate(24, 32)
        copies.duplicate(25, 44)
        _step(pool, range(44, 45), 4)
        into = [CopyIn(5, slot, slot, 32 + slot % 12, sums[slot]) for slot in range(24)]
        inward = [mover.start(into[:10]), mover.start(into[10:])]
        last = mover.start([CopyOut(6, 0, 25, 30)])
        mover.attach(second)  # the copies still read the arena before
        assert [moving.wait() for moving in inward] == [
            CopiedIn(5, tuple(range(10))), CopiedIn(5, tuple(range(10, 24)))
        ]  # fmt: skip
        assert isinstance(last.wait(), CopiedOut)
        assert set(first.slot(30)) == {25 + 2}
        other = mover.start([CopyOut(7, 0, 43, 39)])
        assert isinstance(other.wait(), CopiedOut)
        assert set(second.slot(39)) == {24}
        torch.cuda.set_sync_debug_mode("default")
        _step(pool, range(32, 44), 0).synchronize()
        assert pool[:, 0].cpu().tolist()[32:44] == [13 + page for page in range(12)]
        assert mover.close()
        gpu.drive(lambda: not gpu.pins)


def run_all(seeds: range, pieces: int) -> None:
    for seed in seeds:
        run(seed, pieces)


def _step(pool: torch.Tensor, pages: range, number: int) -> Any:
    """Write to pages as a step does, or with 0 read them, and return the event behind it."""
    for page in pages:
        if number:
            pool[page].fill_(page + number)
        else:
            pool[page].sum()
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.mark.parametrize("pieces", [100, 2, 0], ids=["all pinned", "some pinned", "none pinned"])
@pytest.mark.parametrize("seed", cases(range(40), range(4)))
def test_pages_are_right_and_nothing_races(seed: int, pieces: int) -> None:
    run(seed, pieces)


Patch = Callable[[pytest.MonkeyPatch], None]


def _copies_in_do_not_wait_for_duplicates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.cuda.fake_gpu.Stream.wait_event", lambda self, event: None)


def _duplicates_in_another_stream(patch: pytest.MonkeyPatch) -> None:
    def duplicate(self: CudaCopies, source: int, dest: int) -> None:
        with torch.cuda.stream(self._coming):
            right(self, source, dest)

    right = CudaCopies.duplicate
    patch.setattr(CudaCopies, "duplicate", duplicate)


def _the_end_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaCopies, "finish", lambda self, *, inward: None)


def _the_end_of_the_other_direction_is_awaited(patch: pytest.MonkeyPatch) -> None:
    right = CudaCopies.finish
    patch.setattr(CudaCopies, "finish", lambda self, *, inward: right(self, inward=not inward))


def _an_arena_is_unpinned_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_PinnedArena, "enter", lambda self: None)
    patch.setattr(_PinnedArena, "leave", lambda self: None)


def _threads_share_their_buffers(patch: pytest.MonkeyPatch) -> None:
    buffers: dict[OverlappedMover, Any] = {}

    def staging(self: OverlappedMover, place: int) -> memoryview:
        if self not in buffers:
            buffers[self] = self._device.staging(8)
        return buffers[self][place]

    patch.setattr(OverlappedMover, "_staging", staging)


def _pageable_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaCopies, "staging", lambda self, count: [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)])


def _a_slot_counts_as_pinned_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_PinnedArena, "pinned", lambda self, slot: True)


def _copies_in_on_several_threads(patch: pytest.MonkeyPatch) -> None:
    def start(self: OverlappedMover, copies: Any) -> Any:
        self._in = self._out
        return right(self, copies)

    right = OverlappedMover.start
    patch.setattr(OverlappedMover, "start", start)


MISTAKES = [
    (_copies_in_do_not_wait_for_duplicates, Race, 100),
    (_duplicates_in_another_stream, Race, 100),
    (_the_end_is_not_awaited, Race, 100),
    (_the_end_of_the_other_direction_is_awaited, Race, 100),
    (_an_arena_is_unpinned_at_once, (Race, HostWaits, ValueError), 100),
    (_threads_share_their_buffers, Race, 0),
    (_pageable_buffers, HostWaits, 0),
    (_a_slot_counts_as_pinned_too_soon, HostWaits, 0),
    (_copies_in_on_several_threads, AssertionError, 100),
]


@pytest.mark.parametrize(("mistake", "error", "pieces"), MISTAKES, ids=[each[0].__name__[1:] for each in MISTAKES])
def test_it_notices(mistake: Patch, error: Any, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(error):
        run_all(range(8), pieces)
