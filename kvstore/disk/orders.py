"""What the disk's index asks the disk's threads to do, and what it hears back: `kvstore.disk.index` with
`kvstore.disk.io_threads`.

The index decides where every record goes, so the threads only carry out. Each order but `Finish` and `Invalidate` is
answered, however it ends. A reason that is not empty says why it failed. `epoch` names one opening of one namespace,
and events of an earlier epoch are dropped.

Writes and moves to one segment are carried out in the order in which they were given; reads at any time. A segment is
deleted only when no order that names it is left.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kvstore.disk.interface import DiskEvent, DiskOrder

# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open(DiskOrder):
    """Lock the directory, if that is not done, and find out what lies in this namespace's folder: Scanned, Found …,
    Opened; or OpenFailed. A file larger than `max_bytes` is none of ours."""

    epoch: int
    namespace: bytes
    page_bytes: int
    kv_heads: int
    max_bytes: int


class WritePage(NamedTuple):
    key: bytes
    parent: bytes
    checksum: int
    sequence: int
    slot: int


@dataclass(frozen=True, slots=True)
class Write(DiskOrder):
    """Append these pages of the arena to a segment, from record `first` on; it is made when `first` is 0. Answered by
    one Written or several, in order."""

    epoch: int
    segment: int
    first: int
    pages: tuple[WritePage, ...]


class ReadPage(NamedTuple):
    key: bytes
    checksum: int
    segment: int
    record: int
    slot: int


@dataclass(frozen=True, slots=True)
class Read(DiskOrder):
    """Bring these pages into the arena, in any order: PagesRead …, then ReadFinished."""

    epoch: int
    number: int
    pages: tuple[ReadPage, ...]


class MovePage(NamedTuple):
    key: bytes
    parent: bytes
    checksum: int
    sequence: int
    segment: int
    record: int


@dataclass(frozen=True, slots=True)
class Move(DiskOrder):
    """Copy these records to the end of a segment, as for Write. Answered by one Moved or several, in order."""

    epoch: int
    segment: int
    first: int
    pages: tuple[MovePage, ...]


@dataclass(frozen=True, slots=True)
class Finish(DiskOrder):
    """Nothing will be appended to this segment any more. Answered only by Trouble."""

    epoch: int
    segment: int


@dataclass(frozen=True, slots=True)
class Delete(DiskOrder):
    """Delete a segment."""

    epoch: int
    segment: int


@dataclass(frozen=True, slots=True)
class DeleteFolder(DiskOrder):
    """Delete the segments of another namespace."""

    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class Invalidate(DiskOrder):
    """Mark a record as holding no page, lest a restart find it again. Answered only by Trouble."""

    epoch: int
    segment: int
    record: int


# --- events -----------------------------------------------------------------------------------------------------------


class FoundSegment(NamedTuple):
    number: int
    size: int  # bytes
    records: int


class FoundFolder(NamedTuple):
    name: str
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Scanned(DiskEvent):
    """What lies in the directory. Folders are those of other namespaces, oldest first. What was left out of the records
    that follow is counted: `torn` ones, whose writing was cut off; `corrupt` ones; `orphans`; `duplicates`."""

    epoch: int
    segments: tuple[FoundSegment, ...]
    folders: tuple[FoundFolder, ...]
    next_sequence: int
    torn: int
    corrupt: int
    orphans: int
    duplicates: int


class FoundRecord(NamedTuple):
    key: bytes
    parent: bytes
    checksum: int
    segment: int
    record: int


@dataclass(frozen=True, slots=True)
class Found(DiskEvent):
    """Some of the records that lie there, each once, parents before children, otherwise oldest first."""

    epoch: int
    records: tuple[FoundRecord, ...]


@dataclass(frozen=True, slots=True)
class Opened(DiskEvent):
    """All records have been told of. A reason says why they can only be read."""

    epoch: int
    read_only: str


@dataclass(frozen=True, slots=True)
class OpenFailed(DiskEvent):
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Written(DiskEvent):
    """These records are written, or, with a reason, none of them. `intact` says of each page whether it matched its
    checksum; what did not is not on the disk. `full`: the reason is that there is no space."""

    epoch: int
    segment: int
    first: int
    intact: tuple[bool, ...]
    reason: str = ""
    full: bool = False


ReadOutcome: TypeAlias = Literal["ok", "corrupt", "unreadable"]


@dataclass(frozen=True, slots=True)
class PagesRead(DiskEvent):
    """How some pages of a Read went: (place in the order, outcome)."""

    epoch: int
    number: int
    outcomes: tuple[tuple[int, ReadOutcome], ...]


@dataclass(frozen=True, slots=True)
class ReadFinished(DiskEvent):
    """All pages of a Read have been told of. Seconds since it was given, until the first page and until the last."""

    epoch: int
    number: int
    first_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Moved(DiskEvent):
    """These records are copied, or, with a reason, none of them. An outcome that is not "ok" is that of reading the
    original; there is no copy. `full`: the reason is that there is no space."""

    epoch: int
    segment: int
    first: int
    outcomes: tuple[ReadOutcome, ...]
    reason: str = ""
    full: bool = False


@dataclass(frozen=True, slots=True)
class Deleted(DiskEvent):
    epoch: int
    segment: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FolderDeleted(DiskEvent):
    """Its segments are gone, or, with a reason, some of them are still there."""

    epoch: int
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Trouble(DiskEvent):
    """A Finish or an Invalidate failed."""

    epoch: int
    reason: str
