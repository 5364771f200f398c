"""The operator's server: JSON over HTTP on a Unix socket of this user's, or on a port of loopback.

The kernel lets this user alone open the socket. On loopback a call needs an operator's key, once there are keys. No web
page is a client: a browser that reaches the port, also through ssh, gets status 403.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton import operator_port
from baton.errors import BatonError, DeadlineExpired, InvalidRequest, Overloaded, PermissionDenied, shown
from baton.futures import looked_at
from baton.hosts import host_of_header, names_this_machine
from baton.operator_address import Loopback, parse_operator
from baton.operator_api import CALLS, ONE_ROUTER, OperatorCall
from baton.ports import FixedPort
from router import events
from router.frontend.api.bodies import BodyReader
from router.frontend.api.gates import check_places
from router.frontend.api.operator.calls import OperatorCalls, checked
from router.frontend.api.server import ApiServer
from router.frontend.api.streaming import disconnected, error_response, json_response
from router.frontend.chat.repairs import Repairs
from router.frontend.generation import GenerationService
from router.frontend.identity import THIS_USER, Gatekeeper, caller, note_refusal

log = logging.getLogger(__name__)

T = TypeVar("T")

_CALLS_AT_ONCE = 256
_SECONDS = 10.0  # in which a call is answered, and a pin after its deadline


class OperatorServer:
    """Owns the sockets, and what they admit.

    A socket's file may be removed while the router lives, such as with $XDG_RUNTIME_DIR when the user logs out. Then
    another server listens anew, and connections to the first one live on."""

    def __init__(self, service: GenerationService, gate: Gatekeeper, calls: OperatorCalls) -> None:
        self._model, self._clock, self._bodies = service.model, service.clock, BodyReader(service)
        self._gate, self._calls = gate, calls
        self._servers: list[ApiServer] = []
        self._path: Path | None = None  # of the socket

    async def start(self, setting: str, cluster: str, router: str) -> str:
        """Listen where `router.operator` says; returns the address. Raises ConfigError, StartupError, PortInUse."""
        chosen = parse_operator(setting)
        if isinstance(chosen, Loopback):
            listener = await FixedPort("router.operator", chosen.host, chosen.port, "router.operator").listener()
            address = str(chosen._replace(port=listener.getsockname()[1]))
        else:
            path = chosen or operator_port.default_path(cluster, router)
            listener = operator_port.listen(path, is_default=chosen is None)
            self._path, address = path, operator_port.target(path)
        server = ApiServer(self._app(self._gate if isinstance(chosen, Loopback) else None), _CALLS_AT_ONCE)
        await server.serve(listener)
        self._servers.append(server)
        return address

    @property
    def lost(self) -> bool:
        """Whether the socket's file has been removed, so that no new connection finds it."""
        return self._path is not None and not os.path.lexists(self._path)

    async def stop(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    def _app(self, gate: Gatekeeper | None) -> Starlette:
        """Return the ASGI application. `gate` asks for an operator's key; none: the kernel admits this user alone."""
        return Starlette(
            routes=[
                Route(path, partial(self._answer, kind, gate), methods=[method])
                for kind, (method, path, _) in CALLS.items()
            ],
            exception_handlers={HTTPException: _no_route},
        )

    async def _answer(self, kind: type[OperatorCall[Any]], gate: Gatekeeper | None, request: Request) -> Response:
        try:
            with _admitted(request, gate):
                call = await self._read(kind, request)
                work = self._calls.answer(call, alone=ONE_ROUTER in request.headers)
                return json_response(await self._in_time(call, work, request))
        except BatonError as error:
            return error_response(error)
        except Exception:  # whatever it is, the client gets a status and never a traceback
            log.exception("failed in the router")
            return error_response(BatonError("internal error; the router's log says more"))

    async def _read(self, kind: type[OperatorCall[Any]], request: Request) -> OperatorCall[Any] | events.PinPrefix:
        if request.method == "POST":
            request.state.repairs = Repairs(setting=False)
            return await self._bodies.read(request, kind, lambda call: checked(call, self._model, self._clock.now()))
        try:
            return msgspec.convert(dict(request.query_params), kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"the query of {request.url.path} is not as it must be: {shown(str(error), 300)}"
            ) from None

    async def _in_time(self, call: OperatorCall[Any] | events.PinPrefix, work: Awaitable[T], request: Request) -> T:
        """Do the work of a call. It is cancelled once its time is up, or its client has closed the connection."""
        seconds = _SECONDS
        if isinstance(call, events.PinPrefix):
            seconds += (call.deadline or 0.0) - self._clock.now()
        working = asyncio.ensure_future(work)
        working.add_done_callback(looked_at)
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait({working, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise DeadlineExpired(f"the call has not been answered within {seconds:g} s, or its client has gone")
            return working.result()
        finally:
            working.cancel()
            gone.cancel()


@contextlib.contextmanager
def _admitted(request: Request, gate: Gatekeeper | None) -> Iterator[None]:
    """Identify the client and count the call until its end. Raises BatonError."""
    try:
        _check_no_page(request)
        check_places(request.scope, operator=False)
        identity = gate.identify(request.headers, operator=True) if gate else THIS_USER
        leave = gate.enter(identity) if gate else None
    except BatonError as error:
        if not isinstance(error, Overloaded):
            note_refusal(f"{request.method} {request.url.path}", "the operator's port", error)
        raise
    caller.set(identity)
    try:
        yield
    finally:
        if leave is not None:
            leave()


def _check_no_page(request: Request) -> None:
    """Raise PermissionDenied for what a web page sends. Its name may point to loopback (DNS rebinding)."""
    host = request.headers.get("host", "")
    if "origin" in request.headers or "sec-fetch-site" in request.headers:
        raise PermissionDenied("a web page sends this call, and none may; use `baton` or curl")
    if not names_this_machine(host_of_header(host)):
        raise PermissionDenied(f"the call is for the host {shown(host)!r}, which is no name of this machine")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = ", ".join(f"{method} {path}" for method, path, _ in CALLS.values())
    response = error_response(
        InvalidRequest(f"there is no call {request.method} {shown(request.url.path)}; there are {known}")
    )
    response.status_code = error.status_code
    return response
