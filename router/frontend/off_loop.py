"""Work that the event loop does not do itself: in helper processes, and on threads. Tenants take turns.

A helper process does work of which neither time nor memory can be bounded on a thread.

    router ──order──▶ helper ──answer──▶ router        each is four bytes of length, and JSON

An answer names its order's number, so no request ever gets the answer of another one. Work that hangs or takes too much
memory costs its own request and a restart of the helper. A helper that was killed or stopped from outside is replaced,
and its order is done again once. `helper_main` is the helper's side.

Threads do work in proportion to a request: its JSON, its messages, its tokens. The tokenizer releases the GIL while it
works, and other work gives it up every few milliseconds, so the event loop goes on. Very long requests have a thread of
their own: they do not delay the others.

A tenant's jobs are served in their order. What waits is bounded for each tenant, and a tenant's backlog delays a job of
another tenant by one job for each place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from baton.config import Repair
from baton.errors import Overloaded, StartupError
from baton.futures import looked_at
from baton.logs import RateLimitedLog
from baton.messages import UNREADABLE
from router.frontend.helper_main import READY

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines

T = TypeVar("T")

_START = 30.0  # seconds in which a new process must have imported its libraries
_BESIDE = 2**16  # bytes of an answer beside its text
_ESCAPED = 12  # bytes that a character takes in JSON at most
_WAITING = 64  # orders of one tenant that wait, ...
_WAITING_BYTES = 64 * 2**20  # ... and their bytes
_SHARE = 0.5  # of an order's time that its process must have computed to be called late
_STILL = 0.01  # of an order's time: a process that has computed less within all of it stands still
_EXTENSIONS = 20  # times the deadline that a busy machine may leave a process without its share

_FROM_OUTSIDE = (-signal.SIGKILL, 255)  # 255: asyncio does not know, since something else has reaped the process
_NOT_STARTED = (StartupError, asyncio.IncompleteReadError, OSError)

_HERE = 4_000  # bytes; the event loop does smaller work itself, in less than 2 ms
_LONG = 512 * 2**10  # bytes, about 100,000 tokens; longer requests have their own lane
_MAX_JOBS = 1_024  # of one tenant in one lane
_MAX_BYTES = 64 * 2**20  # of these together


class HelperLate(Exception):
    """The order took too much of the process's time. The process was ended."""


class HelperDied(Exception):
    """The process ended before it answered, perhaps by its use of memory; or it was ended, since it said what is no
    answer."""


class _Interrupted(Exception):
    """The process was killed, or stood still: nothing is known of the order."""


class HelperAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a helper says: the text that was asked for, or else an error and the label of its kind."""

    number: int
    text: str | None = None
    error: str = ""
    reason: str = ""
    repairs: tuple[Repair, ...] = ()  # what was repaired to get the text
    left_out: tuple[str, ...] = ()  # paths of a schema's keywords that the text lacks


class HelperProcess:
    """A helper that is started when it is first needed, and does one order after another. One event loop may use it."""

    def __init__(self, module: str, *arguments: str, deadline: float, most: int) -> None:
        """`deadline`: seconds for one order. `most`: characters of a text."""
        self._module = module
        self._command = (sys.executable, "-m", module, *arguments)
        self.deadline = deadline
        self._most_bytes = _ESCAPED * most + _BESIDE
        self._decoder = msgspec.json.Decoder(HelperAnswer)
        self._started: asyncio.Task[Process] | None = None
        self._turns = FairTurns("a helper process", 1, _WAITING, _WAITING_BYTES)
        self._number = 0

    async def ask(self, order: bytes, tenant: str = "") -> HelperAnswer:
        """Return the answer to a tenant's order, which is JSON. Raises HelperLate, HelperDied, and Overloaded where too
        much of the tenant waits or the process was interrupted twice."""
        asking = asyncio.create_task(self._in_turn(order, tenant))
        asking.add_done_callback(looked_at)
        return await asyncio.shield(asking)  # if the client goes, its answer must still be read

    async def close(self) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        started.cancel()  # which changes nothing once it is done
        with contextlib.suppress(asyncio.CancelledError, *_NOT_STARTED):
            await _killed(await started)

    async def _in_turn(self, order: bytes, tenant: str) -> HelperAnswer:
        leave = await self._turns.enter(tenant, len(order))
        try:
            for _ in range(2):
                with contextlib.suppress(_Interrupted):
                    return await self._done(order)
        finally:
            leave()
        raise Overloaded(f"{self._module} was interrupted twice; try again")

    async def _done(self, order: bytes) -> HelperAnswer:
        """Have the process do an order. Whenever it gives no answer, another one is started in its place."""
        if self._started is None:
            self._begin()
        started = self._started
        assert started is not None
        try:
            process = await started
        except _NOT_STARTED as error:
            log.warning("%s did not start: %s", self._module, error)
            self._started = None
            raise _Interrupted from None
        try:
            return await self._exchange(process, order)
        except BaseException:
            await _killed(process)
            if self._started is started:  # else it was closed meanwhile
                self._begin()  # the next order finds it ready
            raise

    def _begin(self) -> None:
        self._started = asyncio.create_task(self._start())
        self._started.add_done_callback(looked_at)

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        assert process.stdout is not None
        try:
            if await asyncio.wait_for(process.stdout.readexactly(len(READY)), _START) == READY:
                return process
            raise StartupError(f"{self._module} said something else before it was ready")
        except TimeoutError:
            await _killed(process)
            raise StartupError(f"{self._module} did not start within {_START:g} s") from None
        except BaseException:
            await _killed(process)
            raise

    async def _exchange(self, process: Process, order: bytes) -> HelperAnswer:
        self._number += 1
        reading = asyncio.create_task(self._answer(process, self._number, order))
        reading.add_done_callback(looked_at)
        try:
            before = last = _computed(process)
            for _ in range(_EXTENSIONS):
                done, _ = await asyncio.wait([reading], timeout=self.deadline)
                if done:
                    return reading.result()
                now = _computed(process)
                if now - before >= _SHARE * self.deadline:
                    break
                if now - last < _STILL * self.deadline:
                    raise _Interrupted
                last = now
            raise HelperLate
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.deadline)
            raise (_Interrupted if process.returncode in _FROM_OUTSIDE else HelperDied) from None
        except UNREADABLE:
            raise HelperDied from None
        finally:
            reading.cancel()

    async def _answer(self, process: Process, number: int, order: bytes) -> HelperAnswer:
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None
        message = b'{"number":%d,"order":%b}' % (number, order)
        orders.write(len(message).to_bytes(4, "big") + message)
        await orders.drain()
        size = int.from_bytes(await answers.readexactly(4), "big")
        if size > self._most_bytes:
            raise ValueError(f"an answer of {size} bytes; at most {self._most_bytes} are taken")
        answer = self._decoder.decode(await answers.readexactly(size))
        if answer.number != number or (answer.text is None and not answer.error):
            raise ValueError("the answer to another order, or one with neither a text nor an error")
        return answer


def _computed(process: Process) -> float:
    """Return the seconds of processor time that a process has taken; 0 once it has ended."""
    try:
        return time.clock_gettime((~process.pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names
    except OSError:
        return 0.0


async def _killed(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


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
                    with contextlib.suppress(ValueError):  # a place was to be given to it in the same moment
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
            while backlog.waiting:
                if not (turn := backlog.waiting.popleft()).cancelled():
                    self._backlogs.move_to_end(other)
                    turn.set_result(None)
                    return
        self._free += 1

    def _forget(self, tenant: str, size: int) -> None:
        backlog = self._backlogs[tenant]
        backlog.jobs -= 1
        backlog.size -= size
        if not backlog.jobs:
            del self._backlogs[tenant]


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
