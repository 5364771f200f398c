"""CPU use of other processes on this machine during a measurement."""

from __future__ import annotations

import contextlib
import time

import psutil


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
