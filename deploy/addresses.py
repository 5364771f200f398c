"""Where a router answers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import msgspec

from baton.config import Config
from baton.errors import Unavailable


class ServiceAddresses(msgspec.Struct, frozen=True):
    """What a router says once it serves: host:port for clients, a ZMQ endpoint for workers and stores, host:port of its
    metrics, and a gRPC target for the operator, which is good on the router's host only."""

    grpc: str
    internal: str
    http: str
    operator: str = ""

    def pin(self, config: Config) -> Config:
        """The configuration with which a later router comes back at the same addresses."""
        ports = {f"{kind}_port": int(getattr(self, kind).rpartition(":")[2]) for kind in ("grpc", "internal", "http")}
        pinned = msgspec.structs.replace(config.router, **ports)
        if config.router.operator and self.operator:  # a default path is found anew, since its folder may have gone
            pinned = msgspec.structs.replace(pinned, operator=self.operator)
        return msgspec.structs.replace(config, router=pinned)

    def reached_at(self, ip: str) -> ServiceAddresses:
        """The same with `ip` in place of "every interface", which means nothing on another machine."""
        wildcards = ("0.0.0.0", "[::]", "*")  # noqa: S104 - recognised here, not listened on
        fixed = {kind: getattr(self, kind) for kind in ("grpc", "internal", "http")}
        for wildcard in wildcards:
            fixed = {kind: address.replace(f"{wildcard}:", f"{ip}:") for kind, address in fixed.items()}
        return ServiceAddresses(**fixed, operator=self.operator)

    @property
    def endpoint(self) -> str:
        """Where workers and stores connect."""
        return self.internal if "://" in self.internal else f"tcp://{self.internal}"


def target(routers: Iterable[ServiceAddresses]) -> str:
    """What gRPC calls a target: a channel to it goes to the first of these routers, and on to the next one where that
    can't be reached. They listen on one host. Raises Unavailable where that has a name which nobody knows."""
    return _joined([router.grpc for router in routers])


def operator_target(routers: Iterable[ServiceAddresses]) -> str:
    """The same of the routers' ports for the operator, which are all sockets or all ports. Raises Unavailable."""
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
    """With the host's name looked up: of several targets gRPC takes no names."""
    host, _, port = address.rpartition(":")
    try:
        (family, *_, found), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"the router's host {host} is not known here: {error.strerror}") from None
    return f"[{found[0]}]:{port}" if family is socket.AF_INET6 else f"{found[0]}:{port}"
