"""The router's HTTP port: `/metrics` for Prometheus, `/discovery` to tell it where the others are, `/healthz`.

On loopback it is open. Elsewhere, once clients need API keys, `/metrics` and `/discovery` take an operator's.

Any process that reaches the port may connect, and the loop that serves it also streams the tokens. So connections are
bounded in number and lifetime, each carries one request, and the page of metrics is rendered on a thread, twice a
second at most. Over their number the oldest gives way, first of those that have sent no request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from baton.errors import PermissionDenied, Unauthenticated
from baton.hosts import bracketed, host_of_header, is_loopback, names_this_machine
from baton.metrics import PAGE_TYPE
from router.frontend.identity import Gatekeeper, note_refusal
from router.frontend.router_driver import RouterDriver

log = logging.getLogger(__name__)

_ACCESS_LOG = None  # a line per scrape has no reader
MAX_CONNECTIONS = 64  # at a time
DEADLINE = 5.0  # seconds from the start of a connection to its end, however it is used
_FOR_ALL = ("/healthz",)
_BACKLOG = 16  # connections that the kernel keeps, and that asyncio accepts in one turn of the loop
_MAX_LINE = 2_048  # bytes of the request line, and of a header


# aiohttp writes a traceback with what was sent for every request that is none. Errors of our own are logged here.
_OF_STRANGERS = logging.getLogger(f"{__name__}.strangers")
_OF_STRANGERS.setLevel(logging.CRITICAL + 1)  # a library that configures logging may enable what is disabled


class HttpServer:
    """The server; it reads the router and changes nothing."""

    def __init__(self, drivers: Sequence[RouterDriver], gate: Gatekeeper) -> None:
        """`drivers`: one for each model, the first model's first."""
        self._drivers = drivers
        self._gate = gate
        self._open = True  # on loopback
        self._routes: dict[str, Callable[[], Awaitable[web.Response]]] = {
            "/metrics": self._metrics,
            "/discovery": self._discovery,
            "/healthz": self._healthz,
        }
        self._server: _HttpServer | None = None
        self._runner: web.ServerRunner | None = None
        self._rendering: asyncio.Task[bytes] | None = None

    async def start(self, listener: socket.socket, host: str) -> str:
        """Serve on a socket that listens at `host`; returns "host:port"."""
        self._server = _HttpServer(
            self._answer,
            logger=_OF_STRANGERS,
            access_log=_ACCESS_LOG,
            keepalive_timeout=0.0,
            lingering_time=0.0,
            max_line_size=_MAX_LINE,
            max_field_size=_MAX_LINE,
        )
        self._open = is_loopback(host)
        runner = self._runner = web.ServerRunner(self._server, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        return f"{bracketed(host)}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        assert self._server is not None
        self._server.answers(request)
        route = self._routes.get(request.path)
        if route is None:
            response = web.Response(status=404, text="there are /metrics, /discovery and /healthz\n")
        elif request.method not in ("GET", "HEAD"):
            response = web.Response(status=405, headers={"Allow": "GET, HEAD"})
        else:
            try:
                if self._open and not names_this_machine(host_of_header(request.headers.get("Host", ""))):
                    # a web page whose name points to loopback (DNS rebinding) could read the answer
                    raise PermissionDenied("Host is no name of this machine; use localhost or 127.0.0.1")
                if not self._open and request.path not in _FOR_ALL:
                    self._gate.identify({name.lower(): text for name, text in request.headers.items()}, operator=True)
                response = await route()
            except Unauthenticated as error:
                note_refusal(request.path, request.remote or "", error)
                response = web.Response(status=401, text=f"{error}\n", headers={"WWW-Authenticate": "Bearer"})
            except PermissionDenied as error:
                note_refusal(request.path, request.remote or "", error)
                response = web.Response(status=403, text=f"{error}\n")
            except Exception:
                log.exception("failed to answer %s", request.path)
                response = web.Response(status=500, text="failed in the router\n")
        response.force_close()  # one request for each connection: the limits then bound requests, too
        return response

    async def page(self) -> bytes:
        """Render the page of metrics on a thread. Calls at one time share one rendering."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(asyncio.to_thread(self._drivers[0].metrics.page))
        return await asyncio.shield(self._rendering)

    async def _metrics(self) -> web.Response:
        return web.Response(body=await self.page(), headers={"Content-Type": PAGE_TYPE})

    async def _discovery(self) -> web.Response:
        """Every live process's metrics address, as Prometheus' `http_sd_configs` takes it."""
        me, others = self._drivers[0].processes()
        others = [*others, *(view for each in self._drivers[1:] for view in each.processes()[1])]
        targets = [
            {
                "targets": [view.metrics],
                "labels": {"role": view.peer.role, "node": view.peer.node, "name": view.peer.name},
            }
            for view in (me, *others)
            if view.metrics and view.gone is None
        ]
        return web.json_response(targets)

    async def _healthz(self) -> web.Response:
        """200 while a request that comes now can be served."""
        reasons = [each.unready for each in self._drivers]
        if None in reasons:
            return web.Response(text="serving\n")
        return web.Response(status=503, text=f"{reasons[0]}\n")


class _HttpServer(web.Server):
    """aiohttp's server, with limits that it does not have: how many connections there are, and for how long each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # the oldest first
        self._answered: set[object] = set()  # those whose request has come

    def answers(self, request: web.BaseRequest) -> None:
        """Note that a connection has sent its request. Those that have not give way first."""
        self._answered.add(request.protocol)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        if len(self._open) >= MAX_CONNECTIONS:
            idle = (other for other in self._open if other not in self._answered)
            oldest, deadline = self._open.pop(next(idle, next(iter(self._open))))
            deadline.cancel()
            loop.call_soon(oldest.abort)  # not at once: aiohttp's task for it must have begun
        self._open[handler] = transport, loop.call_later(DEADLINE, transport.abort)
        super().connection_made(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        if (held := self._open.pop(handler, None)) is not None:
            held[1].cancel()
        self._answered.discard(handler)
        super().connection_lost(handler, exc)
