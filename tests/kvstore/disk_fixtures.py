"""A disk on paper: it carries out the index's orders, as well or as badly as it is told to, and in any order."""

from dataclasses import dataclass, field

from kvstore.disk import orders as disk
from kvstore.disk.file_names import PageFile, footprint


@dataclass
class PaperRead:
    order: disk.Read
    left: list[int]


@dataclass
class PaperDisk:
    """Files as a dictionary by key, the oldest first. `rotten` are those that were spoilt behind the index's back."""

    page_bytes: int
    folders: dict[str, int] = field(default_factory=dict)
    files: dict[bytes, PageFile] = field(default_factory=dict)
    rotten: set[PageFile] = field(default_factory=set)
    orders: list[disk.DiskOrder] = field(default_factory=list)
    reads: list[PaperRead] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return len(self.files) * footprint(self.page_bytes) + sum(self.folders.values())

    def submit(self, order: disk.DiskOrder) -> None:
        if isinstance(order, disk.Read):
            self.reads.append(PaperRead(order, list(range(len(order.pages)))))
        else:
            self.orders.append(order)

    def holds(self, page: PageFile) -> bool:
        return self.files.get(page.key) == page

    def step(
        self, pages: int, fault: str, damaged: frozenset[bytes] = frozenset(), chosen: int = 0
    ) -> list[disk.DiskEvent]:
        """Carry out one of the orders, or some pages of it. With a fault ("full" or "broken") it fails."""
        order = self.orders.pop(chosen % len(self.orders))
        match order:
            case disk.Write(epoch, batch):
                if batch[pages:]:
                    self.orders.append(disk.Write(epoch, batch[pages:]))
                return [self._write(disk.Write(epoch, batch[:pages]), fault, damaged)]
            case disk.Open(epoch=epoch):
                return self._list(epoch, pages)
            case disk.Delete(epoch, files):
                # With a fault the first ones are deleted all the same.
                gone = len(files) // 2 if fault else len(files)
                for page in files[:gone]:
                    assert self.files.pop(page.key) == page, "another file than that of the page has been deleted"
                    self.rotten.discard(page)
                return [disk.Deleted(epoch, files[:gone], files[gone:], fault)]
            case disk.DeleteFolder(epoch=epoch, name=name):
                if not fault:
                    del self.folders[name]
                return [disk.FolderDeleted(epoch, name, fault)]
        raise AssertionError(order)

    def read(self, chosen: int, count: int, failure: disk.ReadOutcome | None) -> list[disk.DiskEvent]:
        """Bring some pages of one of the reads, the last first."""
        read = self.reads[chosen]
        order = read.order
        outcomes: list[tuple[int, disk.ReadOutcome]] = []
        for _ in range(min(count, len(read.left))):
            place = read.left.pop()
            page, _ = order.pages[place]
            there: disk.ReadOutcome = (
                "unreadable" if not self.holds(page) else "corrupt" if page in self.rotten else "ok"
            )
            outcomes.append((place, failure or there))
        events: list[disk.DiskEvent] = [disk.PagesRead(order.epoch, order.number, tuple(outcomes))]
        if not read.left:
            del self.reads[chosen]
            events.append(disk.ReadFinished(order.epoch, order.number, 0.001, 0.002))
        return events

    def kill(self, written: int) -> None:
        """The process dies: of the writes that were under way some pages are there, perhaps without their parents."""
        for order in self.orders:
            if isinstance(order, disk.Write):
                for place, (page, _) in enumerate(order.pages):
                    if written >> place % 3 & 1:
                        self.files[page.key] = page
        self.orders.clear()
        self.reads.clear()

    def _write(self, order: disk.Write, fault: str, damaged: frozenset[bytes]) -> disk.Written:
        outcomes: list[tuple[bytes, disk.WriteOutcome]] = []
        good = len(order.pages) // 2 if fault else len(order.pages)  # before the fault
        for place, (page, _) in enumerate(order.pages):
            assert page.key not in self.files, "written where a file is still there"
            outcome: disk.WriteOutcome = "failed" if place >= good else "damaged" if page.key in damaged else "ok"
            if outcome == "ok":
                self.files[page.key] = page
            outcomes.append((page.key, outcome))
        return disk.Written(order.epoch, tuple(outcomes), fault, fault == "full")

    def _list(self, epoch: int, chunk: int) -> list[disk.DiskEvent]:
        linked: dict[bytes, PageFile] = {}
        before = -1
        while len(linked) > before:
            before = len(linked)
            for page in self.files.values():
                if page.key not in linked and (not page.parent or page.parent in linked):
                    linked[page.key] = page
        orphans = len(self.files) - len(linked)
        self.files = linked
        files = tuple(linked.values())
        folders = tuple(disk.FoundFolder(*folder) for folder in self.folders.items())
        return [
            *(disk.PagesListed(epoch, files[at : at + chunk]) for at in range(0, len(files), chunk)),
            disk.Opened(epoch, folders, orphans=orphans),
        ]
