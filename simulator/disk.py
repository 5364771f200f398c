"""One node's disk: its records, with durations in place of the threads of `kvstore.disk.io_threads`.

It outlives its store's process. Reads and writes run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Self

from baton.config import DiskConfig
from kvstore.disk.index import DiskIndex
from kvstore.disk.interface import DiskOrder
from kvstore.disk.orders import (
    Delete,
    Deleted,
    Found,
    FoundRecord,
    FoundSegment,
    Invalidate,
    Move,
    Moved,
    MovePage,
    Open,
    Opened,
    PagesRead,
    Read,
    ReadFinished,
    Scanned,
    Write,
    WritePage,
    Written,
)
from kvstore.disk.record_format import RecordLayout
from kvstore.keys import START
from simulator.clock import Agenda
from simulator.timing import DiskTimes


class SimulatedDisk:
    """The records on a disk, by segment and place, and the completion times of its orders."""

    def __init__(self, config: DiskConfig, times: DiskTimes | None, agenda: Agenda) -> None:
        self._config, self._times, self._agenda = config, times, agenda
        self._segments: dict[int, dict[int, tuple[int, FoundRecord]]] = {}  # with the sequence of each record
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

    def submit(self, order: DiskOrder) -> None:
        assert self._times is not None, "an order for a disk that there is not"
        match order:
            case Open(epoch=epoch, page_bytes=page_bytes):
                self._page_bytes = page_bytes
                self._open(epoch)
            case Write(epoch=epoch, segment=segment, first=first, pages=pages):
                self._keep(segment, first, pages)
                self._later(len(pages), self._times.write, Written(epoch, segment, first, (True,) * len(pages)))
            case Read(epoch=epoch, number=number, pages=pages):
                outcomes = tuple((place, "ok") for place in range(len(pages)))
                began = self._agenda.now
                ended = self._later(len(pages), self._times.read, PagesRead(epoch, number, outcomes))  # type: ignore[arg-type]
                first = ended - began - (len(pages) - 1) * self._page_bytes / self._times.read
                self._later(0, self._times.read, ReadFinished(epoch, number, first, ended - began))
            case Move(epoch=epoch, segment=segment, first=first, pages=pages):
                self._keep(segment, first, pages)
                self._later(2 * len(pages), self._times.write, Moved(epoch, segment, first, ("ok",) * len(pages)))
            case Delete(epoch=epoch, segment=segment):
                self._segments.pop(segment, None)
                self._later(0, self._times.write, Deleted(epoch, segment))
            case Invalidate(segment=segment, record=record):
                self._segments.get(segment, {}).pop(record, None)
            case _:  # Finish: no code waits for its end
                pass

    def _keep(self, segment: int, first: int, pages: Iterable[WritePage | MovePage]) -> None:
        records = self._segments.setdefault(segment, {})
        for record, page in enumerate(pages, first):
            records[record] = (page.sequence, FoundRecord(page.key, page.parent, page.checksum, segment, record))

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
        """Deliver the results of `kvstore.disk.recovery_scan`: each page once, parents first, oldest first."""
        layout = RecordLayout(self._page_bytes, 1)
        found = sorted((each for records in self._segments.values() for each in records.values()), key=itemgetter(0))
        known = {START}
        records: list[FoundRecord] = []
        for _, record in found:
            if record.parent in known and record.key not in known:
                known.add(record.key)
                records.append(record)
        segments = tuple(
            FoundSegment(number, layout.header_bytes + len(held) * layout.record_bytes, max(held, default=-1) + 1)
            for number, held in sorted(self._segments.items())
        )
        after = 1 + max((sequence for sequence, _ in found), default=0)
        for event in (Scanned(epoch, segments, (), after, 0, 0, 0, 0), Found(epoch, tuple(records)), Opened(epoch, "")):
            self._later(0, 1.0, event)
