"""One node's disk: its pages, with durations in place of the threads of `kvstore.disk.io_threads`.

It outlives its store's process. Reads and writes run one after the other.
"""

from collections.abc import Callable
from typing import Any, Self

from baton.config import DiskConfig
from kvstore.disk import orders as disk
from kvstore.disk.file_names import PageFile
from kvstore.disk.index import DiskIndex
from kvstore.keys import START
from simulator.clock import Agenda
from simulator.timing import DiskTimes


class SimulatedDisk:
    """The pages on a disk, by key, the oldest first, and the completion times of its orders."""

    def __init__(self, config: DiskConfig, times: DiskTimes | None, agenda: Agenda) -> None:
        self._config, self._times, self._agenda = config, times, agenda
        self._files: dict[bytes, PageFile] = {}
        self._busy = 0.0  # time until which the disk is busy
        self._page_bytes = 0
        self._owners = 0
        self.index = DiskIndex(config)
        self._tell: Callable[[Any], object] = id

    def opened(self, tell: Callable[[Any], object]) -> Self:
        """Hand the disk to a new store process, which gets the threads' events through `tell`."""
        self.index = DiskIndex(self._config)
        self._tell = tell
        self._owners += 1
        return self

    def submit(self, order: disk.DiskOrder) -> None:
        assert self._times is not None, "an order for a disk that there is not"
        match order:
            case disk.Open(epoch=epoch, page_bytes=page_bytes):
                self._page_bytes = page_bytes
                self._open(epoch)
            case disk.Write(epoch=epoch, pages=pages):
                self._files |= {page.key: page for page, _ in pages}
                outcomes = tuple((page.key, "ok") for page, _ in pages)
                self._later(len(pages), self._times.write, disk.Written(epoch, outcomes))  # type: ignore[arg-type]
            case disk.Read(epoch=epoch, number=number, pages=pages):
                outcomes = tuple((place, "ok") for place in range(len(pages)))
                began = self._agenda.now
                ended = self._later(len(pages), self._times.read, disk.PagesRead(epoch, number, outcomes))  # type: ignore[arg-type]
                first = ended - began - (len(pages) - 1) * self._page_bytes / self._times.read
                self._later(0, self._times.read, disk.ReadFinished(epoch, number, first, ended - began))
            case disk.Delete(epoch=epoch, pages=files):
                for page in files:
                    self._files.pop(page.key, None)
                self._later(0, self._times.write, disk.Deleted(epoch, files))
            case _:
                raise AssertionError(f"{type(order).__name__} is no order for a simulated disk")

    def _later(self, pages: int, rate: float, event: Any) -> float:
        """Deliver `event` once the disk has moved `pages` pages after all earlier orders. Return that time."""
        assert self._times is not None
        begins = max(self._agenda.now + self._times.latency, self._busy)
        self._busy = begins + pages * self._page_bytes / rate
        self._agenda.at(self._busy, self._say, self._owners, event)
        return self._busy

    def _say(self, owner: int, event: Any) -> None:
        if owner == self._owners:
            self._tell(event)

    def _open(self, epoch: int) -> None:
        """Deliver the results of `kvstore.disk.listing`: parents first, oldest first."""
        linked: dict[bytes, PageFile] = {}
        for page in self._files.values():
            if page.parent == START or page.parent in linked:
                linked[page.key] = page
        self._files = linked
        for event in (disk.PagesListed(epoch, tuple(linked.values())), disk.Opened(epoch)):
            self._later(0, 1.0, event)
