"""Records in and out of segment files: many with one system call, and never believed unchecked.

Neighbouring records move together, headers and pages gathered from and scattered to where they belong, so that a
batch runs at the speed of one large sequential access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvstore.disk_files import SegmentFiles
from kvstore.disk_format import RecordFormat, RecordHeader, RecordLayout

_RUN_BYTES = 2 * 2**20  # of one system call: large enough for full bandwidth, small enough to overlap with checking
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
    return max(1, min(_RUN_RECORDS, _RUN_BYTES // layout.record_bytes))


def runs(layout: RecordLayout, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """`wanted` in the order of their places, neighbours together. The first run is a single record: whoever waits for
    the first page need not wait for more."""
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


class RecordWriter:
    """Appends records to segments. One thread's."""

    def __init__(self, files: SegmentFiles, layout: RecordLayout, form: RecordFormat) -> None:
        self._files = files
        self._layout = layout
        self._form = form
        size = layout.header_bytes
        scratch = memoryview(mmap.mmap(-1, run_length(layout) * size))
        self._headers = [scratch[at : at + size] for at in range(0, len(scratch), size)]

    def write(self, segment: int, first: int, records: Sequence[tuple[RecordHeader | None, memoryview]]) -> None:
        """Write records, at most a run, from `first` on; those without a header hold no page. Raises OSError."""
        buffers: list[memoryview] = []
        offset = self._layout.offset(first)
        if first == 0:
            buffers.append(self._files.create(segment))
            offset = 0
        for header, (record, page) in zip(self._headers, records, strict=False):
            if record is None:
                self._form.void(header)
            else:
                self._form.pack_into(header, record)
            buffers += (header, page)
        self._files.write(segment, offset, buffers)

    def invalidate(self, segment: int, record: int) -> None:
        """Make a record one that holds no page. Raises OSError."""
        self._form.void(self._headers[0])
        self._files.write(segment, self._layout.offset(record), [self._headers[0]])
