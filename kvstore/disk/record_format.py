"""What lies on disk, byte by byte. Everything that is read back is taken for random until it has been checked.

A segment is a file: one header, then records of one fixed size, so that a damaged record never hides the one after it.

    segment = header │ record 0 │ record 1 │ …          record = header │ page

    segment header  magic 8, checksum 8, version 4, header bytes 4, page bytes 8, KV heads 4, namespace length 4,
                    namespace ≤ 64
    record header   magic 8, checksum 8, version 4, flags 4, page bytes 8, sequence 8, page checksum 8,
                    namespace checksum 8, key 16, parent 16 (zeros where a chain starts, and a flag says so)

Numbers are little-endian. A header's checksum is XXH3-64 over what follows it. Large pages whose size is a multiple of
the memory page lie at multiples of it, so that they move between disk and arena without passing the page cache;
others are packed.
"""

# pyright: strict

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvstore.checksum import checksum
from kvstore.keys import START

VERSION: Final = 2
BLOCK: Final = 4_096  # what direct I/O aligns to
MAX_NAMESPACE: Final = 64  # bytes of a namespace's digest

_PACKED = 128  # bytes of a header that need not be aligned
_ALIGNED_FROM = 16 * BLOCK  # smaller pages would lose more to padding than they gain
_SEGMENT_MAGIC = b"BATONSEG"
_RECORD_MAGIC = b"BATONREC"
_CHECKED = 16  # where the part begins that a header's checksum covers
_SEGMENT = struct.Struct("<8sQIIQII64s")
_RECORD = struct.Struct("<8sQIIQQQQ16s16s")
_MOST_RECORDS = 2**62  # ever written; leaves room to count on
_STARTS_CHAIN = 1
_VOID = 2


class RecordLayout:
    """How pages of one size lie in a segment. `kv_heads` parts of each page are hashed on their own."""

    def __init__(self, page_bytes: int, kv_heads: int) -> None:
        self.page_bytes, self.kv_heads = page_bytes, kv_heads
        self.aligned = page_bytes >= _ALIGNED_FROM and page_bytes % BLOCK == 0
        """Whether pages can be moved by direct I/O."""
        self.header_bytes = BLOCK if self.aligned else _PACKED
        """Of the segment's header and of each record's."""
        self.record_bytes = self.header_bytes + page_bytes

    def offset(self, index: int) -> int:
        """Where record `index` begins; with the number of records, how long the file is."""
        return self.header_bytes + index * self.record_bytes


class RecordHeader(NamedTuple):
    """What a record says of its page."""

    key: bytes
    parent: bytes  # START at a chain's start
    checksum: int
    sequence: int  # of all records of a namespace; a later one of the same key replaces an earlier one


def segment_header(layout: RecordLayout, namespace: bytes) -> bytes:
    """The first bytes of a segment, padded to `layout.header_bytes`."""
    assert len(namespace) <= MAX_NAMESPACE
    fields = (VERSION, layout.header_bytes, layout.page_bytes, layout.kv_heads, len(namespace), namespace)
    unchecked = _SEGMENT.pack(_SEGMENT_MAGIC, 0, *fields)
    checked = _SEGMENT.pack(_SEGMENT_MAGIC, checksum(unchecked[_CHECKED:]), *fields)
    return checked.ljust(layout.header_bytes, b"\0")


def is_segment(header: bytes, layout: RecordLayout, namespace: bytes) -> bool:
    """Whether these first bytes of a file are exactly those of a segment of this kind."""
    return header == segment_header(layout, namespace)


class RecordFormat:
    """Packs and reads the record headers of one namespace."""

    def __init__(self, layout: RecordLayout, namespace: bytes) -> None:
        self._page_bytes = layout.page_bytes
        self._namespace = checksum(namespace)

    def pack_into(self, buffer: memoryview, record: RecordHeader) -> None:
        """Write a record's header to the start of `buffer`. Leaves what follows its fields as it is."""
        self._pack(buffer, record, 0)

    def void(self, buffer: memoryview) -> None:
        """Write the header of a record that holds no page."""
        self._pack(buffer, RecordHeader(bytes(16), START, 0, 0), _VOID)

    def parse(self, buffer: memoryview | bytes) -> RecordHeader | None:
        """What the record at the start of `buffer` says. None when it holds no page. Raises ValueError when it is no
        sound header of a record of this namespace."""
        if len(buffer) < _RECORD.size:
            raise ValueError(f"{len(buffer)} bytes are too few for a record's header")
        magic, check, version, flags, page_bytes, sequence, page, namespace, key, parent = _RECORD.unpack_from(buffer)
        if magic != _RECORD_MAGIC or check != checksum(memoryview(buffer)[_CHECKED : _RECORD.size]):
            raise ValueError("no record's header, or a damaged one")
        if version != VERSION or page_bytes != self._page_bytes or namespace != self._namespace:
            raise ValueError("a record of another kind")
        if sequence > _MOST_RECORDS:
            raise ValueError(f"sequence {sequence} is more than anybody can have written")
        if flags & _VOID:
            return None
        return RecordHeader(key, START if flags & _STARTS_CHAIN else parent, page, sequence)

    def _pack(self, buffer: memoryview, record: RecordHeader, flags: int) -> None:
        key, parent, page, sequence = record
        if parent == START:
            flags |= _STARTS_CHAIN
        _RECORD.pack_into(
            buffer, 0, _RECORD_MAGIC, 0, VERSION, flags, self._page_bytes, sequence, page, self._namespace,
            key, parent,
        )  # fmt: skip
        struct.pack_into("<Q", buffer, 8, checksum(buffer[_CHECKED : _RECORD.size]))


HEADER_FIELDS: Final = _RECORD.size
"""Bytes of a record's header that carry something; the rest is padding."""
