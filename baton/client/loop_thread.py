"""One event loop on a thread of its own, for all blocking clients of a process, as long as there is one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from baton.errors import ConfigError

T = TypeVar("T")
_PATIENCE = 5.0  # seconds that a loop gets to end


class LoopThread:
    """Runs coroutines for other threads. `acquire` gives the process's one, `release` gives it back."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[LoopThread | None] = None

    def __init__(self) -> None:
        self._users = 0
        self._gate = threading.Lock()  # nothing is scheduled once the loop is told to stop: it would never run
        self._ended = False
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="baton-client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """Return the running loop, or start one."""
        with cls._lock:
            if cls._shared is None or cls._shared._process != os.getpid():
                cls._shared = LoopThread()
            cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """Give the loop back. The last user's release ends it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            type(self)._shared = None
        self._end()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. An interrupt of the waiting thread cancels it."""
        with self._gate:
            if self._ended or self._process != os.getpid():
                coroutine.close()
                forked = "" if self._ended else ", since this process was forked from its own"
                raise ConfigError(f"the client is closed{forked}; make another one")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, work: Callable[[], object]) -> None:
        """Have the loop do something soon; nothing if it has ended."""
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # it has ended since; a lock could wait for this very thread
                self._loop.call_soon_threadsafe(work)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        with self._gate:
            if self._ended:
                return
            self._ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)


@atexit.register
def _end_forgotten() -> None:
    """End the loop of clients that were never closed, before the interpreter takes gRPC apart under it."""
    if (left := LoopThread._shared) is not None:
        LoopThread._shared = None
        left._end()
