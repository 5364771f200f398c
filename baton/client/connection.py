"""Where a client connects to, with which key, and how a router's errors come back as the errors they were.

The channels are opened with the first call, so that a client can be made without an event loop and without gRPC.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from baton import operator_port
from baton.client.tls import ClientTls
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExpired,
    Overloaded,
    RequestCancelled,
    Unavailable,
    all_errors,
    from_reason,
)
from baton.operator_api import CALLS, ONE_ROUTER, OperatorCall

if TYPE_CHECKING:
    import aiohttp
    import grpc.aio

TlsArgument: TypeAlias = bool | str | Path | ClientTls
A = TypeVar("A")

_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
REASON, RETRY_AFTER = "baton-reason", "retry-after-ms"
KEY_VARIABLE = "BATON_API_KEY"
_LOCAL_GRPC, _LOCAL_HTTP = "127.0.0.1:50051", "http://127.0.0.1:8000"
OPTIONS = [
    # Reconnect to a restarted router within 0.5 s, instead of after gRPC's long back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    # Or all clients of a process would share one connection, and with it one of the routers at the port.
    ("grpc.use_local_subchannel_pool", 1),
    # A machine that vanished ends a call. gRPC's servers take no ping more often than every 300 s.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class ClientConnection:
    """The addresses, the key and the channels of one client. Its event loop is the one of the first call."""

    def __init__(
        self, address: str, operator: str, http: str, api_key: str | None, tls: TlsArgument, *, one_router: bool = False
    ) -> None:
        """`AsyncClient` describes the arguments."""
        if not (address or operator or http):
            address, http = _LOCAL_GRPC, _LOCAL_HTTP
            operator = operator_port.target(operator_port.default_path("baton", "router"))
        self.address = address
        self.operator = operator
        self._http = http if "://" in http or not http else f"{'https' if tls else 'http'}://{http}"
        self._tls = ClientTls.of(tls)
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        self._authorization = f"Bearer {key}" if key else ""
        self._one_router = one_router
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[type, Any] = {}
        self._session: Any = None
        self._calls: set[aiohttp.ClientSession] = set()  # of the operator, under way
        self._closed = False

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What is sent with every gRPC call."""
        return [("authorization", self._authorization)] if self._authorization else []

    @property
    def headers(self) -> Mapping[str, str]:
        """What is sent with every HTTP request."""
        return {"Authorization": self._authorization} if self._authorization else {}

    def public(self, kind: type) -> Any:
        """The stub of a service for clients. Raises ConfigError."""
        if not self.address:
            raise ConfigError("this client knows no router's public port; give it one: Client(address)")
        import grpc.aio

        self._check_open()
        if self._channel is None and self._tls is not None:
            self._channel = grpc.aio.secure_channel(self.address, self._tls.grpc_credentials(), OPTIONS)
        elif self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, OPTIONS)
        if kind not in self._stubs:
            self._stubs[kind] = kind(self._channel)
        return self._stubs[kind]

    async def ask_operator(self, call: OperatorCall[A], timeout: float | None) -> A:
        """Return the answer of the first router at `operator` that can be reached. Raises BatonError."""
        import aiohttp

        self._check_open()
        if not self.operator:
            raise ConfigError("this client knows no router's operator port; give it one: Client(address, operator)")
        places = operator_port.paths([self.operator]) or [self.operator]
        problem = ""
        try:
            async with asyncio.timeout(timeout):
                for place in places:
                    try:
                        return msgspec.json.decode(await self._answer(place, call), type=CALLS[type(call)][-1])
                    except aiohttp.ClientConnectorError as error:
                        problem = str(error)
        except TimeoutError:
            raise Unavailable(f"the router at {self.operator} did not answer in time") from None
        except aiohttp.ClientConnectionError as error:
            problem = str(error) or type(error).__name__
        except (aiohttp.ClientResponseError, msgspec.MsgspecError):
            raise _not_served(self.operator) from None
        if self._closed:
            raise RequestCancelled("the client has been closed")
        raise Unavailable(f"no router answers at {self.operator} ({problem}); `baton status` tells whether it runs")

    async def _answer(self, place: Path | str, call: OperatorCall[Any]) -> bytes:
        """Return the answer of one router. Raises BatonError and aiohttp.ClientError."""
        import aiohttp

        unix = isinstance(place, Path)
        connector = aiohttp.UnixConnector(str(place)) if unix else aiohttp.TCPConnector()
        method, path, _ = CALLS[type(call)]
        sent: dict[str, Any] = {"params": msgspec.to_builtins(call)}
        if method == "POST":  # as a file: aiohttp warns of large bodies that are bytes
            sent = {"data": io.BytesIO(msgspec.json.encode(call))}
        headers = {**self.headers, ONE_ROUTER: "1"} if self._one_router else self.headers
        limit = aiohttp.ClientTimeout()  # none: the caller has one
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:
            self._calls.add(session)
            try:
                url = f"http://{'localhost' if unix else place}{path}"
                async with session.request(method, url, **sent) as response:
                    body = await response.read()
            finally:
                self._calls.discard(session)
        if response.status == 200:
            return body
        if REASON not in response.headers:
            raise _not_served(self.operator)
        raise error_of(response.status, body.decode(errors="replace"), response.headers)

    def http(self, path: str) -> tuple[Any, str]:
        """An aiohttp session, and the URL of a path of the HTTP API. Raises ConfigError."""
        import aiohttp

        self._check_open()
        if not self._http:
            raise ConfigError("this client knows no router's HTTP address; give it one: Client(address, http=...)")
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._tls.ssl_context() if self._tls else True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self.headers)
        return self._session, self._http.rstrip("/") + path

    async def close(self) -> None:
        """End every call and close the connections."""
        self._closed = True
        self._stubs.clear()
        for each in (self._channel, self._session, *self._calls):
            if each is not None:
                await each.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the client is closed; make another one")


def typed(error: Any, address: str, *, late: type[BatonError] = Unavailable) -> BatonError:
    """Return the error that the router raised, by its reason or else by its gRPC status. `late`: what a deadline that
    passes here is."""
    details = error.details() or ""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    texts = {name: value.decode() if isinstance(value, bytes) else str(value) for name, value in metadata}
    if reason := texts.get(REASON):
        return rebuilt(reason, details, texts.get(RETRY_AFTER))
    name = error.code().name
    if name == "UNAVAILABLE":
        return Unavailable(f"no router answers at {address} ({details}); `baton status` tells whether it runs")
    if name == "UNIMPLEMENTED":
        return _not_served(address)
    if name == "DEADLINE_EXCEEDED":
        return late(f"the router at {address} did not answer in time")
    return of_status(name)(f"{name}: {details}")


def _not_served(address: str) -> ConfigError:
    return ConfigError(
        f"the port {address} does not serve that: the operator's calls are on a router's operator port, Generation is "
        "on its public one; `baton status --json` tells both"
    )


def error_of(status: int, text: str, headers: Mapping[str, str]) -> BatonError:
    """Return the error that the answer to an HTTP request stands for."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"HTTP status {status}: {text[:200]}"
    return http_error(status, message, headers.get(REASON, ""), headers.get(RETRY_AFTER))


def http_error(status: int, message: str, reason: str = "", retry_after_ms: str | None = None) -> BatonError:
    """Return the error that an HTTP status stands for, or the one of its reason where that was told."""
    if reason:
        return rebuilt(reason, message, retry_after_ms)
    name = _STATUS.get(status, "INVALID_ARGUMENT" if 400 <= status < 500 else "INTERNAL")
    return of_status(name)(message)


def rebuilt(reason: str, message: str, retry_after_ms: str | None) -> BatonError:
    """Return the error of that reason, with the time after which another try is worth it."""
    error = from_reason(reason, message)
    if isinstance(error, Overloaded) and retry_after_ms is not None and retry_after_ms.isdecimal():
        error.retry_after_ms = int(retry_after_ms)
    return error


def of_status(name: str) -> type[BatonError]:
    """The first class of `baton.errors` with that gRPC status."""
    return next((kind for kind in all_errors() if kind.status == name), BatonError)


def expired(address: str) -> DeadlineExpired:
    """Return the error of a request whose time is up here."""
    return DeadlineExpired(f"the router at {address} did not finish in time")
