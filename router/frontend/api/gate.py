"""Stands before all routes: a client needs a key for every path but a few, and a place while many are served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, Overloaded
from router.frontend.api import errors
from router.frontend.api.http_responses import error_response, request_name
from router.frontend.api.model_cards import is_anthropic
from router.frontend.api.places import OPERATORS
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
            _check_places(scope, operator=operator or identity.operator)
            leave = self._gate.enter(identity) if request.method == "POST" else None
        except BatonError as error:
            if not isinstance(error, Overloaded):
                note_refusal(f"{request.method} {path}", request.client.host if request.client else "", error)
            await refusal(scope, error)(scope, receive, send)
            return
        caller.set(identity)
        origin.set(http_origin(path, request.headers))
        try:
            await self._routes(scope, receive, send)
        finally:
            if leave is not None:
                leave()


def _check_places(scope: Scope, *, operator: bool) -> None:
    """Raises Overloaded if as many requests are served as there may be. Operators have places beside them, and open
    paths have others, which no operator takes."""
    free: int = scope.get("state", {}).get("places", 1)
    if free <= (-OPERATORS if operator else 0):
        raise Overloaded("as many HTTP requests are served as router.max_concurrent_rpcs allows; try again")


def refusal(scope: Scope, error: BatonError) -> Response:
    """The answer to a request that reaches no route, in the form of its API."""
    request = Request(scope)
    anthropic = scope["path"].startswith(_ANTHROPIC) or is_anthropic(request.headers)
    response = error_response(error, errors.anthropic_body if anthropic else errors.body_of)
    response.headers["x-request-id"] = request_name(request.headers)
    return response
