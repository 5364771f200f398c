"""The routes of the page at /dashboard.

    GET /                               leads to the page
    GET /dashboard                      the page; it says nothing of the cluster, so it needs no key
    GET /dashboard/static/NAME          its scripts and styles; the same
    GET /dashboard/api/snapshot         the cluster now, made once a second; for operators, as all below
    GET /dashboard/api/history          the samples of the last five minutes
    GET /dashboard/api/request?name=N   how a request was served, as `baton explain --json` has it

With `router=NAME`, the data is that of another router of the cluster, which this one asks.

`router.frontend.api.gates` asks for the operator's key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from baton.clock import Clock
from baton.errors import BatonError, Overloaded
from baton.operator_api import Explain, GetHistory, GetSnapshot, OperatorCall
from router.frontend.api.dashboard.files import PAGE, SECURITY_HEADERS, static_files
from router.frontend.api.operator.calls import OperatorCalls
from router.frontend.api.streaming import error_response

MAX_VIEWERS = 32
VIEWER = "x-baton-viewer"
"""A page names itself in this header, with a random word."""

_MAX_WORD = 64
_VIEWING = 5.0  # seconds after its last snapshot for which a page counts as a viewer
_DATA_HEADERS = {**SECURITY_HEADERS, "cache-control": "no-store", "content-type": "application/json"}


class DashboardRoutes:
    """`routes` serves the page and its data."""

    def __init__(self, calls: OperatorCalls, clock: Clock) -> None:
        self._calls = calls
        self._files = static_files()
        self._viewers = Viewers(clock)
        get = partial(Route, methods=["GET"])
        self.routes = [
            get("/", self._root),
            get("/dashboard", self._page),
            get("/dashboard/", self._slash),
            get("/dashboard/static/{name}", self._static),
            get("/dashboard/api/snapshot", self._data(lambda query: GetSnapshot())),
            get("/dashboard/api/history", self._data(lambda query: GetHistory())),
            get("/dashboard/api/request", self._data(lambda query: Explain(query.get("name", "")))),
        ]

    async def _page(self, request: Request) -> Response:
        return self._files[PAGE].answer(request)

    async def _root(self, request: Request) -> Response:
        return RedirectResponse("dashboard", headers=SECURITY_HEADERS)

    async def _slash(self, request: Request) -> Response:
        """The page names its files beside itself, also behind a proxy that adds a prefix to all paths."""
        return RedirectResponse("../dashboard", 308, headers=SECURITY_HEADERS)

    async def _static(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return Response("there is no such file\n", 404, headers={**SECURITY_HEADERS, "content-type": "text/plain"})
        return file.answer(request)

    def _data(self, call_of: Callable[[QueryParams], OperatorCall[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                self._viewers.admit(request.headers.get(VIEWER, ""))
                query = request.query_params
                answer = await self._calls.answer_of(query.get("router", ""), call_of(query))
                return Response(msgspec.json.encode(answer), headers=_DATA_HEADERS)
            except BatonError as error:
                response = error_response(error)
                response.headers.update(_DATA_HEADERS)
                return response

        return answer


class Viewers:
    """The pages that are open, as far as their polls tell."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}  # by their words: when they last asked, seconds

    def admit(self, word: str) -> None:
        """Count a page that asks for data. Raises Overloaded where too many others are open."""
        now, word = self._clock.now(), word[:_MAX_WORD]
        if word not in self._seen and len(self._seen) >= MAX_VIEWERS:
            self._seen = {other: seen for other, seen in self._seen.items() if now - seen < _VIEWING}
            if len(self._seen) >= MAX_VIEWERS:
                raise Overloaded(f"{MAX_VIEWERS} pages watch this router already; close one of them", 5_000)
        self._seen[word] = now
