"""Stands before all routes: a client needs a key for every path but a few."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, Overloaded
from router.frontend.api import errors
from router.frontend.api.http_responses import error_response
from router.frontend.api.model_cards import is_anthropic
from router.frontend.identity import Gatekeeper, caller, note_refusal
from router.tracing.origin import http_origin, origin

DASHBOARD = "/dashboard"  # the page itself says nothing of the cluster; its data is for operators
_OPEN = frozenset(
    {"/health", "/ready", "/health/ready", "/live", "/version", "/openapi.json", DASHBOARD, f"{DASHBOARD}/"}
)
_OPEN_BELOW = f"{DASHBOARD}/static/"
_FOR_OPERATORS = frozenset({"/metrics"})
_FOR_OPERATORS_BELOW = f"{DASHBOARD}/api/"
_ANTHROPIC = "/v1/messages"


class KeyGate:
    """An ASGI application around the routes. It names the client of each request to what runs behind it."""

    def __init__(self, routes: ASGIApp, gate: Gatekeeper) -> None:
        self._routes = routes
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path in _OPEN or path.startswith(_OPEN_BELOW):
            await self._routes(scope, receive, send)
            return
        request = Request(scope)
        operator = path in _FOR_OPERATORS or path.startswith(_FOR_OPERATORS_BELOW)
        try:
            identity = self._gate.identify(request.headers, operator=operator)
            leave = self._gate.enter(identity) if request.method == "POST" else None
        except BatonError as error:
            if not isinstance(error, Overloaded):
                note_refusal(f"{request.method} {path}", request.client.host if request.client else "", error)
            anthropic = path.startswith(_ANTHROPIC) or is_anthropic(request.headers)
            response = error_response(error, errors.anthropic_body if anthropic else errors.body_of)
            response.headers["x-request-id"] = request.headers.get("x-request-id") or secrets.token_hex(8)
            await response(scope, receive, send)
            return
        caller.set(identity)
        origin.set(http_origin(path, request.headers))
        try:
            await self._routes(scope, receive, send)
        finally:
            if leave is not None:
                leave()
