"""Processes of this machine, by the kernel's count: the cores that they run on, their memory, and others' CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil


def pin(pid: int, cores: Collection[int]) -> None:
    """From now on the process runs on these alone. Raises ProcessLookupError when it has ended."""
    done: set[int] = set()
    while remaining := set(_threads(pid)) - done:  # one that is started meanwhile may still be on the old ones
        for thread in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
        done |= remaining


def pin_tree(pid: int, cores: Collection[int]) -> None:
    """`pin` the process and all that descend from it. Raises ProcessLookupError when it has ended."""
    pin(pid, cores)
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            pin(child.pid, cores)


def cores_of(pid: int) -> set[frozenset[int]]:
    """The sets of cores that its threads may run on: a single one after `pin`."""
    sets: set[frozenset[int]] = set()
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            sets.add(frozenset(os.sched_getaffinity(thread)))
    return sets


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes: the most that it ever had at a time, and what it has now."""

    peak: int  # VmHWM
    anonymous: int  # RssAnon: its own
    files: int  # RssFile: libraries, and what else of files it has mapped
    shared: int  # RssShmem: what it has touched of the arena

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Raises FileNotFoundError when there is no such process."""
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1_024 for words in lines if words[-1:] == ["kB"]}
        return cls(*(sizes[f"{name}:"] for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")))


class Neighbours:
    """Counts the CPU time of all processes except this one and the descendants it had at the start."""

    def __init__(self) -> None:
        me = psutil.Process()
        self._ours = [me, *me.children(recursive=True)]
        self._spent: dict[int, float] = {}  # by process id, seconds as last read: one may end meanwhile
        self._last = self._read()

    def lap(self) -> float:
        """Return the cores that other processes used, on average, since the last lap."""
        (then, others_then), self._last = self._last, self._read()
        now, others = self._last
        return max(0.0, (others - others_then) / (now - then))

    def _read(self) -> tuple[float, float]:
        """The time, and the CPU seconds of others."""
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        for process in self._ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                self._spent[process.pid] = spent.user + spent.system
        return time.perf_counter(), busy - sum(self._spent.values())
