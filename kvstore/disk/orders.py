"""What the disk's index asks the disk's threads to do, what it hears back, and what the store's state hears of both.

    state ──DiskPage──▶ index ──DiskOrder──▶ threads (`kvstore.disk.io_threads`) ──DiskEvent──▶ index ──▶ DiskResult

A slot that an order names belongs to that order until its event has come. The disk tier says when it is done with the
slot's bytes, and the state never reuses the slot before. No order waits for space: a page that finds no room is
dropped.

Orders are carried out in any order and side by side. So the index never has two orders on their way that write or
delete the same page. Each order is answered, however it ends. A reason that is not empty says why it failed. `epoch`
names one opening of one namespace, and events of an earlier epoch are dropped.
"""

# pyright: strict

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kvstore.disk.file_names import PageFile


class DiskOrder(Struct, frozen=True):
    """Base of what the index asks the disk's threads to do."""

    epoch: int


class DiskEvent(Struct, frozen=True):
    """Base of what the disk's threads tell the index."""

    epoch: int


# --- orders -----------------------------------------------------------------------------------------------------------


class Open(DiskOrder, frozen=True):
    """Lock the directory if that is not done, and list its namespace's folder: PagesListed …, Opened; or OpenFailed."""

    namespace: bytes
    page_bytes: int
    kv_heads: int
    spares: int  # files of evicted pages that may lie there for pages to come


class SlotPage(NamedTuple):
    """A page of the disk, and the slot of the arena that its bytes come from or go to."""

    page: PageFile
    slot: int


class Write(DiskOrder, frozen=True):
    """Write these pages. Answered by one Written or several."""

    pages: tuple[SlotPage, ...]


class Read(DiskOrder, frozen=True):
    """Bring these pages into the arena: PagesRead …, then ReadFinished."""

    number: int
    pages: tuple[SlotPage, ...]


class Delete(DiskOrder, frozen=True):
    """Delete the files of these pages. One that is not there counts as deleted."""

    pages: tuple[PageFile, ...]


class Evict(Delete, frozen=True):
    """Delete these files, which are not being read, or keep them as spares: later pages are written over them."""


class DeleteFolder(DiskOrder, frozen=True):
    """Delete the pages of another namespace."""

    name: str


# --- events -----------------------------------------------------------------------------------------------------------


class PagesListed(DiskEvent, frozen=True):
    """Some of the pages that lie there, each once, parents before children, otherwise oldest first."""

    pages: tuple[PageFile, ...]


class FoundFolder(NamedTuple):
    name: str
    size: int  # bytes


class Opened(DiskEvent, frozen=True):
    """All pages have been found. Folders are those of other namespaces, oldest first. Useless files were deleted and
    are counted; `stray_bytes` is what could not be. `read_only` says why nothing can be written."""

    folders: tuple[FoundFolder, ...] = ()
    stray_bytes: int = 0
    torn: int = 0
    corrupt: int = 0
    orphans: int = 0
    duplicates: int = 0
    read_only: str = ""


class OpenFailed(DiskEvent, frozen=True):
    reason: str


WriteOutcome: TypeAlias = Literal["ok", "damaged", "failed"]


class Written(DiskEvent, frozen=True):
    """How some pages of a Write went. A page is "damaged" if it did not match its checksum in the arena. `reason` says
    why others failed; `full`: there is no space. Only pages that went well are on the disk."""

    outcomes: tuple[tuple[bytes, WriteOutcome], ...]  # by key
    reason: str = ""
    full: bool = False


ReadOutcome: TypeAlias = Literal["ok", "corrupt", "unreadable", "busy"]


class PagesRead(DiskEvent, frozen=True):
    """How some pages of a Read went: (place in the order, outcome). A page is "busy" if the process had no descriptor
    or memory left for it: later it may be read."""

    number: int
    outcomes: tuple[tuple[int, ReadOutcome], ...]


class ReadFinished(DiskEvent, frozen=True):
    """All pages of a Read have been told of. Seconds since it was begun, until the first page and until the last."""

    number: int
    first_seconds: float
    seconds: float


class Deleted(DiskEvent, frozen=True):
    """A Delete has ended. Those pages that could not be deleted, for this reason, are still there."""

    deleted: tuple[PageFile, ...]
    left: tuple[PageFile, ...] = ()
    reason: str = ""


class FolderDeleted(DiskEvent, frozen=True):
    """Its pages are gone, or, with a reason, some of them are still there."""

    name: str
    reason: str = ""


# --- for the store's state -------------------------------------------------------------------------------------------


class DiskPage(Struct, frozen=True):
    """A sealed page on its way to disk: where it stands in its chain, its slot, and the checksum it was sealed with."""

    key: bytes
    parent: bytes
    slot: int
    checksum: int


class WriteEnded(Struct, frozen=True):
    """The disk tier needs the page's slot no longer. `intact` is False when its bytes did not match its checksum: the
    arena holds rubbish. Whether it is on the disk now is told by KV events only."""

    key: bytes
    slot: int
    intact: bool = True


class ReadEnded(Struct, frozen=True):
    """The page is in its slot, or (`ok` False) what is there is rubbish: it was unreadable or did not match its
    checksum, and is on the disk no more."""

    key: bytes
    slot: int
    checksum: int
    ok: bool


DiskOutcome: TypeAlias = WriteEnded | ReadEnded


class DiskResult(Struct, frozen=True):
    """What a call of the index leads to: orders for the threads, in order, and what has ended for the caller."""

    orders: Sequence[DiskOrder] = ()
    ended: Sequence[DiskOutcome] = ()
