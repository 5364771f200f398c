"""The checksum that every sealed page carries: XXH3-64, against bit rot and torn copies, not against adversaries."""

from __future__ import annotations

import xxhash

_PIECE = 2**16  # bytes


def page_checksum(page: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a page's bytes. Runs at memory speed and lets other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(page)


def copy_page(target: memoryview, source: memoryview) -> int:
    """Copy a page; returns the checksum of what then lies in `target`. In pieces, so that each is still in the
    processor's cache when it is read again: for a page of 1 MiB that halves what the checksum adds to the copy."""
    if len(source) <= _PIECE:
        target[:] = source
        return page_checksum(target)
    checksum = xxhash.xxh3_64()
    for start in range(0, len(source), _PIECE):
        piece = target[start : start + _PIECE]
        piece[:] = source[start : start + _PIECE]
        checksum.update(piece)
    return checksum.intdigest()
