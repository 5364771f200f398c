"""Threads for work in proportion to a request: its JSON, its messages, its tokens. No other request waits for it.

The tokenizer releases the GIL while it works, and other work gives it up every few milliseconds, so the event loop goes
on. What waits for a thread is bounded for each tenant, and tenants take turns. Very long requests have a thread of
their own: they do not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.futures import looked_at
from router.frontend.off_loop import FairTurns

T = TypeVar("T")

_HERE = 4_000  # bytes; the event loop does smaller work itself, in less than 2 ms
_LONG = 512 * 2**10  # bytes, about 100,000 tokens; longer requests have their own lane
_MAX_JOBS = 1_024  # of one tenant in one lane
_MAX_BYTES = 64 * 2**20  # of these together


class TokenizerLane:
    """One pool of threads, and what waits for it."""

    def __init__(self, name: str, threads: int, max_jobs: int = _MAX_JOBS, max_bytes: int = _MAX_BYTES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"tokenize-{name}")
        self._turns = FairTurns("a thread that reads them", threads, max_jobs, max_bytes)

    async def run(self, size: int, work: Callable[[], T], tenant: str = "") -> T:
        """Do the work on a thread. Raises Overloaded when too much of the tenant waits already."""
        leave = await self._turns.enter(tenant, size)
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(lambda _: leave())
        job.add_done_callback(looked_at)
        # If the client goes, a job that a thread has begun goes on, and counts until it is done.
        return await asyncio.shield(job)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class TokenizerThreads:
    """Where a request is worked on, by its length."""

    def __init__(self) -> None:
        self._short = TokenizerLane("short", threads=2)
        self._long = TokenizerLane("long", threads=1)

    async def run(self, size: int, work: Callable[[], T], tenant: str = "") -> T:
        """Do the work on so many bytes here, or on a thread if it would take long. Raises Overloaded, and what the work
        raises."""
        if size < _HERE:
            return work()
        lane = self._long if size > _LONG else self._short
        return await lane.run(size, work, tenant)

    def close(self) -> None:
        self._short.close()
        self._long.close()
