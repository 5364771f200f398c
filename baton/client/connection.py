"""Where a client connects to, with which key, and how a router's errors come back as the errors they were.

The channels are opened with the first call, so that a client can be made without an event loop and without gRPC.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from baton import operator_port
from baton.client.tls import ClientTls
from baton.errors import BatonError, ConfigError, DeadlineExpired, Overloaded, Unavailable, all_errors, from_reason

if TYPE_CHECKING:
    import grpc.aio

TlsArgument: TypeAlias = bool | str | Path | ClientTls

REASON, RETRY_AFTER = "baton-reason", "retry-after-ms"
ONE_ROUTER = "baton-one-router"
"""Metadata of an operator's call that is about the asked router alone. Without it, it is about all of the cluster's."""
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
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[type, str], Any] = {}
        self._session: Any = None
        self._closed = False

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What is sent with every gRPC call."""
        key = [("authorization", self._authorization)] if self._authorization else []
        return [*key, (ONE_ROUTER, "1")] if self._one_router else key

    @property
    def headers(self) -> Mapping[str, str]:
        """What is sent with every HTTP request."""
        return {"Authorization": self._authorization} if self._authorization else {}

    def public(self, kind: type) -> Any:
        """The stub of a service for clients. Raises ConfigError."""
        if not self.address:
            raise ConfigError("this client knows no router's public port; give it one: Client(address)")
        return self._stub(kind, self.address, self._tls)

    def private(self, kind: type) -> Any:
        """The stub of a service for the operator. Raises ConfigError."""
        if not self.operator:
            raise ConfigError("this client knows no router's operator port; give it one: Client(address, operator)")
        return self._stub(kind, self.operator, None)

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
        """End every call and close the channels."""
        self._closed = True
        channels, self._channels, session, self._session = self._channels, {}, self._session, None
        self._stubs.clear()
        for channel in channels.values():
            await channel.close()
        if session is not None:
            await session.close()

    def _stub(self, kind: type, target: str, tls: ClientTls | None) -> Any:
        if (stub := self._stubs.get((kind, target))) is None:
            stub = self._stubs[kind, target] = kind(self._channel(target, tls))
        return stub

    def _channel(self, target: str, tls: ClientTls | None) -> grpc.aio.Channel:
        import grpc.aio

        self._check_open()
        if (channel := self._channels.get(target)) is None:
            if tls is not None:
                channel = grpc.aio.secure_channel(target, tls.grpc_credentials(), OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(target, OPTIONS)
            self._channels[target] = channel
        return channel

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
        return ConfigError(
            f"the port {address} does not serve that: Cluster and Cache are on a router's operator port, Generation is "
            "on its public one; `baton status --json` tells both"
        )
    if name == "DEADLINE_EXCEEDED":
        return late(f"the router at {address} did not answer in time")
    return of_status(name)(f"{name}: {details}")


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
