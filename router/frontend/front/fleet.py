"""The router's side: it listens, starts the front processes on that socket, and starts those anew that end.

    client ──HTTP──▶ front ──baton.v1, Unix socket──▶ router

All fronts accept from one listening socket. A front that dies ends its own clients' streams and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys

import msgspec

from baton.config import Config, dump
from baton.errors import StartupError

log = logging.getLogger(__name__)

_START = 60.0  # seconds in which a front must be ready
_AGAIN = 0.5  # seconds before one that has ended is started again
_END = 5.0  # seconds in which a front must end: its clients get one to read how their streams ended


class FrontOrder(msgspec.Struct, frozen=True):
    """What a front is told on its stdin."""

    name: str
    config: str  # YAML
    listener: int  # descriptor of the listening socket
    router: str  # gRPC target of the router's link for fronts
    pages: str  # host:port of the router's metrics and health
    pages_key: str | None  # an operator's, to show there
    metrics: str  # host at which the front serves its own metrics, at a free port


class FrontReady(msgspec.Struct, frozen=True):
    """What a front says on its stdout once it serves."""

    metrics: str  # host:port


class FrontProcesses:
    """The fronts of one router."""

    def __init__(self, config: Config, router: str, link: str, pages: str, pages_key: str | None) -> None:
        """`router`: its name. `link`: the gRPC target that fronts ask. `pages`: host:port of its HTTP port, and
        `pages_key` the operator's key that is shown there, if there is one."""
        self._config, self._router, self._link, self._pages, self._pages_key = config, router, link, pages, pages_key
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._metrics: dict[int, str] = {}  # host:port of those that are ready
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._listener: socket.socket | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in self._processes.values()]

    @property
    def metrics(self) -> list[tuple[str, str]]:
        """Name and host:port of the metrics of each front that serves."""
        return [(self._name(number), address) for number, address in sorted(self._metrics.items())]

    async def start(self, listener: socket.socket) -> None:
        """Start all of them on that socket, and return once they are ready. Raises StartupError."""
        self._listener = listener
        count = self._config.api.processes
        await asyncio.gather(*(self._begin(number) for number in range(count)))
        self._keepers = [asyncio.create_task(self._keep(number)) for number in range(count)]

    async def stop(self) -> None:
        """End all of them."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*map(_end, self._processes.values()))

    async def _begin(self, number: int) -> None:
        """Start one, and wait until it is ready. Raises StartupError."""
        assert self._listener is not None
        descriptor = self._listener.fileno()
        name = self._name(number)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.frontend.front", pass_fds=(descriptor,),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes[number] = process
        assert process.stdin is not None
        assert process.stdout is not None
        host = self._config.router.host
        order = FrontOrder(name, dump(self._config), descriptor, self._link, self._pages, self._pages_key, host)
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        try:
            said = await asyncio.wait_for(process.stdout.readline(), _START)
        except TimeoutError:
            said = b""
        try:
            self._metrics[number] = msgspec.json.decode(said, type=FrontReady).metrics
        except msgspec.MsgspecError:
            await _end(process)
            raise StartupError(f"the front {name} did not start; its log says why") from None

    def _name(self, number: int) -> str:
        return f"{self._router}-front-{number}"

    async def _keep(self, number: int) -> None:
        """Start a front again whenever it ends."""
        while not self._stopping:
            process = self._processes[number]
            code = await process.wait()
            self._metrics.pop(number, None)
            log.warning("front %d, pid %d, has ended (%d); another one is started", number, process.pid, code)
            await asyncio.sleep(_AGAIN)
            try:
                await self._begin(number)
            except (StartupError, OSError) as error:  # such as no descriptor left: it is tried again
                log.warning("front %d can't be started now: %s", number, error)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process that may have ended."""
    for number, patience in ((signal.SIGTERM, _END), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
            return
