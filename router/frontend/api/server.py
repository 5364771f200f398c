"""The listener of an HTTP API: uvicorn within the router's event loop, with bounds on what it accepts.

Any process that reaches the port may connect, and the loop that serves it also streams all tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from asyncio import sslproto
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from baton.doors import ServerTls
from baton.logs import RateLimitedLog
from baton.unix import NO_DESCRIPTORS
from router.frontend.api.connection import ENDING_SECONDS, KEEP_ALIVE, Connection, Places

log = RateLimitedLog(logging.getLogger(__name__))

HANDSHAKES = 256  # of TLS that are not finished, at a time
HANDSHAKE_SECONDS = 10.0
_TLS_END_SECONDS = 5.0  # in which a client must confirm the end of its TLS
_TLS_BUFFER = 64 * 2**10  # bytes that asyncio takes for each TLS connection; its own 256 KiB would be 1 GiB for 4,096
_ACCEPTED = 16  # connections accepted in one turn of the loop
_PAUSE = 0.5  # seconds without accepting, after the process had no descriptor left
_GRACE = 1  # seconds that clients get to read how their streams ended


class ApiServer:
    """The server. It listens on one address and ends with the router."""

    def __init__(self, app: ASGIApp, max_connections: int, tls: ServerTls | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
        )
        self._config.load()
        self._server = _UvicornServer(self._config)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._places: Places = Places(min(max_connections, descriptors // 2))
        self._tls = tls
        if tls is not None:
            sslproto.SSLProtocol.max_size = _TLS_BUFFER
        self._beginning: dict[asyncio.Task[None], None] = {}  # connections, until TLS is agreed on; the oldest first
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from a socket that listens."""
        self._listener = listener
        self._tasks = [asyncio.create_task(self._accept(listener)), asyncio.create_task(self._server.serve([listener]))]

    def refuse_connections(self) -> None:
        """Stop listening: others that listen at the port get what comes from now on. Connections end with their next
        answer, or soon."""
        with contextlib.suppress(OSError):
            while True:  # until none waits: closing the socket would reset them
                self._take(self._listener.accept()[0])
        # The task that accepts is not cancelled: it may hold a connection already.
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        ending, state = (b"connection", b"close"), self._server.server_state
        self._config.encoded_headers.append(ending)  # of all answers, from uvicorn's next second on
        state.default_headers = [*state.default_headers, ending]
        self._config.timeout_keep_alive = ENDING_SECONDS
        for connection in self._server.server_state.connections:
            assert isinstance(connection, Connection)
            connection.end_soon()

    @property
    def has_connections(self) -> bool:
        return bool(self._beginning or self._server.server_state.connections)

    async def stop(self) -> None:
        """Stop listening, let clients read how their streams ended, and end."""
        if self._tasks:
            accepting, serving = self._tasks
            for task in (accepting, *self._beginning):
                task.cancel()
            await asyncio.gather(accepting, *self._beginning, return_exceptions=True)
            self._server.should_exit = True
            await serving

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(_ACCEPTED):
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        log.warning("no connection is accepted for %.1f s: %s", _PAUSE, error.strerror)
                        await asyncio.sleep(_PAUSE)
                    if listener.fileno() < 0:
                        return
                    continue
                self._take(connection)
            await asyncio.sleep(0)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        begun = asyncio.create_task(self._begin(connection))
        self._beginning[begun] = None
        begun.add_done_callback(lambda task: self._beginning.pop(task, None))
        if len(self._beginning) > HANDSHAKES:
            oldest = next(iter(self._beginning))
            del self._beginning[oldest]
            oldest.cancel()

    async def _begin(self, connection: socket.socket) -> None:
        """Give a connection to a protocol, once TLS is agreed on."""
        more = {}
        if self._tls is not None:
            more = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
            more |= {"ssl_shutdown_timeout": _TLS_END_SECONDS}
        with contextlib.suppress(OSError):  # a handshake that failed, or came too late
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, connection, **more)

    def _connection(self) -> Connection:
        return Connection(self._config, self._server.server_state, self._places)


class _UvicornServer(uvicorn.Server):
    """A server whose process handles its own signals, and accepts its connections itself."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
