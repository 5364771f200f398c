"""What the disk's index asks the disk's threads to do, and what it hears back: `kvstore.disk.index` with
`kvstore.disk.io_threads`.

Orders are carried out in any order and side by side. So the index never has two orders on their way that write or
delete the same page. Each order is answered, however it ends. A reason that is not empty says why it failed. `epoch`
names one opening of one namespace, and events of an earlier epoch are dropped.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kvstore.disk.file_names import PageFile
from kvstore.disk.interface import DiskEvent, DiskOrder

# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open(DiskOrder):
    """Lock the directory if that is not done, and list its namespace's folder: PagesListed …, Opened; or OpenFailed."""

    epoch: int
    namespace: bytes
    page_bytes: int
    kv_heads: int


class SlotPage(NamedTuple):
    """A page of the disk, and the slot of the arena that its bytes come from or go to."""

    page: PageFile
    slot: int


@dataclass(frozen=True, slots=True)
class Write(DiskOrder):
    """Write these pages. Answered by one Written or several."""

    epoch: int
    pages: tuple[SlotPage, ...]


@dataclass(frozen=True, slots=True)
class Read(DiskOrder):
    """Bring these pages into the arena: PagesRead …, then ReadFinished."""

    epoch: int
    number: int
    pages: tuple[SlotPage, ...]


@dataclass(frozen=True, slots=True)
class Delete(DiskOrder):
    """Delete the files of these pages. One that is not there counts as deleted."""

    epoch: int
    pages: tuple[PageFile, ...]


@dataclass(frozen=True, slots=True)
class DeleteFolder(DiskOrder):
    """Delete the pages of another namespace."""

    epoch: int
    name: str


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PagesListed(DiskEvent):
    """Some of the pages that lie there, each once, parents before children, otherwise oldest first."""

    epoch: int
    pages: tuple[PageFile, ...]


class FoundFolder(NamedTuple):
    name: str
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Opened(DiskEvent):
    """All pages have been found. Folders are those of other namespaces, oldest first. Useless files were deleted and
    are counted; `stray_bytes` is what could not be. `read_only` says why nothing can be written."""

    epoch: int
    folders: tuple[FoundFolder, ...] = ()
    stray_bytes: int = 0
    torn: int = 0
    corrupt: int = 0
    orphans: int = 0
    duplicates: int = 0
    read_only: str = ""


@dataclass(frozen=True, slots=True)
class OpenFailed(DiskEvent):
    epoch: int
    reason: str


WriteOutcome: TypeAlias = Literal["ok", "damaged", "failed"]


@dataclass(frozen=True, slots=True)
class Written(DiskEvent):
    """How some pages of a Write went. A page is "damaged" if it did not match its checksum in the arena. `reason` says
    why others failed; `full`: there is no space. Only pages that went well are on the disk."""

    epoch: int
    outcomes: tuple[tuple[bytes, WriteOutcome], ...]  # by key
    reason: str = ""
    full: bool = False


ReadOutcome: TypeAlias = Literal["ok", "corrupt", "unreadable", "busy"]


@dataclass(frozen=True, slots=True)
class PagesRead(DiskEvent):
    """How some pages of a Read went: (place in the order, outcome). A page is "busy" if the process had no descriptor
    or memory left for it: later it may be read."""

    epoch: int
    number: int
    outcomes: tuple[tuple[int, ReadOutcome], ...]


@dataclass(frozen=True, slots=True)
class ReadFinished(DiskEvent):
    """All pages of a Read have been told of. Seconds since it was begun, until the first page and until the last."""

    epoch: int
    number: int
    first_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Deleted(DiskEvent):
    """A Delete has ended. Those pages that could not be deleted, for this reason, are still there."""

    epoch: int
    deleted: tuple[PageFile, ...]
    left: tuple[PageFile, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FolderDeleted(DiskEvent):
    """Its pages are gone, or, with a reason, some of them are still there."""

    epoch: int
    name: str
    reason: str = ""
