"""Addresses of routers, the configurations that keep them, and the operator's address made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from baton.config import Config, FurtherModel
from baton.hosts import bracketed
from baton.operator_address import FIRST_ROUTER


class ServiceAddresses(msgspec.Struct, frozen=True):
    """The addresses that a router announces once it serves.

    `grpc` is host:port for clients, `internal` a ZMQ endpoint for workers and stores, `http` host:port of its metrics.
    `operator` is unix:PATH or host:port, which works on the router's host only. `api` is host:port of its HTTP
    APIs.
    """

    grpc: str
    internal: str
    http: str
    operator: str = ""
    api: str = ""
    further: tuple[str, ...] = ()  # as `internal`, for the workers and stores of each further model

    def pin(self, config: Config) -> Config:
        """Return the configuration with which the first router listens at the same addresses when it is restarted."""
        ports = {f"{kind}_port": _port(getattr(self, kind)) for kind in ("grpc", "internal", "http")}
        pinned = msgspec.structs.replace(config.router, **ports)
        if config.router.operator and self.operator:  # else chosen again: its folder may have gone
            pinned = msgspec.structs.replace(pinned, operator=self.operator)
        api = msgspec.structs.replace(config.api, port=_port(self.api)) if self.api else config.api
        models = _with_ports(config, map(_port, self.further)) if self.further else config.models
        return msgspec.structs.replace(config, router=pinned, api=api, models=models)

    def reached_at(self, ip: str) -> ServiceAddresses:
        """Return the same addresses with `ip` in place of "every interface", which means nothing on another machine."""
        wildcards = ("0.0.0.0", "[::]", "*")  # noqa: S104 - recognised here, not listened on
        fixed = {kind: getattr(self, kind) for kind in ("grpc", "internal", "http", "api")}
        for wildcard in wildcards:
            fixed = {kind: address.replace(f"{wildcard}:", f"{bracketed(ip)}:") for kind, address in fixed.items()}
        return ServiceAddresses(**fixed, operator=self.operator, further=self.further)

    def endpoint_of(self, pool: int) -> str:
        """Return the ZMQ endpoint for the workers and stores of a model."""
        internal = (self.internal, *self.further)[pool]
        return internal if "://" in internal else f"tcp://{internal}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def listening(config: Config, router: str, known: Mapping[str, ServiceAddresses]) -> Config:
    """Return the configuration with which a router listens: at its own ports if it has served, and for clients where
    the first router does. `known`: addresses of routers that have served, by name."""
    if (first := known.get(FIRST_ROUTER)) is not None:
        config = first.pin(config)
    if router == FIRST_ROUTER:
        return config
    own = {kind: _port(getattr(known[router], kind)) if router in known else 0 for kind in ("internal", "http")}
    ports = {f"{kind}_port": port for kind, port in own.items()}
    further = map(_port, known[router].further) if router in known else [0] * len(config.models)
    pinned = msgspec.structs.replace(config.router, **ports)
    return msgspec.structs.replace(config, router=pinned, models=_with_ports(config, further))


def _with_ports(config: Config, ports: Iterable[int]) -> tuple[FurtherModel, ...]:
    pairs = zip(config.models, ports, strict=True)
    return tuple(msgspec.structs.replace(each, internal_port=port) for each, port in pairs)


def operator_target(routers: Iterable[ServiceAddresses]) -> str:
    """Return one address for the routers' operator ports. Each answers for all.

    A client connects to the first router. If that can't be reached, it connects to the next one, unless the first has a
    port and the others have sockets."""
    first, *others = [router.operator for router in routers]
    if not first.startswith("unix:"):
        return first
    return ",".join([first, *(address.removeprefix("unix:") for address in others)])
