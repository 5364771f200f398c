"""The disk tier as a store has it, index and threads, over a small arena and a directory of a test's own."""

import mmap
import select
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.config import Bytes, DiskConfig
from kvstore.checksum import page_checksum
from kvstore.disk import orders
from kvstore.disk.file_names import FileNames, PageFile, footprint
from kvstore.disk.index import DiskIndex
from kvstore.disk.io_threads import DiskTier
from tests.kvstore.chains import key, keys, parent

NAMESPACE = b"namespace 16 byt"
KV_HEADS = 4  # of a page: each is hashed on its own
SMALL = 1_000  # bytes of a page that passes through the page cache
LARGE = 65_536  # that does not, where the file system has direct I/O
_PATIENCE = 20.0


class Rig:
    """Pages are named by words, as in `tests.kvstore.chains`; what is in a page follows from its key."""

    def __init__(self, path: Path, page_bytes: int = SMALL, room: int = 64, slots: int = 64) -> None:
        self.page_bytes = page_bytes
        self.settings = DiskConfig(path=str(path), max_bytes=Bytes(room * footprint(page_bytes)), queue_pages=32)
        self.path = path / "node"
        self.folder = self.path / f"{NAMESPACE.hex()}-{page_bytes}"
        self._slots = slots
        self._memory = memoryview(mmap.mmap(-1, slots * page_bytes))
        self.index = DiskIndex(self.settings)
        self.tier = DiskTier(self.path, self.slot)
        self.ended: list[orders.DiskOutcome] = []
        self.deleting = 0  # orders that have not been answered

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

    def slot(self, number: int) -> memoryview:
        size = self.page_bytes
        return self._memory[number * size : (number + 1) * size]

    def content(self, name: bytes) -> bytes:
        block = blake2b(name).digest()
        return (block * (self.page_bytes // len(block) + 1))[: self.page_bytes]

    def open(self) -> Self:
        self.follow(self.index.open(NAMESPACE, self.page_bytes, KV_HEADS))
        self.until(lambda: self.state != "opening")
        return self

    @property
    def state(self) -> str:
        return self.index.stats().state

    def follow(self, result: orders.DiskResult) -> None:
        for order in result.orders:
            self.deleting += isinstance(order, orders.Delete | orders.DeleteFolder)
            self.tier.submit(order)
        self.ended += result.ended

    def hear(self, event: orders.DiskEvent) -> None:
        self.deleting -= isinstance(event, orders.Deleted | orders.FolderDeleted)
        self.follow(self.index.handle(event))

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            assert time.monotonic() < end, "the disk's threads do not answer"
            select.select([self.tier.fileno()], [], [], 0.05)
            for event in self.tier.poll():
                self.hear(event)
        self.index.validate()

    def settle(self) -> None:
        """Until all that was to be deleted is."""
        self.until(lambda: not self.deleting)

    def pages(self, word: str) -> list[orders.DiskPage]:
        pages: list[orders.DiskPage] = []
        for place, each in enumerate(keys(word)):
            self.slot(place)[:] = self.content(each)
            pages.append(orders.DiskPage(each, parent(word, place), place, page_checksum(self.content(each), KV_HEADS)))
        return pages

    def write(self, *words: str) -> list[orders.WriteEnded]:
        """Write chains, those of their pages that are missing, one after the other."""
        before = len(self.ended)
        for word in words:
            count = len(self.ended) + len(word)
            self.follow(self.index.write(self.pages(word)))
            self.until(lambda count=count: len(self.ended) == count)
        return [ended for ended in self.ended[before:] if isinstance(ended, orders.WriteEnded)]

    def read(self, names: Sequence[bytes]) -> dict[bytes, bool]:
        """Whether each page came, as it should be."""
        before = len(self.ended)
        for slot in range(len(names)):
            self.slot(slot)[:] = bytes(self.page_bytes)
        self.follow(self.index.read_pages([(name, slot) for slot, name in enumerate(names)]))
        self.until(lambda: len(self.ended) == before + len(names))
        came: dict[bytes, bool] = {}
        for ended in self.ended[before:]:
            assert isinstance(ended, orders.ReadEnded)
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

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.kv"))

    def file(self, word: str) -> Path:
        name, above = key(word), parent(word, len(word) - 1)
        page = PageFile(name, above, page_checksum(self.content(name), KV_HEADS))
        return self.folder / FileNames(NAMESPACE, self.page_bytes).name(page)


def prefixes(*words: str) -> set[str]:
    return {word[: length + 1] for word in words for length in range(len(word))}


__all__ = ["LARGE", "NAMESPACE", "SMALL", "Rig", "key", "prefixes"]
