"""Addresses of routers, and the gRPC targets made of them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import msgspec

from baton.config import Config
from baton.errors import Unavailable
from baton.hosts import bracketed


class ServiceAddresses(msgspec.Struct, frozen=True):
    """The addresses that a router announces once it serves.

    `grpc` is host:port for clients, `internal` a ZMQ endpoint for workers and stores, `http` host:port of its metrics.
    `operator` is a gRPC target for the operator, which works on the router's host only. `api` is host:port of its HTTP
    APIs.
    """

    grpc: str
    internal: str
    http: str
    operator: str = ""
    api: str = ""

    def pin(self, config: Config) -> Config:
        """Return the configuration with which a restarted router listens at the same addresses."""
        ports = {f"{kind}_port": _port(getattr(self, kind)) for kind in ("grpc", "internal", "http")}
        pinned = msgspec.structs.replace(config.router, **ports)
        if config.router.operator and self.operator:  # else chosen again: its folder may have gone
            pinned = msgspec.structs.replace(pinned, operator=self.operator)
        api = msgspec.structs.replace(config.api, port=_port(self.api)) if self.api else config.api
        return msgspec.structs.replace(config, router=pinned, api=api)

    def reached_at(self, ip: str) -> ServiceAddresses:
        """Return the same addresses with `ip` in place of "every interface", which means nothing on another machine."""
        wildcards = ("0.0.0.0", "[::]", "*")  # noqa: S104 - recognised here, not listened on
        fixed = {kind: getattr(self, kind) for kind in ("grpc", "internal", "http", "api")}
        for wildcard in wildcards:
            fixed = {kind: address.replace(f"{wildcard}:", f"{bracketed(ip)}:") for kind, address in fixed.items()}
        return ServiceAddresses(**fixed, operator=self.operator)

    @property
    def endpoint(self) -> str:
        """The ZMQ endpoint for workers and stores."""
        return self.internal if "://" in self.internal else f"tcp://{self.internal}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def target(routers: Iterable[ServiceAddresses]) -> str:
    """Return one gRPC target for these routers, which listen on one host.

    A channel to the target connects to the first router. If that can't be reached, it connects to the next one. Raises
    Unavailable if the host's name can't be resolved.
    """
    return _joined([router.grpc for router in routers])


def operator_target(routers: Iterable[ServiceAddresses]) -> str:
    """Return one gRPC target for the routers' operator ports: all Unix sockets, or all TCP. Raises Unavailable."""
    return _joined([router.operator for router in routers])


def _joined(addresses: Sequence[str]) -> str:
    first, *others = addresses
    if not others:
        return first
    if first.startswith("unix:"):
        return ",".join([first, *(address.removeprefix("unix:") for address in others)])
    literal = [_literal(address) for address in addresses]
    return f"{'ipv6' if literal[0].startswith('[') else 'ipv4'}:{','.join(literal)}"


def _literal(address: str) -> str:
    """Return the address with the host's name resolved: in a list of targets, gRPC accepts no names."""
    host, _, port = address.rpartition(":")
    try:
        (family, *_, found), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"the router's host {host} is not known here: {error.strerror}") from None
    return f"[{found[0]}]:{port}" if family is socket.AF_INET6 else f"{found[0]}:{port}"
