"""The router's HTTP port: `/metrics` for Prometheus, `/discovery` to tell it where the others are, `/healthz`.

On loopback it is open. Elsewhere, once clients need API keys, `/metrics` and `/discovery` take an operator's.

Any process that reaches the port may connect, and the loop that serves it also streams the tokens. So connections are
bounded in number and lifetime, each carries one request, and the page of metrics is rendered on a thread, twice a
second at most. The server is that of the HTTP APIs. Over the number of connections, the one that has waited longest for
its client gives way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from baton.errors import PermissionDenied, Unauthenticated
from baton.hosts import bracketed, host_of_header, is_loopback, names_this_machine
from baton.metrics import PAGE_TYPE
from router.frontend.api.connection import Connection
from router.frontend.api.server import ApiServer
from router.frontend.client_sessions import RouterDriver
from router.frontend.identity import Gatekeeper, note_refusal

log = logging.getLogger(__name__)

DEADLINE = 5.0  # seconds from the start of a connection to its end, however it is used
_FOR_ALL = ("/healthz",)


class HttpServer:
    """The server; it reads the relay and changes nothing."""

    def __init__(self, driver: RouterDriver, gate: Gatekeeper) -> None:
        self._driver = driver
        self._gate = gate
        self._open = True  # on loopback
        self._routes: dict[str, Callable[[], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/discovery": self._discovery,
            "/healthz": self._healthz,
        }
        self._server = ApiServer(self, 0, connection=_Connection)  # `places.SPARE` connections at a time
        self._rendering: asyncio.Task[bytes] | None = None

    async def start(self, listener: socket.socket, host: str) -> str:
        """Serve on a socket that listens at `host`; returns "host:port"."""
        self._open = is_loopback(host)
        address = f"{bracketed(host)}:{listener.getsockname()[1]}"
        await self._server.serve(listener)
        return address

    async def stop(self) -> None:
        await self._server.stop()

    async def close(self) -> None:
        """Nothing runs beside the application."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and have its connection end: the bounds on connections then bound requests, too."""
        response = await self._answer(Request(scope))
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, client = request.url.path, request.client.host if request.client else ""
        route = self._routes.get(path)
        if route is None:
            return PlainTextResponse("there are /metrics, /discovery and /healthz\n", 404)
        if request.method not in ("GET", "HEAD"):
            return Response(status_code=405, headers={"Allow": "GET, HEAD"})
        try:
            if self._open and not names_this_machine(host_of_header(request.headers.get("Host", ""))):
                # a web page whose name points to loopback (DNS rebinding) could read the answer
                raise PermissionDenied("Host is no name of this machine; use localhost or 127.0.0.1")
            if not self._open and path not in _FOR_ALL:
                self._gate.identify(dict(request.headers), operator=True)
            return await route()
        except Unauthenticated as error:
            note_refusal(path, client, error)
            return PlainTextResponse(f"{error}\n", 401, {"WWW-Authenticate": "Bearer"})
        except PermissionDenied as error:
            note_refusal(path, client, error)
            return PlainTextResponse(f"{error}\n", 403)
        except Exception:
            log.exception("failed to answer %s", path)
            return PlainTextResponse("failed in the router\n", 500)

    async def page(self) -> bytes:
        """Render the page of metrics on a thread. Calls at one time share one rendering."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(asyncio.to_thread(self._driver.metrics.page))
        return await asyncio.shield(self._rendering)

    async def _metrics(self) -> Response:
        return Response(await self.page(), headers={"Content-Type": PAGE_TYPE})

    async def _discovery(self) -> Response:
        """Every live process's metrics address, as Prometheus' `http_sd_configs` takes it."""
        me, others = self._driver.processes()
        targets = [
            {
                "targets": [view.metrics],
                "labels": {"role": view.peer.role, "node": view.peer.node, "name": view.peer.name},
            }
            for view in (me, *others)
            if view.metrics and view.gone is None
        ]
        return Response(msgspec.json.encode(targets), media_type="application/json")

    async def _healthz(self) -> Response:
        """200 while a request that comes now can be served."""
        if (reason := self._driver.unready) is None:
            return PlainTextResponse("serving\n")
        return PlainTextResponse(f"{reason}\n", 503)


class _Connection(Connection):
    """A connection that ends soon, however it is used."""

    def connection_made(self, transport: Any) -> None:
        self._deadline = asyncio.get_running_loop().call_later(DEADLINE, self.abort)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)
