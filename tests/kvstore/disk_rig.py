"""The disk tier as a store has it, index and threads, over a small arena and a directory of a test's own."""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.config import Bytes, DiskConfig
from kvstore.checksum import page_checksum
from kvstore.disk.index import DiskIndex
from kvstore.disk.interface import DiskOutcome, DiskPage, DiskResult, ReadEnded, WriteEnded
from kvstore.disk.io_threads import DiskTier
from kvstore.disk.orders import DiskOrder, Read, Write
from kvstore.disk.record_format import RecordLayout
from tests.kvstore.chains import key, keys, parent

NAMESPACE = b"namespace 16 byt"
KV_HEADS = 4  # of a page: each is hashed on its own
SMALL = 1_000  # bytes of a page whose records are packed
LARGE = 65_536  # whose records are aligned
_PATIENCE = 20.0


class CountingTier(DiskTier):
    """Counts the orders that end without a word, such as Invalidate, and how many of them are done."""

    def __init__(self, directory: Path, arena: Callable[[int], memoryview]) -> None:
        self.orders = self.done = 0
        super().__init__(directory, arena)

    def submit(self, order: DiskOrder) -> None:
        self.orders += not isinstance(order, Read | Write)
        super().submit(order)

    def _append(self, order: Any) -> None:
        super()._append(order)
        self.done += isinstance(order, DiskOrder)


class Rig:
    """Pages are named by words, as in `tests.kvstore.chains`; what is in a page follows from its key."""

    def __init__(
        self, path: Path, page_bytes: int = SMALL, records: int = 4, segments: int = 16, slots: int = 64
    ) -> None:
        self.layout = RecordLayout(page_bytes, KV_HEADS)
        full = self.layout.offset(records)
        self.settings = DiskConfig(
            path=str(path), segment_bytes=Bytes(full), max_bytes=Bytes(segments * full), queue_pages=32
        )
        self.path = path / "node"
        self.folder = self.path / f"{NAMESPACE.hex()}-{page_bytes}"
        self._slots = slots
        self._memory = memoryview(mmap.mmap(-1, slots * page_bytes))
        self.index = DiskIndex(self.settings)
        self.tier = CountingTier(self.path, self.slot)
        self.ended: list[DiskOutcome] = []

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

    def slot(self, number: int) -> memoryview:
        size = self.layout.page_bytes
        return self._memory[number * size : (number + 1) * size]

    def content(self, name: bytes) -> bytes:
        block = blake2b(name).digest()
        return (block * (self.layout.page_bytes // len(block) + 1))[: self.layout.page_bytes]

    def open(self) -> Self:
        self.follow(self.index.open(NAMESPACE, self.layout.page_bytes, KV_HEADS))
        self.until(lambda: self.state != "opening")
        return self

    @property
    def state(self) -> str:
        return self.index.stats().state

    def follow(self, result: DiskResult) -> None:
        for order in result.orders:
            self.tier.submit(order)
        self.ended += result.ended

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            assert time.monotonic() < end, "the disk's threads do not answer"
            select.select([self.tier.fileno()], [], [], 0.05)
            for event in self.tier.poll():
                self.follow(self.index.handle(event))
        self.index.validate()

    def settle(self) -> None:
        """Until the threads have carried out every order, and nothing has happened for a moment after that."""
        self.until(lambda: self.tier.done == self.tier.orders)
        quiet = time.monotonic()
        while time.monotonic() - quiet < 0.04:
            if select.select([self.tier.fileno()], [], [], 0.02)[0]:
                for event in self.tier.poll():
                    self.follow(self.index.handle(event))
                quiet = time.monotonic()

    def pages(self, word: str) -> list[DiskPage]:
        pages: list[DiskPage] = []
        for place, each in enumerate(keys(word)):
            self.slot(place)[:] = self.content(each)
            pages.append(DiskPage(each, parent(word, place), place, page_checksum(self.content(each), KV_HEADS)))
        return pages

    def write(self, *words: str) -> list[WriteEnded]:
        """Write chains, those of their pages that are missing, one after the other."""
        before = len(self.ended)
        for word in words:
            count = len(self.ended) + len(word)
            self.follow(self.index.write(self.pages(word)))
            self.until(lambda count=count: len(self.ended) == count)
        return [ended for ended in self.ended[before:] if isinstance(ended, WriteEnded)]

    def read(self, names: Sequence[bytes]) -> dict[bytes, bool]:
        """Whether each page came, as it should be."""
        before = len(self.ended)
        for slot in range(len(names)):
            self.slot(slot)[:] = bytes(self.layout.page_bytes)
        self.follow(self.index.read([(name, slot) for slot, name in enumerate(names)]))
        self.until(lambda: len(self.ended) == before + len(names))
        came: dict[bytes, bool] = {}
        for ended in self.ended[before:]:
            assert isinstance(ended, ReadEnded)
            if ended.ok:
                assert self.slot(ended.slot) == self.content(ended.key), "the bytes of another page"
                assert ended.checksum == page_checksum(self.content(ended.key), KV_HEADS)
            came[ended.key] = ended.ok
        return came

    def reads_all_of(self, word: str) -> bool:
        assert self.index.prefix(keys(word)) == len(word), f"{word} is not here"
        return all(self.read(keys(word)).values())

    def readable(self) -> set[str]:
        """The words of all pages that can be read; each is read."""
        names = [name for name, _ in self.index.pages()]
        for start in range(0, len(names), self._slots):
            assert all(self.read(names[start : start + self._slots]).values())
        return {name.lstrip(b".").decode() for name in names}

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("segment-*.kv"))


def prefixes(*words: str) -> set[str]:
    return {word[: length + 1] for word in words for length in range(len(word))}


__all__ = ["LARGE", "NAMESPACE", "SMALL", "Rig", "key", "prefixes"]
