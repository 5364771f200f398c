"""The page at /dashboard: its files, the routes of its data, and that data as JSON.

    GET /                               leads to the page
    GET /dashboard                      the page; it says nothing of the cluster, so it needs no key
    GET /dashboard/static/NAME          its scripts and styles; the same
    GET /dashboard/api/snapshot         the cluster now, made once a second; for operators, as all below
    GET /dashboard/api/history          the samples of the last five minutes
    GET /dashboard/api/request?name=N   how a request was served, as `baton explain --json` has it

With `router=NAME`, the data is that of another router of the cluster, which this one asks. With `model=NAME` it is of
that model, where the router serves several.
`router.frontend.api.gates` asks for the operator's key.

The files are plain HTML, CSS and ES modules, read once at start. There is no build step and nothing comes from
elsewhere. A file is served under its own name with its type and a strong ETag, and a browser asks each time whether it
has changed. No path of a client touches the disk.

The first viewer that asks has the second's snapshot made. So a router without viewers makes none, and looks at no
prefix map.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from baton.clock import Clock
from baton.errors import BatonError, Overloaded
from baton.operator_api import Explain, GetHistory, GetSnapshot, OperatorCall
from router.frontend.api.errors import error_response
from router.frontend.api.operator_server import OperatorCalls
from router.frontend.router_driver import RouterDriver

log = logging.getLogger(__name__)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"

SECURITY_HEADERS: Mapping[str, str] = {
    # Names of requests, models and workers come from elsewhere. Were one of them taken for markup in spite of all, no
    # script but the page's own files could run, and no data could go to another server.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

MAX_VIEWERS = 32
VIEWER = "x-baton-viewer"
"""A page names itself in this header, with a random word."""

_MAX_WORD = 64
_VIEWING = 5.0  # seconds after its last snapshot for which a page counts as a viewer
_DATA_HEADERS = {**SECURITY_HEADERS, "cache-control": "no-store", "content-type": "application/json"}
PERIOD = 1.0  # seconds between two snapshots
_VIEWED = 5.0  # seconds for which an answer counts as a viewer
SLICE = 256
"""Runs of the prefix map that are looked at in one turn of the loop."""
_REST = 0.01  # seconds between two slices
_SURVEY_EVERY = 2.0  # seconds from the end of one look at the prefix map to the next


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
            get("/dashboard/api/snapshot", self._data(lambda query: GetSnapshot(query.get("model", "")))),
            get("/dashboard/api/history", self._data(lambda query: GetHistory(query.get("model", "")))),
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


@dataclass(frozen=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {**SECURITY_HEADERS, "etag": self.etag, "cache-control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Every file by its name."""
    folder = resources.files("router.frontend.api").joinpath("static")
    files: dict[str, StaticFile] = {}
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            files[entry.name] = StaticFile(content, _TYPES[suffix], etag)
    return files


class DashboardFeed:
    """Makes the data."""

    def __init__(self, driver: RouterDriver, clock: Clock, models: Sequence[str]) -> None:
        """`models`: the names of all that the router serves."""
        self._driver, self._clock, self._models = driver, clock, models
        self._snapshot: tuple[int, bytes] = (-1, b"")  # its sequence, JSON
        self._seen = float("-inf")  # when a viewer last asked
        self._surveyed = float("-inf")
        self.snapshots = 0  # made so far

    async def run(self) -> None:
        """Take a sample each second, and look at the prefix map while there are viewers. A picture is not worth a
        router: whatever fails here is logged, and the router goes on."""
        due = self._clock.now()
        surveying: asyncio.Task[None] | None = None
        try:
            while True:
                now = self._clock.now()
                if now >= due:
                    due = max(due + PERIOD, now)
                    with _logged("sample"):
                        self._driver.monitor.sample(now, _unix_ms())
                viewed = now - self._seen < _VIEWED and now - self._surveyed > _SURVEY_EVERY
                if viewed and (surveying is None or surveying.done()):
                    surveying = asyncio.create_task(self._survey())
                await asyncio.sleep(max(0.0, due - self._clock.now()))
        finally:
            if surveying is not None:
                surveying.cancel()

    def snapshot(self) -> bytes:
        self._seen = self._clock.now()
        monitor = self._driver.monitor
        if self._snapshot[0] != monitor.samples.sequence:
            latest = monitor.snapshot(self._seen, _unix_ms(), self._driver.unready, self._models)
            self._snapshot = (latest.sequence, msgspec.json.encode(latest))
            self.snapshots += 1
        return self._snapshot[1]

    async def _survey(self) -> None:
        """Look at the whole prefix map in slices, and draw it on a thread."""
        monitor = self._driver.monitor
        with _logged("survey of the prefix map"):
            survey = monitor.survey()
            while not survey.step(SLICE):  # noqa: ASYNC110 - other tasks get their turns
                await asyncio.sleep(_REST)
            picture = await asyncio.to_thread(survey.draw)
            monitor.surveyed(survey, picture, self._clock.now())
        self._surveyed = self._clock.now()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("the dashboard's %s failed", what)


def _unix_ms() -> int:
    return int(time.time() * 1_000)
