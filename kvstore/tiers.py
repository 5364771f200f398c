"""Tiers below the arena: what a disk tier and a remote tier must offer. No implementation lives here yet.

A tier moves sealed pages between itself and arena slots. The store's loop owns the slots and never touches a page's
bytes; tiers work on threads of their own and report what has happened. They never wait for space: a demotion or
promotion that finds no room is dropped, and the page is made again if it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.messages import Medium


@dataclass(frozen=True, slots=True)
class TierPage:
    """A sealed page on its way: where it stands in its chain, and the checksum it was sealed with."""

    key: bytes
    parent: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A page has come back. `intact` is False when its bytes did not match its checksum: the slot holds rubbish."""

    key: bytes
    slot: int
    intact: bool


class DiskTier(Protocol):
    """Pages in files of this node. They survive a restart; one process at a time owns the directory."""

    @property
    def medium(self) -> Medium: ...

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many pages at the start of `keys` are here."""
        ...

    def store(self, page: TierPage, source: memoryview) -> bool:
        """Start writing a page, which the caller keeps held until `poll` names its key. False: no room, dropped."""
        ...

    def load(self, key: bytes, slot: int, target: memoryview) -> bool:
        """Start reading a page into a reserved slot; `poll` tells when. False: it is not here."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read when `poll` has something to tell."""
        ...

    def poll(self) -> tuple[list[bytes], list[Loaded]]:
        """Keys whose writing has ended, and pages that have been read, since the last call. Never blocks."""
        ...

    def close(self) -> None: ...


class RemoteTier(Protocol):
    """Pages in the stores of other nodes, over ZMQ or RDMA. The receiver reserves slots and gives credits."""

    def fetch(self, store: str, pages: Sequence[TierPage], slots: Sequence[int]) -> int:
        """Ask the store at endpoint `store` for pages, into reserved slots. Returns a number that `poll` names."""
        ...

    def cancel(self, number: int) -> None:
        """Stop asking. Slots still being written to come back through `poll`, never before."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read when `poll` has something to tell."""
        ...

    def poll(self) -> list[tuple[int, list[Loaded], bool]]:
        """For each fetch with news: its number, the pages that have come, whether it has ended. Never blocks."""
        ...

    def close(self) -> None: ...
