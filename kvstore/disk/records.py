"""Records in and out of segment files: many with one system call, and never believed unchecked.

Neighbouring records move together, headers and pages gathered from and scattered to where they belong, so that a
batch runs at the speed of one large sequential access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvstore.disk.files import SegmentFiles
from kvstore.disk.record_format import RecordFormat, RecordHeader, RecordLayout

_RUN_BYTES = 8 * 2**20  # of one system call: large enough for full bandwidth, small enough to overlap with checking
_PLACE = itemgetter(0, 1)  # of a Wanted
_RUN_RECORDS = 256  # of one system call: it takes at most 1,024 buffers


class Wanted(NamedTuple):
    """A record to be read, and where its page shall go; `tag` is the caller's."""

    segment: int
    record: int
    buffer: memoryview
    tag: int


def run_length(layout: RecordLayout) -> int:
    """How many records are moved by one system call."""
    return min(_RUN_RECORDS, -(-_RUN_BYTES // layout.record_bytes))


def runs(layout: RecordLayout, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Return `wanted` in the order of their places, neighbours together. The first run is a single record, so that
    the waiter for the first page need not wait for more."""
    longest = run_length(layout)
    run: list[Wanted] = []
    first = True
    segment = following = -1
    for each in sorted(wanted, key=_PLACE):
        if run and (first or len(run) == longest or each.segment != segment or each.record != following):
            yield run
            run, first = [], False
        run.append(each)
        segment, following = each.segment, each.record + 1
    if run:
        yield run


class RecordReader:
    """Reads pages of records. One thread's."""

    def __init__(self, files: SegmentFiles, layout: RecordLayout) -> None:
        self._files = files
        self._layout = layout
        # Headers are read only because they lie between the pages; what counts is the page's checksum.
        self._header = memoryview(mmap.mmap(-1, layout.header_bytes))

    def read(self, run: Sequence[Wanted]) -> list[bool]:
        """Read the pages of neighbouring records. Says of each whether its buffer was filled; never raises."""
        done = self._try(run)
        if done == len(run) or len(run) == 1:
            return [place < done for place in range(len(run))]
        return [self._try([each]) == 1 for each in run]  # one bad block must not cost its neighbours

    def _try(self, run: Sequence[Wanted]) -> int:
        buffers = [part for each in run for part in (self._header, each.buffer)]
        try:
            size = self._files.read(run[0].segment, self._layout.offset(run[0].record), buffers)
        except OSError:
            return 0
        return size // self._layout.record_bytes


class HeaderRoom:
    """Room for the headers of one run, so that they can be written from where they are made."""

    def __init__(self, layout: RecordLayout) -> None:
        size = layout.header_bytes
        room = memoryview(mmap.mmap(-1, run_length(layout) * size))
        self._headers = [room[at : at + size] for at in range(0, len(room), size)]

    def gather(self, form: RecordFormat, records: Sequence[tuple[RecordHeader | None, memoryview]]) -> list[memoryview]:
        """At most a run of records as they lie on disk, headers and pages; those without a header hold no page. Good
        until the next call."""
        buffers: list[memoryview] = []
        for header, (record, page) in zip(self._headers, records, strict=False):
            if record is None:
                form.void(header)
            else:
                form.pack_into(header, record)
            buffers += (header, page)
        return buffers


class RecordWriter:
    """Appends records to segments, and spoils them. One thread's."""

    def __init__(self, files: SegmentFiles, layout: RecordLayout) -> None:
        self._files = files
        self._layout = layout

    def append(self, segment: int, first: int, gathered: Sequence[memoryview]) -> None:
        """Write records from `first` on, and before the first of all the segment's header. Raises OSError."""
        if first == 0:
            self._files.write(segment, 0, [self._files.create(segment), *gathered])
        else:
            self._files.write(segment, self._layout.offset(first), gathered)

    def overwrite(self, segment: int, record: int, header: memoryview) -> None:
        """Give a record another header. Raises OSError."""
        self._files.write(segment, self._layout.offset(record), [header])
