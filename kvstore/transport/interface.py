"""The orders that the store's state gives to a page transport, and the events that come back.

    state ──PeerOrder──▶ page transport (`kvstore.transport`)  ──PeerEvent──▶ state

A slot that an order names belongs to that order until its event has come. The transport says when it is done with the
slot's bytes, and the state never reuses the slot before.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from msgspec import Struct

from baton.messages import Source
from baton.peer_protocol import PageReply, PageRequest, SentPage


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
