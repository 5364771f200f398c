"""The checksum that every sealed page carries: XXH3-64, against bit rot and torn copies, not against adversaries."""

from __future__ import annotations

import xxhash


def page_checksum(page: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a page's bytes. Runs at memory speed and lets other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(page)
