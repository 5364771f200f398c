"""The helper that hangs a process: its main thread stands still, its other threads go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory

import pytest

from tests.hang import hung

DEADLINE = 60.0
COUNTS = """
import mmap, os, struct, sys, threading, time
with open(sys.argv[1], "r+b") as file:
    counts = mmap.mmap(file.fileno(), 16)
def count(place):
    for number in range(1, 1 << 62):
        struct.pack_into("<q", counts, place, number)
        time.sleep(0.001)
threading.Thread(target=count, args=(8,), daemon=True).start()
count(0)
"""


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {DEADLINE} s"
        time.sleep(0.001)


def advance(counts: memoryview, thread: int) -> None:
    start = counts[thread]
    eventually(lambda: counts[thread] > start + 20, f"thread {thread} goes on")


@contextmanager
def counting() -> Iterator[tuple[subprocess.Popen[bytes], memoryview]]:
    """A process and the counts of its two threads, the main one's first."""
    shared = SharedMemory(create=True, size=16)
    assert shared.buf is not None
    counts = shared.buf[:16].cast("q")
    child = subprocess.Popen([sys.executable, "-c", COUNTS, f"/dev/shm/{shared.name}"])
    try:
        eventually(lambda: counts[0] > 0 and counts[1] > 0, "both threads count")
        yield child, counts
    finally:
        child.kill()
        child.wait()
        counts.release()
        shared.close()
        shared.unlink()


def test_only_the_main_thread_stops_and_goes_on_afterwards() -> None:
    with counting() as (child, counts):
        for _ in range(3):
            with hung(child.pid):
                main = counts[0]
                advance(counts, 1)
                assert counts[0] == main
            advance(counts, 0)
        assert child.poll() is None


def test_a_hung_process_may_be_killed() -> None:
    with counting() as (child, _):
        with hung(child.pid):
            child.kill()
            assert child.wait(DEADLINE) == -9
        assert child.returncode == -9


def test_a_process_that_has_ended_can_not_hang() -> None:
    with counting() as (child, _):
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError), hung(child.pid):
            pass
