"""`baton logs`: the log lines of a cluster's processes on this node, in order of time."""

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, BinaryIO, Self

import typer

from baton.errors import InvalidRequest
from deploy.commands.terminal import Name, command, out_line, state_folder
from deploy.control_plane import state_file

_POLL = 0.2
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)[.,](\d{3})(?: \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) )?")


class Level(IntEnum):
    """The levels of log records, lowest first."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


@command(
    "baton logs", "baton logs decode-0 --follow", "baton logs --level WARNING --lines 20", "baton logs -r 5f1c2d9a"
)
def logs(
    processes: Annotated[list[str] | None, typer.Argument(help="Of these processes; by default of all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new records until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with the last N records.")] = 100,
    request: Annotated[str, typer.Option("--request", "-r", help="Records with this text, such as an id.")] = "",
    level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING, ERROR or CRITICAL: the lowest shown.")] = "DEBUG",
    name: Name = "baton",
) -> None:
    """Show the logs of the cluster's processes on this node, in order of time.

    Logs stay after `baton down`. The processes of other nodes log there."""
    if level.upper() not in Level.__members__:
        raise InvalidRequest(f"{level!r} is no level; there are {', '.join(Level.__members__)}")
    matching = Filter(request, Level[level.upper()])
    with ExitStack() as opened:
        files = [opened.enter_context(LogFile(path)) for path in _paths(_folder(name), processes or ())]
        for record in last(files, lines, matching):
            out_line(record.text)
        while follow:
            time.sleep(_POLL)
            for record in heapq.merge(*(file.new() for file in files)):
                if matching.matches(record):
                    out_line(record.text)


@dataclass(frozen=True, order=True)
class Record:
    """One log record with its traceback. Ordered by time."""

    time: str  # in ISO form; of a line without a time, that of the record before it
    text: str
    level: Level = Level.INFO


@dataclass(frozen=True)
class Filter:
    """Which records are shown: those with `text`, of `level` or above."""

    text: str = ""
    level: Level = Level.DEBUG

    def matches(self, record: Record) -> bool:
        return record.level >= self.level and self.text in record.text


class LogFile:
    """One log that grows and is rotated. A record's traceback belongs to it.

    Owns a descriptor of the file that it reads, so it also reads what is written there while the file is renamed. Of a
    log that is rotated twice between two calls it misses a file. A process writes far less than that in 0.2 s.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line whose end is not written yet
        self._time = ""  # of the last record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def new(self) -> list[Record]:
        """Return the records since the last call; at the first call those of the newest file; empty without a file."""
        data = b""
        try:
            newest = self._path.open("rb")
        except FileNotFoundError:  # just renamed, or never written
            newest = None
        if self._file is None or newest is None or _inode(newest) == _inode(self._file):
            if self._file is None:
                self._file = newest
            elif newest is not None:
                newest.close()
        else:
            # The path names another file, so no writer has the former one any more: what it holds now is all.
            data = self._read()
            self._file.close()
            self._file = newest
        data += self._read()
        *lines, self._rest = data.split(b"\n")
        return self._records(line.decode(errors="replace") for line in lines)

    def _read(self) -> bytes:
        """Return what the file has beyond the last call, with the rest of a line that was held back."""
        if self._file is None:
            return b""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # it was emptied
            self._file.seek(0)
            self._rest = b""
        read, self._rest = self._rest + self._file.read(), b""
        return read

    def _records(self, lines: Iterable[str]) -> list[Record]:
        records: list[Record] = []
        for line in lines:
            if match := _RECORD.match(line):
                date, clock, fraction, level = match.groups()
                self._time = f"{date}T{clock}.{fraction}"
                records.append(Record(self._time, line, Level[level] if level else Level.INFO))
            elif records:
                records[-1] = replace(records[-1], text=f"{records[-1].text}\n{line}")
            else:
                records.append(Record(self._time, line))
        return records


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino


def last(files: Sequence[LogFile], most: int, matching: Filter) -> list[Record]:
    """Return the last `most` records of all files in order of time."""
    records = [deque(filter(matching.matches, file.new()), maxlen=most) for file in files]
    return list(heapq.merge(*records))[-most:] if most else []


def _folder(name: str) -> Path:
    folder = state_folder(name)
    state = state_file.read_state(folder)
    return Path(state.log_dir) if state is not None else folder / "logs"


def _paths(folder: Path, processes: Sequence[str]) -> list[Path]:
    """Return the log files of these processes, of all if none is named. Raises InvalidRequest."""
    there = sorted(folder.glob("*.log"))
    if not there:
        raise InvalidRequest(f"there are no logs in {folder}; `baton up` starts a cluster")
    names = [path.stem for path in there]
    if strange := sorted(set(processes) - set(names)):
        raise InvalidRequest(f"no log of {', '.join(strange)} in {folder}; there are {', '.join(names)}")
    return [path for path in there if not processes or path.stem in processes]
