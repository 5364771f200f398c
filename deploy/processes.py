"""Operating-system processes, identified so that a reused pid is never taken for the original process; their cores."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.config import Config, DecodeConfig, PrefillConfig
from baton.unix import readable

Section = TypeVar("Section", PrefillConfig, DecodeConfig)


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of this machine, identified by its pid and its start time."""

    pid: int
    started: int  # clock ticks since boot, from /proc

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a running process. Raises ProcessLookupError if there is none."""
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(pid, stat.started)

    @classmethod
    def mine(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    def gone(self) -> bool:
        """Whether the process can't run another instruction on any thread. True for a zombie."""
        return self.wait(0.0)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        with self._open() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)

    def wait(self, seconds: float) -> bool:
        """Wait until the process is gone. Return False if it still runs after `seconds`."""
        with self._open() as descriptor:
            return descriptor is None or readable(descriptor, seconds)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int | None]:
        """Yield a pidfd of exactly this process, or None if it has gone and been reaped.

        The pidfd is opened before the start time is compared. It pins the process, so the pid can't be reused in
        between. Linux refuses the number of a thread, which the pid may have become, with EINVAL, of late with ENOENT.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                raise
            yield None
            return
        try:
            stat = _stat(self.pid)
            yield descriptor if stat is not None and stat.started == self.started else None
        finally:
            os.close(descriptor)


def end(processes: Iterable[ProcessIdentity], patience: float, kill_wait: float = 5.0) -> list[ProcessIdentity]:
    """End these processes: SIGTERM, `patience` seconds, then SIGKILL. Return those that still run after that."""
    waiting = list(processes)
    if patience > 0:
        for process in waiting:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # a stopped process would not handle the SIGTERM
        waiting = _still_running(waiting, patience)
    for process in waiting:
        process.signal(signal.SIGKILL)
    return _still_running(waiting, kill_wait)


def session_members(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """Return every process of the session that `leader` opened, whether or not the leader still runs.

    The kernel does not reuse a session's id while a member lives. If no other process has the leader's pid now, every
    process in the session therefore descends from the leader, orphans included.
    """
    occupant = _stat(leader.pid)
    if occupant is not None and occupant.started != leader.started:
        return []
    members: list[ProcessIdentity] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) and stat.session == leader.pid:
            member = ProcessIdentity(int(entry.name), stat.started)
            if stat.started >= leader.started and not member.gone():
                members.append(member)
    return members


def _still_running(processes: list[ProcessIdentity], seconds: float) -> list[ProcessIdentity]:
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
    # The command's name is in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(session=int(fields[3]), started=int(fields[19]))


def share_cores(config: Config, workers: int) -> Config:
    """Return the configuration of one of `workers` on this process's cores. `threads` 0 becomes its share of them.

    If two workers both use every core, they wait for each other's threads within each step. That costs far more than
    running on half of the cores each.
    """
    share = max(1, len(os.sched_getaffinity(0)) // max(1, workers))
    return msgspec.structs.replace(
        config, prefill=_with_threads(config.prefill, share), decode=_with_threads(config.decode, share)
    )


def _with_threads(section: Section, threads: int) -> Section:
    return section if section.threads else msgspec.structs.replace(section, threads=threads)
