"""What stands before the work of a request: keys, places, sites, and bounds of time and size on its body.

A client needs a key for every path but a few, and a place while many are served. Where a client needs no key, web pages
of other sites are kept out. A page in a browser on this machine can send requests to loopback, and a name of its own
that it lets point to loopback (DNS rebinding) lets it read the answers too. Neither works where clients need keys: a
browser has none to send by itself. So these rules hold while no key is needed:

- `Host` is a name that no site on the internet owns, where the API listens on loopback. `api.allowed_hosts` names
  others. If it is set, it holds always.
- A request that a browser marks as another site's has an origin of `api.allowed_origins`. `Sec-Fetch-Site` is the mark,
  and in browsers without that header `Origin`, which is then compared with `Host`. A link that is followed is no such
  request: the page with the link can't read what comes.

Clients that are no browser send neither mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config import ApiConfig
from baton.errors import (
    BatonError,
    BodyTimeout,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    UnsupportedEncoding,
    shown,
)
from baton.hosts import host_of_header, is_loopback, names_this_machine
from router.frontend.api import errors
from router.frontend.api.anthropic_messages import anthropic_body
from router.frontend.api.errors import error_response
from router.frontend.api.model_cards import is_anthropic
from router.frontend.api.protocol import decode, in_words_of
from router.frontend.api.server import OPERATORS
from router.frontend.chat.repairs import Repairs, with_whole_characters
from router.frontend.generation import GenerationService
from router.frontend.identity import Gatekeeper, caller, note_refusal
from router.tracing.origin import Origin, origin

DASHBOARD = "/dashboard"  # the page itself says nothing of the cluster; its data is for operators
_OPEN = frozenset(
    {"/", "/health", "/ready", "/health/ready", "/live", "/version", "/openapi.json", DASHBOARD, f"{DASHBOARD}/"}
)
_OPEN_BELOW = f"{DASHBOARD}/static/"
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_FOR_OPERATORS = frozenset({"/metrics", *ADAPTER_PATHS})
_FOR_OPERATORS_BELOW = f"{DASHBOARD}/api/"
_ANTHROPIC = "/v1/messages"
_CHATS = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
Headers: TypeAlias = Mapping[str, str]  # of a request, by names in lower case

_MAX_NAME = 80  # characters of a request's name
_BODY_SECONDS = 30.0  # within which a body must have come
_OTHER_BYTES = 640 * 2**10  # of a body: everything but the prompt; a grammar has up to 512 KiB
_BYTES_PER_ID = 12  # of a token id as JSON
_BYTES_PER_BYTE = 6  # of text as JSON, where every character is escaped
_BYTES_AT_ONCE = 512 * 2**20  # of all bodies that are being read or decoded
_CONTAINERS = 2**17  # objects and lists of a body


class KeyGate:
    """An ASGI application around the routes. It names the client of each request to what runs behind it."""

    def __init__(self, routes: ASGIApp, gate: Gatekeeper) -> None:
        self._routes = routes
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if not path.startswith(DASHBOARD):  # whose page names its files beside itself
            path = scope["path"] = path.rstrip("/") or "/"
        if path in _OPEN or path.startswith(_OPEN_BELOW):
            await self._routes(scope, receive, send)
            return
        method, headers = scope["method"], scope["state"]["headers"]
        operator = path in _FOR_OPERATORS or path.startswith(_FOR_OPERATORS_BELOW)
        try:
            identity = self._gate.identify(headers, operator=operator)
            check_places(scope, operator=operator or identity.operator)
            leave = self._gate.enter(identity) if method == "POST" else None
        except BatonError as error:
            if not isinstance(error, Overloaded):
                note_refusal(f"{method} {path}", scope["client"][0] if scope.get("client") else "", error)
            await refusal(scope, error)(scope, receive, send)
            return
        caller.set(identity)
        origin.set(Origin(headers, "chat" if path in _CHATS else "text_completion"))
        try:
            await self._routes(scope, receive, send)
        finally:
            if leave is not None:
                leave()


def check_places(scope: Scope, *, operator: bool) -> None:
    """Raises Overloaded if as many requests are served as there may be. Operators have places beside them, and open
    paths have others, which no operator takes."""
    free: int = scope["state"].get("places", 1)
    if free <= (-OPERATORS if operator else 0):
        raise Overloaded("as many HTTP requests are served as router.max_concurrent_rpcs allows; try again")


def refusal(scope: Scope, error: BatonError) -> Response:
    """The answer to a request that reaches no route, in the form of its API."""
    headers: Headers = scope["state"]["headers"]
    anthropic = scope["path"].startswith(_ANTHROPIC) or is_anthropic(headers)
    response = error_response(error, anthropic_body if anthropic else errors.body_of)
    response.headers["x-request-id"] = name = request_name(headers)
    if anthropic:
        response.headers["request-id"] = name
    return response


def request_name(headers: Headers, fallback: str = "") -> str:
    """What a request is called in logs and in its answer: its X-Request-Id, or `fallback`. What can't be a name is
    replaced."""
    name = headers.get("x-request-id") or fallback
    if not name or len(name) > _MAX_NAME or not name.isascii() or not name.isprintable() or " " in name:
        name = secrets.token_hex(8)
    return name


_PORTS = {"http": 80, "https": 443}
_EXPOSED_HEADERS = ("x-request-id", "baton-reason", "baton-repairs", "retry-after", "retry-after-ms", "request-id")


class SiteGate:
    """An ASGI application around the others. It refuses what these rules refuse, with status 403."""

    def __init__(self, app: ASGIApp, gate: Gatekeeper, config: ApiConfig) -> None:
        self._app = app
        self._gate = gate
        self._config = config
        self._loopback = is_loopback(config.host)
        self._any = "*" in config.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope.setdefault("state", {})["headers"] = headers
        try:
            self._check(scope["method"], headers)
        except BatonError as error:
            await refusal(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raises PermissionDenied."""
        open_to_all = not self._gate.keys.required
        host = headers.get("host", "")
        if (self._config.allowed_hosts or (open_to_all and self._loopback)) and not self._is_ours(host_of_header(host)):
            raise PermissionDenied(
                f"the request is for the host {shown(host)!r}, which is no name of this machine; use localhost, or add "
                "the host to api.allowed_hosts"
            )
        if open_to_all and not self._any and self._is_of_another_site(method, headers, host):
            raise PermissionDenied(
                f"the request comes from a web page of another site, {shown(headers.get('origin', 'unnamed'))}; if "
                "that page may use this cluster, add its origin to api.allowed_origins"
            )

    def _is_ours(self, host: str) -> bool:
        """Whether a host may stand in `Host`. Only HTTP/1.0 has requests without one, and browsers don't speak that."""
        allowed = self._config.allowed_hosts
        return not host or names_this_machine(host) or host in (self._config.host, *allowed) or "*" in allowed

    def _is_of_another_site(self, method: str, headers: Headers, host: str) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin in self._config.allowed_origins or site in ("same-origin", "none"):
            return False
        if site is None:
            return origin is not None and not _same(origin, host)
        followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (followed and method in ("GET", "HEAD"))


def _same(origin: str, host: str) -> bool:
    """Whether an origin is the one that a request is sent to. A proxy may have ended its TLS."""
    try:
        page = urlsplit(origin)
        here = urlsplit(f"{page.scheme}://{host}")
        usual = _PORTS.get(page.scheme)
        return page.hostname is not None and (page.hostname, page.port or usual) == (here.hostname, here.port or usual)
    except ValueError:
        return False


def behind_site_gate(app: ASGIApp, gate: Gatekeeper, config: ApiConfig) -> ASGIApp:
    """Return the application behind a `SiteGate`. With `api.allowed_origins`, CORS headers let pages of these origins
    read every answer, and preflights need no key."""
    behind = SiteGate(app, gate, config)
    if not config.allowed_origins:
        return behind
    cors = partial(
        CORSMiddleware, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",), expose_headers=_EXPOSED_HEADERS
    )
    return cors(behind, allow_origins=config.allowed_origins)


class BodyReader:
    """Counts the bytes of all bodies that are being read."""

    def __init__(self, service: GenerationService) -> None:
        context, text = service.most_bytes
        self.max_body = _OTHER_BYTES + _BYTES_PER_ID * context + _BYTES_PER_BYTE * text
        self._max_containers = _CONTAINERS + context  # a prompt's text has some, too
        self._apart = service.apart
        self._bytes = 0

    async def read_body(self, request: Request, kind: type[T], work: Callable[[T], R]) -> R:
        """Read and decode a body, and return what the work makes of it. Work on a large body holds no other request up.
        Raises BatonError."""
        with self._reading() as count:
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    body = await self._body(request, count)
            except TimeoutError:
                raise BodyTimeout(f"the request's body did not come within {_BODY_SECONDS:g} s") from None
            repairs: Repairs = request.scope["state"]["repairs"]
            return await self._apart(len(body), lambda: self._worked(work, self._decoded(body, kind, repairs)))

    def _worked(self, work: Callable[[T], R], body: T) -> R:
        with in_words_of(body):
            return work(body)

    def _decoded(self, body: bytes, kind: type[T], repairs: Repairs) -> T:
        # msgspec holds the GIL while it decodes, 0.2 µs for each object or list.
        if (count := body.count(b"{") + body.count(b"[")) > self._max_containers:
            raise PayloadTooLarge(
                f"the request's body has {count} opening braces and brackets; send at most {self._max_containers}"
            )
        try:
            return decode(body, kind)
        except InvalidRequest:
            if (whole := with_whole_characters(body)) == body or not repairs.make("surrogate"):
                raise
            return decode(whole, kind)

    async def _body(self, request: Request, count: Callable[[int], None]) -> bytes:
        parts: list[bytes] = []
        headers: Headers = request.scope["state"]["headers"]
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise UnsupportedEncoding(f"the body's Content-Encoding is {shown(encoding)!r}; send it uncompressed")
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20:
            self._check(int(length))  # before a client that expects a 100 sends anything
        size = 0
        async for part in request.stream():
            size += len(part)
            self._check(size)
            count(len(part))
            parts.append(part)
        return b"".join(parts)

    def _check(self, size: int) -> None:
        """Raises PayloadTooLarge."""
        if size > self.max_body:
            raise PayloadTooLarge(f"the request's body has more than {self.max_body} bytes; send less")
        identity = caller.get()
        if identity.max_body_bytes is not None and size > identity.max_body_bytes:
            raise PayloadTooLarge(
                f"the request's body has more than the {identity.max_body_bytes} bytes that the API key "
                f"{identity.name!r} may send; send less"
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body among those of all bodies."""
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            if self._bytes + size > _BYTES_AT_ONCE:
                raise Overloaded("too many large requests are being read; try again")
            mine += size
            self._bytes += size

        try:
            yield count
        finally:
            self._bytes -= mine
