"""The checksum that every sealed page carries: XXH3-64, against bit rot and torn copies, not against adversaries.

It is a tree of two levels. A page lies heads outermost, and each KV head's part is hashed on its own:

    page checksum = XXH3-64 of the heads' checksums, one after the other, each as 8 little-endian bytes

So a rank that has some of the heads hashes its own part, and the parts together are the page's checksum.
"""

# pyright: strict

import struct
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import xxhash

Bytes: TypeAlias = bytes | bytearray | memoryview

_PIECE = 2**16  # bytes


class _Hash(Protocol):
    def update(self, piece: Bytes, /) -> None: ...
    def intdigest(self) -> int: ...


def checksum(content: Bytes) -> int:
    """XXH3-64 of bytes that are no page. Runs at memory speed and lets other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(content)


def head_checksums(part: Bytes, heads: int) -> list[int]:
    """The checksums of the KV heads whose bytes are `part`, in order. Raises ValueError where they don't divide it."""
    size = _head_bytes(part, heads)
    view = memoryview(part)
    return [checksum(view[start : start + size]) for start in range(0, len(part), size)]


def join_checksums(heads: Sequence[int]) -> int:
    """The checksum of a page from those of all its heads, in order."""
    return checksum(struct.pack(f"<{len(heads)}Q", *heads))


def page_checksum(page: Bytes, heads: int) -> int:
    """The checksum of a page of so many KV heads. Raises ValueError where they don't divide it."""
    return join_checksums(head_checksums(page, heads))


def copy_page(target: memoryview, source: Bytes, heads: int) -> int:
    """Copy a page; returns the checksum of what then lies in `target`. Raises ValueError where the heads don't divide
    the page."""
    return join_checksums(copy_heads(target, source, heads))


def copy_heads(target: memoryview, source: Bytes, heads: int) -> list[int]:
    """Copy the parts of so many KV heads; returns the checksums of what then lies in `target`. In pieces, so that each
    is still in the processor's cache when it is read again: for a page of 1 MiB that halves what the checksum adds to
    the copy. Raises ValueError as `head_checksums`."""
    size = _head_bytes(source, heads)
    if size <= _PIECE // heads:
        target[:] = source
        return head_checksums(target, heads)
    view = memoryview(source)
    return [_copy_head(target[at : at + size], view[at : at + size]) for at in range(0, len(source), size)]


def _copy_head(target: memoryview, source: memoryview) -> int:
    if len(source) <= _PIECE:
        target[:] = source
        return checksum(target)
    state = cast(_Hash, xxhash.xxh3_64())
    for start in range(0, len(source), _PIECE):
        piece = target[start : start + _PIECE]
        piece[:] = source[start : start + _PIECE]
        state.update(piece)
    return state.intdigest()


def _head_bytes(part: Bytes, heads: int) -> int:
    size, rest = divmod(len(part), heads) if heads > 0 else (0, 0)
    if rest or not size:
        raise ValueError(f"{len(part)} bytes can't be the parts of {heads} KV heads")
    return size
