"""uvicorn within the router's event loop, with the bounds that it lacks.

uvicorn bounds neither the time in which a request's head and body come, nor the size of a head. Any process that
reaches the port may connect, and the loop that serves it also streams all tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.doors import ServerTls
from baton.ports import BACKLOG
from router.frontend.api.app import HttpApi

KEEP_ALIVE = 75  # seconds that a connection may be idle between requests; load generators keep theirs that long
HEAD_SECONDS = 15.0  # in which a new connection's first request, and each request's head, must have come
_HEAD_BYTES = 64 * 2**10
_GRACE = 1  # seconds that clients get to read how their streams ended


class ApiServer:
    """The server. It listens on one address and ends with the router."""

    def __init__(self, api: HttpApi, max_connections: int, tls: ServerTls | None = None) -> None:
        self._api = api
        config = uvicorn.Config(
            api.app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
            limit_concurrency=max_connections,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = tls.context if tls else None
        self._server = _UvicornServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from a socket that listens."""
        self._serving = asyncio.create_task(self._server.serve([listener]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Stop listening, let clients read how their streams ended, and end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        await self._api.close()


class _UvicornServer(uvicorn.Server):
    """A server whose process handles its own signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """One connection, whose heads must come in time and be small."""

    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head += len(data)
            if self._head > _HEAD_BYTES + len(data):  # the last part may hold the whole body
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] = {"abort": self.transport.abort}
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._got_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _got_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
