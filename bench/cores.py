"""Which cores processes run on, set from outside: for every thread they have, which those that they start inherit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
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


def of(pid: int) -> set[frozenset[int]]:
    """The sets of cores that its threads may run on: a single one after `pin`."""
    found: set[frozenset[int]] = set()
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            found.add(frozenset(os.sched_getaffinity(thread)))
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
