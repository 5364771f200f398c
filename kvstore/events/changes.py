"""What happened to a set of cached pages, in the order it happened: the plain form of KV events and snapshots.

The owners of pages (`DeviceBlockManager`, `HostPagePool`) record changes here and never know the readers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from baton.messages import MAX_KEYS_PER_CALL, Medium, PageSegment, Snapshot

_KEYS_PER_PART = 8_192  # 128 KiB of keys in one message: its reader takes a few milliseconds
_FEW = 16  # keys that are not worth an array
_TURNS: Mapping[Medium, int] = {"GPU": 0, "CPU": 21, "DISK": 42}  # by how many bits a tier's digest is turned


class PagesStored(Struct, frozen=True):
    """`keys`, each following the one before, can be found now; the first follows `parent` (empty: a chain's start).
    `tokens` are those of all these pages, where others may know them."""

    parent: bytes
    keys: tuple[bytes, ...]
    tokens: tuple[int, ...] = ()


class PagesRemoved(Struct, frozen=True):
    """`keys` are gone, children before parents."""

    keys: tuple[bytes, ...]


class PagesCleared(Struct, frozen=True):
    """Everything is gone, on every tier."""


CacheChange: TypeAlias = PagesStored | PagesRemoved | PagesCleared
TierChanges: TypeAlias = tuple[Medium, Sequence[CacheChange]]
"""Changes on one tier, in order. `PagesCleared` is of all tiers, whichever says it."""


class ChangeLog:
    """Collects changes until they are drained, joining neighbours that belong together."""

    def __init__(self) -> None:
        self._done: list[CacheChange] = []
        self._parent = b""
        self._tokens: list[int] = []
        self._stored: list[bytes] = []  # the run being collected; at most one of these two is not empty
        self._removed: list[bytes] = []

    def stored(self, key: bytes, parent: bytes, tokens: Sequence[int] = ()) -> None:
        """Always with the page's tokens, or never."""
        if not self._stored or self._stored[-1] != parent:
            self._close()
            self._parent = parent
        self._stored.append(key)
        self._tokens += tokens

    def removed(self, key: bytes) -> None:
        if self._stored:
            self._close()
        self._removed.append(key)

    def cleared(self) -> None:
        self._done.clear()  # changes of pages that are gone need no event
        self._stored.clear()
        self._tokens.clear()
        self._removed.clear()
        self._done.append(PagesCleared())

    def drain(self) -> list[CacheChange]:
        """The changes since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def _close(self) -> None:
        if self._stored:
            self._done.append(PagesStored(self._parent, tuple(self._stored), tuple(self._tokens)))
            self._stored.clear()
            self._tokens.clear()
        if self._removed:
            self._done.append(PagesRemoved(tuple(self._removed)))
            self._removed.clear()


def digest(keys: Sequence[bytes], medium: Medium) -> int:
    """64 bits that tell one set of pages from another. That of two sets without a common page is the XOR of theirs, so
    publisher and follower each keep one up to date as pages come and go, and find out whether they still agree.

    A key is a cryptographic hash: half of it is as good as any digest of it. Each tier turns it by another number
    of bits, because a page that is on another tier than believed is a difference too."""
    if len(keys) > _FEW:
        return packed_digest(b"".join(keys), medium)
    folded = 0
    for key in keys:
        folded ^= int.from_bytes(key[8:], "little")
    return _turned(folded, medium)


def packed_digest(keys: bytes, medium: Medium) -> int:
    return _turned(int(np.bitwise_xor.reduce(np.frombuffer(keys, "<u8")[1::2])), medium)


def _turned(folded: int, medium: Medium) -> int:
    turn = _TURNS[medium]
    return (folded << turn | folded >> 64 - turn) & 0xFFFF_FFFF_FFFF_FFFF


def page_runs(pages: Iterable[tuple[bytes, bytes]], medium: Medium) -> Iterator[PageSegment]:
    """Join (key, parent) pairs, parents first, into runs for a snapshot."""
    parent = b""
    run: list[bytes] = []
    for key, above in pages:
        if run and (run[-1] != above or len(run) == MAX_KEYS_PER_CALL):
            yield PageSegment(parent, b"".join(run), medium)
            run.clear()
        if not run:
            parent = above
        run.append(key)
    if run:
        yield PageSegment(parent, b"".join(run), medium)


def in_parts(changes: Iterable[TierChanges]) -> Iterator[list[TierChanges]]:
    """The same changes in the same order, cut into parts that each fit one message; none for no changes."""
    part: list[TierChanges] = []
    room = _KEYS_PER_PART
    for medium, of_tier in changes:
        for change in _bounded(of_tier):
            if room <= 0:
                yield part
                part, room = [], _KEYS_PER_PART
            part.append((medium, (change,)))
            room -= 4 + _weight(change)
    if part:
        yield part


def _weight(change: CacheChange) -> int:
    """About as many keys would take as much room."""
    match change:
        case PagesStored(keys=keys, tokens=tokens):
            return len(keys) + len(tokens) // 4
        case PagesRemoved(keys=keys):
            return len(keys)
        case PagesCleared():
            return 0


def _bounded(changes: Iterable[CacheChange]) -> Iterator[CacheChange]:
    """The same with no change of more keys than one message may carry."""
    for change in changes:
        if isinstance(change, PagesCleared) or len(change.keys) <= _KEYS_PER_PART:
            yield change
            continue
        for start in range(0, len(change.keys), _KEYS_PER_PART):
            keys = change.keys[start : start + _KEYS_PER_PART]
            if isinstance(change, PagesStored):
                each = len(change.tokens) // len(change.keys)
                tokens = change.tokens[start * each : (start + len(keys)) * each]
                yield PagesStored(change.keys[start - 1] if start else change.parent, keys, tokens)
            else:
                yield PagesRemoved(keys)


def snapshot_parts(sequence: int, runs: Iterable[PageSegment]) -> list[Snapshot]:
    """The messages that carry one snapshot: at least one, each of bounded size, the last marked."""
    parts: list[list[PageSegment]] = [[]]
    keys = 0
    for run in runs:
        if keys >= _KEYS_PER_PART:
            parts.append([])
            keys = 0
        parts[-1].append(run)
        keys += len(run.keys) // 16 + 4  # the run's own fields weigh about as much as four keys
    last = len(parts) - 1
    return [Snapshot(sequence, tuple(part), number, number == last) for number, part in enumerate(parts)]
