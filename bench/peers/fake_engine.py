"""An engine that computes nothing: it decides which streams get a token, and when. Every front stands before this one.

Only the standard library: this file is read by the Python of each peer's own environment, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from threading import Thread
from typing import Generic, NamedTuple, TextIO, TypeVar

Stream = TypeVar("Stream", bound=Hashable)

_UNREAD = 0.000_5  # seconds until readers are looked at again, of which none has read


class NextToken(NamedTuple, Generic[Stream]):
    """The next token of a stream. `last`: the stream ends with it."""

    stream: Stream
    token: int
    last: bool


class FakeEngine(Generic[Stream]):
    """Streams, and how many tokens each still gets. One task calls `step` in a loop.

    Without an interval there is a step in every turn of the event loop. It gives a token to each stream whose reader
    has taken the one before, so each token is sent by itself, as fast as the front can.

    With an interval a step comes every so many seconds and gives a token to all streams, whether or not they are read,
    as an engine does. A new stream gets its first token at once.
    """

    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._left: dict[Stream, int] = {}
        self._new: list[Stream] = []
        self._timer: _Timer | None = None
        self._due = False
        self._news = asyncio.Event()  # a new stream has come, or a step is due

    def pace(self, interval: float | None) -> None:
        """Have a step come every so many seconds, or in every turn of the loop. Call it on the event loop."""
        if self._timer is not None:
            self._timer.ended = True
        self._timer = None
        if interval is not None:
            self._timer = _Timer(interval, asyncio.get_running_loop(), self._tick)
            self._timer.start()

    def add(self, stream: Stream, count: int) -> None:
        self._left[stream] = count
        self._new.append(stream)
        self._news.set()

    def drop(self, stream: Stream) -> None:
        """Give this stream nothing more. It may have ended."""
        self._left.pop(stream, None)

    async def step(self, unread: Callable[[Stream], int]) -> list[NextToken[Stream]]:
        """Return the tokens of the next step, at least one. `unread`: how many tokens wait for the stream's reader."""
        ready = list(self._left)
        while True:
            while not self._left:
                self._due = False
                self._new.clear()
                self._news.clear()
                await self._news.wait()
            if self._timer is None:
                await asyncio.sleep(0 if ready else _UNREAD)
                self._new.clear()
                ready = [stream for stream in self._left if not unread(stream)]
            else:
                ready = await self._next()
            if ready:
                return [self._give(stream) for stream in ready]

    async def _next(self) -> list[Stream]:
        """Return the new streams as soon as there are any, or all of them once a step is due."""
        while not self._new and not self._due:
            self._news.clear()
            await self._news.wait()
        if self._new:
            new, self._new = self._new, []
            return [stream for stream in new if stream in self._left]
        self._due = False
        return list(self._left)

    def _tick(self) -> None:
        self._due = True
        self._news.set()

    def _give(self, stream: Stream) -> NextToken[Stream]:
        left = self._left[stream] - 1
        if left:
            self._left[stream] = left
        else:
            del self._left[stream]
        return NextToken(stream, self._words[left % len(self._words)], last=not left)


class _Timer(Thread):
    """Calls a function on an event loop every so many seconds. The loop's own timers are up to a millisecond late, and
    those of asyncio and uvloop differ."""

    def __init__(self, interval: float, loop: asyncio.AbstractEventLoop, tick: Callable[[], None]) -> None:
        super().__init__(name="step timer", daemon=True)
        self.ended = False
        self._interval, self._loop, self._tick_of_loop = interval, loop, tick

    def run(self) -> None:
        due = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while not self.ended:
                due = max(due + self._interval, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))
                self._loop.call_soon_threadsafe(self._tick_of_loop)


async def follow(engine: FakeEngine[Stream], address: str, answers: TextIO, pid: int | None = None) -> None:
    """Say where the front is, and pace the engine as told, until stdin is closed. `pid`: of the front's own process.

    A line `{"interval": seconds or null}` is answered by `{}`.
    """
    print(json.dumps({"address": address, "pid": pid or os.getpid()}), file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        engine.pace(json.loads(line)["interval"])
        print("{}", file=answers, flush=True)
