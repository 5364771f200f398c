"""Operating-system processes, named so that a reused pid is never mistaken for the process we meant."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.unix import readable


@dataclass(frozen=True)
class Identity:
    """A process of this machine: a pid means one process only together with the moment it started."""

    pid: int
    started: int  # clock ticks since boot, from /proc

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises ProcessLookupError when no such process runs."""
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(pid, stat.started)

    @classmethod
    def mine(cls) -> Identity:
        return cls.of(os.getpid())

    def gone(self) -> bool:
        """True once the process can't run another instruction on any thread. A zombie can't."""
        return self.wait(0.0)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has gone."""
        with self._open() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)

    def wait(self, seconds: float) -> bool:
        """Wait until it is gone; False when it still runs after `seconds`."""
        with self._open() as descriptor:
            return descriptor is None or readable(descriptor, seconds)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int | None]:
        """A descriptor of exactly this process, or none when it has gone and been reaped. The descriptor pins it:
        opened before its start is compared, it can't become another process's in between."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            stat = _stat(self.pid)
            yield descriptor if stat is not None and stat.started == self.started else None
        finally:
            os.close(descriptor)


def end(processes: Iterable[Identity], patience: float, kill_wait: float = 5.0) -> list[Identity]:
    """End these processes: SIGTERM, `patience` seconds, then SIGKILL. Returns what runs even after that."""
    waiting = list(processes)
    if patience > 0:
        for process in waiting:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # a stopped one would not hear of it
        waiting = _still_running(waiting, patience)
    for process in waiting:
        process.signal(signal.SIGKILL)
    return _still_running(waiting, kill_wait)


def session_members(leader: Identity) -> list[Identity]:
    """Every process of the session that `leader` opened, whether or not the leader still runs.

    The kernel does not give a session's number away while a member lives; so unless another process now carries the
    leader's pid, everything in the session descends from it, orphans included."""
    occupant = _stat(leader.pid)
    if occupant is not None and occupant.started != leader.started:
        return []
    members: list[Identity] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) and stat.session == leader.pid:
            member = Identity(int(entry.name), stat.started)
            if stat.started >= leader.started and not member.gone():
                members.append(member)
    return members


def _still_running(processes: list[Identity], seconds: float) -> list[Identity]:
    deadline = time.monotonic() + seconds
    return [process for process in processes if not process.wait(deadline - time.monotonic())]


@dataclass(frozen=True)
class _Stat:
    session: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(session=int(fields[3]), started=int(fields[19]))
