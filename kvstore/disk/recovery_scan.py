"""What a directory's segments hold, found out anew at every start: there is no index file that could be wrong.

Only headers are read, which is quick; a page is checked when it is used. But where the writing may have been cut off
all pages are checked: in the segment with the latest sequence, and in the one that was made last. What is torn,
corrupt, there twice or without the pages before it is left out and counted. Any bytes may lie there: they cost a
record, or a segment, and never more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.checksum import page_checksum
from kvstore.disk.files import segment_files, segment_path
from kvstore.disk.orders import FoundRecord, FoundSegment
from kvstore.disk.record_format import HEADER_FIELDS, RecordFormat, RecordHeader, RecordLayout, is_segment
from kvstore.keys import START

_BLOCK_BYTES = 2**20  # small records are read in blocks of this size
_APART = 16 * 1_024  # records larger than this are visited one by one
_AHEAD = 64  # headers that the kernel is told of in advance
_CHECKED_BYTES = 256 * 2**20  # at most, at the end of each segment that is checked


class _Record(NamedTuple):
    header: RecordHeader
    segment: int
    record: int


@dataclass
class Scan:
    """What was found. `records` come parents first, otherwise in the order in which they were written; `spoilt` are
    those, torn or corrupt, that still look like records."""

    segments: list[FoundSegment] = field(default_factory=list[FoundSegment])
    records: list[FoundRecord] = field(default_factory=list[FoundRecord])
    spoilt: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    next_sequence: int = 1
    torn: int = 0
    corrupt: int = 0
    orphans: int = 0
    duplicates: int = 0


def scan(
    folder: Path, layout: RecordLayout, namespace: bytes, max_bytes: int, abandoned: Callable[[], bool]
) -> Scan | None:
    """Look through a namespace's folder. None when `abandoned` became true meanwhile. Raises OSError when the folder
    can't be listed; what can't be read counts as corrupt."""
    result = Scan()
    form = RecordFormat(layout, namespace)
    found: list[_Record] = []
    damaged: dict[int, int] = {}  # segment → headers that are none
    for number, size in sorted(segment_files(folder)):
        if abandoned():
            return None
        count = max(0, size - layout.header_bytes) // layout.record_bytes
        if size < layout.header_bytes:  # it was being made
            result.torn += 1
            result.segments.append(FoundSegment(number, size, 0))
            continue
        try:
            with _opened(segment_path(folder, number)) as fd:
                if size > max_bytes or not is_segment(os.pread(fd, layout.header_bytes, 0), layout, namespace):
                    raise ValueError("no segment of this kind")
                result.torn += size > layout.offset(count)  # a record that was cut off
                for index, raw in _headers(fd, layout, count):
                    try:
                        header = form.parse(raw)
                    except ValueError:
                        damaged[number] = damaged.get(number, 0) + 1
                    else:
                        if header is not None:
                            found.append(_Record(header, number, index))
        except (OSError, ValueError):
            result.corrupt += 1
            count = 0
        result.segments.append(FoundSegment(number, size, count))
    found.sort(key=_sequence)
    tails = {found[-1].segment, max(record.segment for record in found)} if found else set[int]()
    result.next_sequence = found[-1].header.sequence + 1 if found else 1
    result.spoilt = [
        (record.segment, record.record)
        for tail in tails
        for record in _torn(folder, layout, [record for record in found if record.segment == tail])
    ]
    result.torn += sum(damaged.pop(tail, 0) for tail in tails) + len(result.spoilt)
    result.corrupt += sum(damaged.values())
    spoilt = set(result.spoilt)
    sound = [record for record in found if (record.segment, record.record) not in spoilt]
    latest = {record.header.key: record for record in sound}
    result.records = _linked(latest)
    result.duplicates = len(sound) - len(latest)
    result.orphans = len(latest) - len(result.records)
    return result


def _headers(fd: int, layout: RecordLayout, count: int) -> Iterator[tuple[int, bytes | memoryview]]:
    """The first bytes of each of `count` records."""
    size = layout.record_bytes
    if size <= _APART:
        together = _BLOCK_BYTES // size
        for first in range(0, count, together):
            block = memoryview(_read(fd, min(together, count - first) * size, layout.offset(first)))
            for index in range(first, min(first + together, count)):
                yield index, block[(index - first) * size :][:HEADER_FIELDS]
        return
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for index in range(count):
        if index % _AHEAD == 0:
            for ahead in range(index, min(index + _AHEAD, count)):
                os.posix_fadvise(fd, layout.offset(ahead), HEADER_FIELDS, os.POSIX_FADV_WILLNEED)
        yield index, _read(fd, HEADER_FIELDS, layout.offset(index))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(fd: int, size: int, offset: int) -> bytes:
    """Nothing where the disk can't be read: no header is that short."""
    try:
        return os.pread(fd, size, offset)
    except OSError:
        return b""


def _torn(folder: Path, layout: RecordLayout, records: list[_Record]) -> Iterator[_Record]:
    """Of the records of one segment, as far as they are near its end, those whose page does not match."""
    if not records:
        return
    records.sort(key=lambda record: record.record)
    with _opened(segment_path(folder, records[0].segment)) as fd, mmap.mmap(-1, layout.page_bytes) as page:
        for each in records[-(_CHECKED_BYTES // layout.record_bytes + 1) :]:
            try:
                size = os.preadv(fd, [page], layout.offset(each.record) + layout.header_bytes)
            except OSError:
                size = 0
            with memoryview(page) as view:
                if size != layout.page_bytes or page_checksum(view, layout.kv_heads) != each.header.checksum:
                    yield each
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _linked(records: dict[bytes, _Record]) -> list[FoundRecord]:
    """Those that hang, record by record, from the start of a chain; parents first, otherwise in the order given."""
    linked: dict[bytes, FoundRecord] = {}
    waiting: dict[bytes, list[_Record]] = {}  # by the parent they wait for, which was moved to a later place
    for record in records.values():
        parent = record.header.parent
        if parent != START and parent not in linked:
            waiting.setdefault(parent, []).append(record)
            continue
        ready = [record]
        while ready:
            (key, above, checksum, _), segment, index = ready.pop()
            linked[key] = FoundRecord(key, above, checksum, segment, index)
            ready += waiting.pop(key, ())
    return list(linked.values())


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int, None, None]:
    """A descriptor to read the file by, and only if it is one."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _sequence(record: _Record) -> int:
    return record.header.sequence
