"""The orders that the store's state gives to the disk tier, and the events that come back.

    state ──DiskOrder──▶ disk tier (`kvstore.disk`)  ──DiskEvent──▶ state

A slot that an order names belongs to that order until its event has come. The disk tier says when it is done with the
slot's bytes, and the state never reuses the slot before. No order waits for space: a page that finds no room is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from baton.messages import TierSpeed
from kvstore.disk.stats import DiskStats
from kvstore.events.changes import CacheChange


class DiskPage(Struct, frozen=True):
    """A sealed page on its way to disk: where it stands in its chain, its slot, and the checksum it was sealed with."""

    key: bytes
    parent: bytes
    slot: int
    checksum: int


class WriteEnded(Struct, frozen=True):
    """The disk tier needs the page's slot no longer. `intact` is False when its bytes did not match its checksum: the
    arena holds rubbish. Whether it is on the disk now is told by KV events only."""

    key: bytes
    slot: int
    intact: bool = True


class ReadEnded(Struct, frozen=True):
    """The page is in its slot, or (`ok` False) what is there is rubbish: it was unreadable or did not match its
    checksum, and is on the disk no more."""

    key: bytes
    slot: int
    checksum: int
    ok: bool


DiskOutcome: TypeAlias = WriteEnded | ReadEnded


class DiskOrder:
    """Base of what the index asks the disk's threads to do; opaque to the store's state."""

    __slots__ = ()


class DiskEvent:
    """Base of what the disk's threads tell the index; opaque to the store's state."""

    __slots__ = ()


class DiskResult(Struct, frozen=True):
    """What a call of the index leads to: orders for the threads, in order, and what has ended for the caller."""

    orders: Sequence[DiskOrder] = ()
    ended: Sequence[DiskOutcome] = ()


class DiskPageIndex(Protocol):
    """What is on the disk, as the store's state asks it: `kvstore.disk.index`. Pure; it never waits for anything."""

    @property
    def working(self) -> bool:
        """Whether there is a disk tier that can be read now."""
        ...

    @property
    def speed(self) -> TierSpeed: ...

    def open(self, namespace: bytes, page_bytes: int, kv_heads: int) -> DiskResult:
        """Pages of this namespace from now on. Nothing is on its way. Those of the last one are gone without a word."""
        ...

    def prefix(self, keys: Sequence[bytes], parent: bytes = b"") -> int:
        """How many of the first `keys`, which follow `parent`, can be read."""
        ...

    def has(self, key: bytes) -> bool: ...

    def parent(self, key: bytes) -> bytes | None:
        """What the page of `key` follows (empty: it starts a chain); none when it can't be read."""
        ...

    def wants(self, key: bytes) -> bool:
        """Pages are taken, and this one is neither here nor on its way; whether there is room, `write` finds out."""
        ...

    def write(self, pages: Sequence[DiskPage]) -> DiskResult:
        """Write pages, parents first. Each ends in one WriteEnded, at once where it can't be taken."""
        ...

    def read(self, pages: Sequence[tuple[bytes, int]]) -> DiskResult:
        """Read pages (key, slot) that are here. Each ends in one ReadEnded."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used just now."""
        ...

    def handle(self, event: DiskEvent) -> DiskResult: ...

    def tick(self, now: float) -> DiskResult: ...

    def drain_events(self) -> list[CacheChange]: ...

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that can be read, parents first."""
        ...

    def stats(self) -> DiskStats: ...

    def validate(self) -> None:
        """Check every invariant; for tests."""
        ...
