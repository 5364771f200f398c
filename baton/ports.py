"""Fixed ports: looked at before they are taken, waited for while a connection holds one, named with their holder.

A port in Linux's range of outgoing ports (net.ipv4.ip_local_port_range) may be the local end of any program's
connection, and one that has ended holds its port for another minute (TIME_WAIT). SO_REUSEADDR helps against connections
of our own predecessor only. So a listener waits for its port, for as long as such a minute takes.

Routers of one cluster share their ports for clients (SO_REUSEPORT): the kernel spreads connections over those that
listen. It would let any process of the same user take part that sets the option, such as another server. So a router
first looks at each process that listens there: it must hold the operator's address of a router of this cluster.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from baton.config import Config
from baton.errors import PortInUse, StartupError
from baton.hosts import bracketed, is_wildcard
from baton.operator_port import target

log = logging.getLogger(__name__)

BACKLOG = 1_024  # connections that the kernel keeps until they are accepted
_LOOK = 0.25  # seconds between two looks at a port that is held
_ENDED = 65.0  # seconds: TIME_WAIT takes 60
_TRIES = 12  # to bind a port that was free a moment ago
_LISTENER = 3.0  # seconds for what listens: a predecessor's process may just be ending

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for a port, by what holds it."""

    listener: float = _LISTENER
    connection: float = _ENDED  # that lives
    ended: float = _ENDED  # a connection in TIME_WAIT
    unseen: float = _LISTENER  # nothing that can be seen; it may just have gone


_PATIENCE = Patience()


@dataclass(frozen=True)
class FixedPort:
    """A port that a setting names. Port 0 stands for any free one."""

    setting: str  # such as "router.grpc_port"
    host: str  # without brackets
    port: int
    host_setting: str = "router.host"
    any_port: str = ""  # what takes any port, unless it is --set `setting`=0
    patience: Patience = _PATIENCE
    partners: Sequence[str] = ()  # the operator's addresses of the routers that may listen there, too

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    def waits(self) -> Iterator[float]:
        """Yield how long to sleep before the next look, until the port can be had. Raises PortInUse, which names the
        holder, once patience is over; StartupError where the host is no address of this machine."""
        first_seen: dict[str, float] = {}  # by kind of holder
        while not self._free():
            held, now = _holder(self), time.monotonic()
            logged = bool(first_seen)
            if now - first_seen.setdefault(held.kind, now) >= getattr(self.patience, held.kind):
                another = self.any_port or f"--set {self.setting}=0"
                raise PortInUse(
                    f"{self} ({self.setting}) is in use: {held.what}; {held.remedy(self.port)}, or take another port: "
                    f"{another} takes any"
                )
            if not logged:
                log.warning("waiting for %s (%s): %s", self, self.setting, held.what)
            yield _LOOK

    async def claim(self, listen: Callable[[], Awaitable[T]]) -> T:
        """Return what `listen` returns, once the port can be had. Raises what `waits` and `listen` raise."""
        for turn in range(_TRIES):
            for pause in self.waits():
                await asyncio.sleep(pause)
            try:
                return await listen()
            except PortInUse:  # a connection took it between the look and the bind
                if turn == _TRIES - 1:
                    raise
            await asyncio.sleep(_LOOK)
        raise AssertionError("the last try returned or raised")

    async def listener(self) -> socket.socket:
        """Return a socket that listens there, once the port can be had. Raises what `waits` raises."""

        async def listening() -> socket.socket:
            try:
                return listen(self.host, self.port, shared=bool(self.partners))
            except OSError as error:
                raise PortInUse(f"can't listen on {self} ({self.setting}): {error.strerror}") from None

        return await self.claim(listening)

    def _free(self) -> bool:
        """Whether it can be bound now. Raises StartupError where that is not a question of time."""
        try:
            _bound(self.host, self.port, shared=bool(self.partners)).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            why = f"can't listen on {self}: {error.strerror or error}"
            if error.errno == errno.EADDRNOTAVAIL:
                why = f"{self.host_setting} is {self.host}, which is no address of this machine (`ip addr` shows them)"
            raise StartupError(f"{why}; change {self.host_setting} or {self.setting}") from None
        return not (self.partners and self.port and any(each.status == "LISTEN" for each in _sockets_at(self)))


@dataclass(frozen=True)
class RouterPorts:
    """The ports of one router."""

    grpc: FixedPort
    internal: FixedPort
    http: FixedPort
    api: FixedPort
    further: tuple[FixedPort, ...]  # as `internal`, of each further model

    @classmethod
    def of(
        cls, config: Config, inner: str = "", patience: Patience = _PATIENCE, partners: Sequence[str] = ()
    ) -> RouterPorts:
        """`inner`: where it listens for workers and stores, unless that is router.host. `partners`: the operator's
        addresses of the routers with which it shares its ports for clients."""
        router, api, inner = config.router, config.api, inner or config.router.host
        names = [f"models.{each.model.served_name}.internal_port" for each in config.models]
        any_port = "internal_port: 0 of that model"
        return cls(
            grpc=FixedPort("router.grpc_port", api.host, router.grpc_port, "api.host", "", patience, partners),
            internal=FixedPort("router.internal_port", inner, router.internal_port, patience=patience),
            http=FixedPort("router.http_port", router.host, router.http_port, patience=patience),
            api=FixedPort("api.port", api.host, api.port, "api.host", "", patience, partners),
            further=tuple(
                FixedPort(name, inner, each.internal_port, any_port=any_port, patience=patience)
                for name, each in zip(names, config.models, strict=True)
            ),
        )


@dataclass(frozen=True)
class _Holder:
    kind: Literal["listener", "connection", "ended", "unseen"]
    what: str

    def remedy(self, port: int) -> str:
        if self.kind in ("listener", "unseen"):
            return "end it"
        return f"end it, or keep outgoing connections off: sysctl -w net.ipv4.ip_local_reserved_ports={port}"


def listen(host: str, port: int = 0, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens there (port 0: any free one). Raises OSError."""
    listener = _bound(host, port, shared=shared)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket that is bound there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small segments at once only where it is told that this is TCP. Otherwise a token waits for the ACK
    # of the one before.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family is socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is every interface, for IPv4 too
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _holder(door: FixedPort) -> _Holder:
    """Return what holds a port. A live connection counts before one that has ended: it may last for ever."""
    import psutil  # a tenth of a second, and few need it

    here = _sockets_at(door)
    for each in here:
        if each.status == psutil.CONN_LISTEN:
            return _Holder("listener", f"{_process(each.pid)} listens there")
    for each in here:
        if each.status != psutil.CONN_TIME_WAIT and each.raddr:
            peer = f"{bracketed(each.raddr.ip)}:{each.raddr.port}"
            return _Holder("connection", f"a connection of {_process(each.pid)} to {peer} holds it ({each.status})")
    if here:
        return _Holder("ended", "a connection that has ended holds it for up to a minute (TIME_WAIT)")
    return _Holder("unseen", "a process holds it with a socket that does not listen")


def _sockets_at(door: FixedPort) -> list[Any]:
    """Return the sockets at a port, but for those of the routers that share it."""
    import psutil

    sockets: list[Any] = psutil.net_connections("all" if door.partners else "tcp")
    partners = {each.pid for each in sockets if each.pid and _text(each.laddr) in door.partners}
    return [
        each
        for each in sockets
        if each.type == socket.SOCK_STREAM
        and each.family != socket.AF_UNIX
        and each.laddr
        and each.laddr.port == door.port
        and (is_wildcard(door.host) or is_wildcard(each.laddr.ip) or _plain(each.laddr.ip) == _address(door.host))
        and each.pid not in partners
    ]


def _plain(address: str) -> str:
    """Return an address of IPv4 as such: gRPC listens at it with a socket of IPv6."""
    return address.removeprefix("::ffff:") if "." in address else address


def _text(address: Any) -> str:
    """Return the address of a socket as that of an operator's port is written."""
    if not address or isinstance(address, str):
        return target(Path(address)) if address else ""
    return f"{bracketed(address.ip)}:{address.port}"


def _process(pid: int | None) -> str:
    import psutil

    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"process {pid}"


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host) if ":" not in host else host
    except OSError:
        return host
