"""Turns between tenants for the few places where large requests are worked on.

Used by the threads that read and tokenize bodies, and by the helper processes that render templates and compile
grammars. A tenant's jobs are served in their order, and tenants take turns. So a tenant's backlog delays a job of
another tenant by one job for each place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.errors import Overloaded


@dataclass
class _Backlog:
    """What a tenant has here, running or waiting."""

    jobs: int = 0
    size: int = 0  # bytes
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])


class FairTurns:
    """Lets `places` jobs run at a time. One event loop may use it."""

    def __init__(self, name: str, places: int, max_jobs: int, max_bytes: int) -> None:
        """`name`: what the jobs wait for, in errors. `max_jobs` and `max_bytes` bound one tenant's backlog. A tenant
        without any may bring a job of every size."""
        self._name = name
        self._free = places
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._backlogs: OrderedDict[str, _Backlog] = OrderedDict()  # by tenant, the next one first

    async def enter(self, tenant: str, size: int) -> Callable[[], None]:
        """Wait for a place, and return what gives it back: call that once. Raises Overloaded if too much of the tenant
        waits already."""
        backlog = self._backlogs.setdefault(tenant, _Backlog())
        if backlog.jobs and (backlog.jobs >= self._max_jobs or backlog.size + size > self._max_bytes):
            raise Overloaded(f"{backlog.jobs} jobs with {backlog.size} bytes wait for {self._name}; try again later")
        backlog.jobs += 1
        backlog.size += size
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            backlog.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    backlog.waiting.remove(turn)
                    self._forget(tenant, size)
                else:  # the place was given to it in the same moment
                    self._leave(tenant, size)
                raise
        return partial(self._leave, tenant, size)

    def _leave(self, tenant: str, size: int) -> None:
        self._backlogs.move_to_end(tenant)  # it has just had its turn
        self._forget(tenant, size)
        for other, backlog in self._backlogs.items():
            if backlog.waiting:
                self._backlogs.move_to_end(other)
                backlog.waiting.popleft().set_result(None)
                return
        self._free += 1

    def _forget(self, tenant: str, size: int) -> None:
        backlog = self._backlogs[tenant]
        backlog.jobs -= 1
        backlog.size -= size
        if not backlog.jobs:
            del self._backlogs[tenant]
