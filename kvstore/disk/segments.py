"""Which segments there are, how much of each is still wanted, and how much room is left. Bytes on paper; no files.

    found ──all are found──────────────┐
                                       ▼
    open ──full, or writing failed──▶ closed ──cleaned──▶ cleaning ──▶ dying ──▶ deleting ──▶ gone
                                       │  ▲                  │          ▲
                                       │  └──could not be────┘          │
                                       └──nothing live is left──────────┘

A record is *coming* until its write has ended, then *live* until it is evicted, dropped or moved, then dead. Dead bytes
come back only with their whole segment. A segment is deleted when nothing live is left in it. It is cleaned, its live
records moved, only when at most half is live, so that less is moved than gained. A segment's reads end before it is
deleted.

Appending stops one segment short of the limit, so that there is always room to clean into.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from kvstore.disk.record_format import RecordLayout

V = TypeVar("V")

MOST_SEGMENTS = 10**8
"""As many numbers as a segment's name has."""

_FEWEST = 8  # segments that the room is divided into, so that giving up one costs little


class Segment(Generic[V]):
    """One file of records. `live` maps the place of a wanted record to what it stands for."""

    __slots__ = ("coming", "leaving", "live", "number", "reading", "records", "size", "state")

    def __init__(self, number: int, size: int, records: int, state: Literal["found", "open"]) -> None:
        self.number = number
        self.size = size  # bytes, of what is coming too
        self.records = records
        self.state: Literal["found", "open", "closed", "cleaning", "dying", "deleting"] = state
        self.live: dict[int, V] = {}
        self.coming = 0  # records
        self.leaving = 0  # records that are being moved elsewhere
        self.reading = 0  # pages


@dataclass(slots=True)
class _SegmentFolder:
    size: int  # bytes
    state: Literal["idle", "deleting", "stuck"] = "idle"


class Segments(Generic[V]):
    """The account of one directory: the segments of one namespace, and the folders of others."""

    def __init__(self, layout: RecordLayout, segment_bytes: int, max_bytes: int) -> None:
        record = layout.record_bytes
        fitting = (min(segment_bytes, max_bytes // _FEWEST) - layout.header_bytes) // record
        self.layout = layout
        self.records_per_segment = max(1, fitting)
        self.max_bytes = max_bytes
        self.used = 0  # bytes of everything
        self.live_bytes = 0
        self._going = 0  # bytes of segments that are being cleaned, or dying, and of folders being deleted
        self._segments: dict[int, Segment[V]] = {}
        self._open: Segment[V] | None = None
        self._sparse: dict[int, Segment[V]] = {}  # closed and at most half live
        self._ready: list[Segment[V]] = []  # dying, and without reads
        self._stuck: list[Segment[V]] = []  # dying, and could not be deleted
        self._folders: dict[str, _SegmentFolder] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, number: int) -> Segment[V]:
        return self._segments[number]

    def __iter__(self) -> Iterator[Segment[V]]:
        return iter(self._segments.values())

    @property
    def full_segment(self) -> int:
        """Bytes of a segment that is full."""
        return self.layout.offset(self.records_per_segment)

    @property
    def needed(self) -> int:
        """Bytes below which the room is too little to work in."""
        return 4 * self.full_segment

    @property
    def short(self) -> bool:
        """Whether something should go, beyond what is going already."""
        return self.used - self._going > self.max_bytes - 2 * self.full_segment

    # --- what is there ----------------------------------------------------------------------------------------------

    def found(self, number: int, size: int, records: int) -> None:
        """A segment of earlier days; its live records follow as `revive`."""
        assert number not in self._segments
        self._segments[number] = Segment(number, size, records, "found")
        self.used += size
        self._next = max(self._next, number + 1)

    def revive(self, number: int, index: int, value: V) -> Segment[V]:
        segment = self._segments[number]
        segment.live[index] = value
        self.live_bytes += self.layout.record_bytes
        return segment

    def all_found(self) -> None:
        for segment in self._segments.values():
            segment.state = "closed"
            self._weigh(segment)

    def found_folder(self, name: str, size: int) -> None:
        """Another namespace's; to be told of oldest first."""
        self._folders[name] = _SegmentFolder(size)
        self.used += size

    # --- records come and go ------------------------------------------------------------------------------------------

    def append(self, moving: bool) -> tuple[Segment[V], int] | None:
        """A place for one more record, which is coming from now on; none when there is no room. It was the segment's
        last if that is closed now. `moving` may use the room that is kept for it."""
        segment, cost = self._open, self.layout.record_bytes
        if segment is None:
            cost += self.layout.header_bytes
        if self.used + cost > self.max_bytes - (0 if moving else self.full_segment):
            return None
        if segment is None:
            segment = self._open = Segment(self._number(), 0, 0, "open")
            self._segments[segment.number] = segment
        index = segment.records
        segment.records += 1
        segment.coming += 1
        segment.size += cost
        self.used += cost
        if segment.records == self.records_per_segment:
            self.close_open()
        return segment, index

    def close_open(self) -> Segment[V] | None:
        """Append no more to the segment that is open, and return it."""
        segment, self._open = self._open, None
        if segment is not None:
            segment.state = "closed"
            self._weigh(segment)
        return segment

    def came(self, segment: Segment[V], index: int, value: V | None) -> None:
        """The record is written; or (none) it is not, or its page is not wanted any more."""
        segment.coming -= 1
        if value is not None:
            segment.live[index] = value
            self.live_bytes += self.layout.record_bytes
        self._weigh(segment)

    def died(self, segment: Segment[V], index: int) -> None:
        """A live record is wanted no more, or is live elsewhere now."""
        del segment.live[index]
        self.live_bytes -= self.layout.record_bytes
        self._weigh(segment)

    def read_began(self, segment: Segment[V]) -> None:
        segment.reading += 1

    def read_ended(self, segment: Segment[V]) -> None:
        segment.reading -= 1
        if segment.state == "dying" and not segment.reading:
            self._ready.append(segment)

    # --- making room --------------------------------------------------------------------------------------------------

    def victim(self) -> Segment[V] | None:
        """The segment that is best cleaned: the one that wins most, if it is at most half live and there is room to
        move what is."""
        best = min(self._sparse.values(), key=lambda segment: len(segment.live) - segment.records, default=None)
        if best is None:
            return None
        segments = 1 + len(best.live) // self.records_per_segment
        moved = len(best.live) * self.layout.record_bytes + segments * self.layout.header_bytes
        return best if self.used + moved <= self.max_bytes else None

    def shrink(self) -> None:
        """The disk is full before the limit is reached: what is used now is the limit."""
        self.max_bytes = max(self.needed, min(self.max_bytes, self.used))

    def clean(self, segment: Segment[V]) -> None:
        """Its live records are being moved: `left` follows for each."""
        assert segment.state == "closed"
        del self._sparse[segment.number]
        segment.state = "cleaning"
        segment.leaving = len(segment.live)
        self._going += segment.size

    def left(self, segment: Segment[V]) -> None:
        """An attempt to move one record has ended; if well, it has died here before."""
        segment.leaving -= 1
        self._weigh(segment)

    def deletable(self) -> list[Segment[V]]:
        """Segments to be deleted now; each is asked for once, and `deleted` or `not_deleted` follows."""
        ready, self._ready = self._ready, []
        for segment in ready:
            segment.state = "deleting"
        return ready

    def deleted(self, segment: Segment[V]) -> None:
        del self._segments[segment.number]
        self.used -= segment.size
        self._going -= segment.size

    def not_deleted(self, segment: Segment[V]) -> None:
        segment.state = "dying"
        self._stuck.append(segment)

    def oldest_folder(self) -> str | None:
        """The folder of another namespace that goes first; `folder_deleted` or `folder_not_deleted` follows."""
        for name, folder in self._folders.items():
            if folder.state == "idle":
                folder.state = "deleting"
                self._going += folder.size
                return name
        return None

    def folder_deleted(self, name: str) -> None:
        size = self._folders.pop(name).size
        self.used -= size
        self._going -= size

    def folder_not_deleted(self, name: str) -> None:
        self._folders[name].state = "stuck"
        self._going -= self._folders[name].size

    def retry(self) -> None:
        """What could not be deleted may be tried again."""
        self._ready += self._stuck
        self._stuck.clear()
        for folder in self._folders.values():
            if folder.state == "stuck":
                folder.state = "idle"

    def validate(self) -> None:
        """Check every invariant that this can see; for tests."""
        own = sum(segment.size for segment in self._segments.values())
        assert self.used == own + sum(folder.size for folder in self._folders.values())
        leaving = ("cleaning", "dying", "deleting")
        going = sum(segment.size for segment in self._segments.values() if segment.state in leaving)
        assert self._going == going + sum(f.size for f in self._folders.values() if f.state == "deleting")
        assert self.live_bytes == self.layout.record_bytes * sum(len(s.live) for s in self._segments.values())
        for segment in self._segments.values():
            assert all(0 <= index < segment.records for index in segment.live)
            assert len(segment.live) + segment.coming <= segment.records
            assert (segment is self._open) == (segment.state == "open")
            assert segment.leaving == 0 or segment.state == "cleaning"
            if segment.state in ("dying", "deleting"):
                assert not segment.live
                assert not segment.coming
            assert segment.state != "deleting" or not segment.reading, "deleted under a reader"
            sparse = segment.state == "closed" and not segment.coming
            assert (segment.number in self._sparse) == (sparse and 2 * len(segment.live) <= segment.records)

    def _number(self) -> int:
        number = self._next % MOST_SEGMENTS
        while number in self._segments:
            number = (number + 1) % MOST_SEGMENTS
        self._next = number + 1
        return number

    def _weigh(self, segment: Segment[V]) -> None:
        """See what has become of a segment that something happened to."""
        if segment.coming or segment.leaving or segment.state not in ("closed", "cleaning"):
            return
        if segment.state == "cleaning":
            if segment.live:
                segment.state = "closed"  # some could not be moved
                self._going -= segment.size
        elif not segment.live:
            self._sparse.pop(segment.number, None)
            self._going += segment.size
        if not segment.live:
            segment.state = "dying"
            if not segment.reading:
                self._ready.append(segment)
        elif 2 * len(segment.live) <= segment.records:
            self._sparse[segment.number] = segment
