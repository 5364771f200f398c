"""Below the arena: what the store's state asks of the disk and of other stores, and what it hears from them.

The state is pure and decides; these are its words with the threads that touch page bytes:

    state ──DiskOrder──▶ disk tier (kvstore.disk)        ──DiskEvent──▶ state
    state ──PeerOrder──▶ page transport (kvstore.peers)  ──PeerEvent──▶ state

A slot that an order names belongs to that order until its event has come: whoever reads or writes its bytes says when
it is done, and nothing is ever reused before. Nobody here waits for space; what finds no room is given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from baton.messages import PageReply, PageRequest, SentPage, Source, TierSpeed
from kvstore.changes import Change
from kvstore.disk_stats import DiskStats

# --- other stores -----------------------------------------------------------------------------------------------------


class Expect(Struct, frozen=True):
    """Pages of this fetch may be written to these slots as they come: (index, slot). Before the words that ask."""

    fetch: int
    slots: tuple[tuple[int, int], ...]


class Ask(Struct, frozen=True):
    """Say this to the store that `source` names."""

    source: Source
    request: PageRequest


class Retract(Struct, frozen=True):
    """Write no more pages of this fetch; answered by Retracted when that is certain."""

    fetch: int


class Answer(Struct, frozen=True):
    """Say this to the store that asked."""

    peer: str  # incarnation
    reply: PageReply


class Serve(Struct, frozen=True):
    """Send these pages from these slots, which stay held until Served names `number`."""

    number: int
    peer: str  # incarnation
    fetch: int
    pages: tuple[SentPage, ...]
    slots: tuple[int, ...]


class Check(Struct, frozen=True):
    """Compare the bytes of a slot, which stays held until Checked, with its checksum."""

    number: int
    slot: int
    checksum: int


PeerOrder: TypeAlias = Expect | Ask | Retract | Answer | Serve | Check


class PeerAsked(Struct, frozen=True):
    """Another store said this."""

    peer: str  # incarnation
    request: PageRequest


class PeerAnswered(Struct, frozen=True):
    """A store that we ask said this; never Pages, whose bytes come as Landed."""

    peer: str  # incarnation
    reply: PageReply


class Landed(Struct, frozen=True):
    """Pages of a fetch lie in their slots: (index, checksum they were sealed with). `damaged` indices came with bytes
    that do not match: what is in their slots is rubbish, and the slots are expected to be written again."""

    fetch: int
    pages: tuple[tuple[int, int], ...]
    damaged: tuple[int, ...] = ()


class Retracted(Struct, frozen=True):
    """No page of this fetch will be written any more."""

    fetch: int


class Served(Struct, frozen=True):
    """The transport is done with the slots of that Serve, whether or not they arrived."""

    number: int


class Checked(Struct, frozen=True):
    """The outcome of a Check."""

    number: int
    intact: bool


PeerEvent: TypeAlias = PeerAsked | PeerAnswered | Landed | Retracted | Served | Checked


class PageTransport(Protocol):
    """Carries pages between stores, on threads of its own: ZMQ over TCP, or RDMA. Every method returns at once."""

    @property
    def endpoint(self) -> str:
        """Where other stores reach this one."""
        ...

    def use(self, arena: memoryview, page_bytes: int) -> None:
        """From now on slots are pages of that size in this memory. Orders about earlier slots have all ended."""
        ...

    def submit(self, order: PeerOrder) -> None: ...

    def fileno(self) -> int:
        """A descriptor that can be read when `poll` has something to tell."""
        ...

    def poll(self) -> list[PeerEvent]:
        """What has happened since the last call."""
        ...

    def close(self) -> None: ...


# --- the disk ---------------------------------------------------------------------------------------------------------


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


class DiskTable(Protocol):
    """What is on the disk, as the store's state asks it: `kvstore.disk_index`. Pure; it never waits for anything."""

    @property
    def working(self) -> bool:
        """Whether there is a disk tier that can be read now."""
        ...

    @property
    def speed(self) -> TierSpeed: ...

    def open(self, namespace: bytes, page_bytes: int) -> DiskResult:
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

    def drain_events(self) -> list[Change]: ...

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that can be read, parents first."""
        ...

    def stats(self) -> DiskStats: ...

    def validate(self) -> None:
        """Check every invariant; for tests."""
        ...
