"""Threads that tokenize long prompts, so that no other request's tokens wait for them.

The tokenizer releases the GIL while it works, so a thread of ours leaves the event loop alone. What waits for a thread
is bounded, in number and in bytes. Very long prompts have a thread of their own: they do not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from baton.errors import Overloaded

T = TypeVar("T")

_HERE = 4_000  # bytes; the event loop tokenizes shorter prompts itself, in less than 2 ms
_LONG = 512 * 2**10  # bytes, about 100,000 tokens; longer prompts have their own lane
_MAX_PROMPTS = 1_024  # of one lane
_MAX_BYTES = 64 * 2**20  # of one lane's prompts together; a lane without any takes every prompt


class TokenizerLane:
    """One pool of threads, and what waits for it."""

    def __init__(self, name: str, threads: int, max_prompts: int = _MAX_PROMPTS, max_bytes: int = _MAX_BYTES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"tokenize-{name}")
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._prompts = 0
        self._bytes = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do the work on a thread. Raises Overloaded when too much waits already."""
        if self._prompts and (self._prompts >= self._max_prompts or self._bytes + size > self._max_bytes):
            raise Overloaded(
                f"{self._prompts} prompts with {self._bytes} bytes wait to be tokenized; "
                "try again later, or send token_ids"
            )
        self._prompts += 1
        self._bytes += size
        job = self._threads.submit(work)
        future = asyncio.wrap_future(job)
        future.add_done_callback(partial(self._done, size))
        try:
            return await asyncio.shield(future)
        finally:
            job.cancel()  # The client has gone. A job that a thread has begun goes on, and counts until it is done.

    def _done(self, size: int, future: asyncio.Future[T]) -> None:
        self._prompts -= 1
        self._bytes -= size
        if not future.cancelled():
            future.exception()  # looked at, so that asyncio does not log it when the client has gone

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class TokenizerThreads:
    """Where a prompt is tokenized, by its length."""

    def __init__(self) -> None:
        self._prompts = TokenizerLane("prompts", threads=2)
        self._long = TokenizerLane("long", threads=1)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do the work here, or on a thread if it would take long. Raises Overloaded, and what the work raises."""
        if size < _HERE:
            return work()
        lane = self._long if size > _LONG else self._prompts
        return await lane.run(size, work)

    def close(self) -> None:
        self._prompts.close()
        self._long.close()
