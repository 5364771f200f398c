"""The page checksum beside a plain XXH3-64 of the same bytes: what hashing each KV head on its own costs."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from bench.hand_off import KV_HEADS
from kvstore.checksum import page_checksum

_BYTES = 2**26  # hashed at a time: more than the processor's caches hold


class Hashed(NamedTuple):
    """Bytes per second of the processor's own time."""

    heads: int
    plain: float
    tree: float


def measure(page_bytes: int, runs: int) -> Iterator[Hashed]:
    """Hash pages of that size, in turns with and without the tree; medians of `runs`."""
    room = memoryview(mmap.mmap(-1, _BYTES))
    pages = [room[at : at + page_bytes] for at in range(0, _BYTES, page_bytes)]
    for heads in (1, KV_HEADS):
        plain, tree = [], []
        for _ in range(runs):
            plain.append(_speed(lambda: [xxhash.xxh3_64_intdigest(page) for page in pages]))
            tree.append(_speed(lambda heads=heads: [page_checksum(page, heads) for page in pages]))
        yield Hashed(heads, statistics.median(plain), statistics.median(tree))


def _speed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return _BYTES / (time.thread_time() - began)
