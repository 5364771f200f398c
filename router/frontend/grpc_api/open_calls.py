"""The calls that need no key: health and reflection. They have places of their own, and take none from generation.

Any process that reaches the port may make them, and hold them for as long as it likes. So each kind is bounded in all,
by connection, and in the bytes of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Overloaded

PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
MAX_BYTES = 4_096  # of a message, which names a service or a symbol

_kinds: Any = health_pb2.HealthCheckResponse  # pyright: ignore[reportAttributeAccessIssue] - no stubs


class Places:
    """How many calls of one kind run, in all and of each connection."""

    def __init__(self, kind: str, most: int, each: int) -> None:
        """`kind`: how the methods begin. `most`: in all. `each`: of one connection."""
        self.kind, self._most, self._each = kind, most, each
        self._running = Counter[str]()  # by connection

    @contextlib.contextmanager
    def take(self, peer: str) -> Iterator[None]:
        """Hold a place for a client. Raises Overloaded."""
        if self._running.total() >= self._most:
            raise Overloaded(f"{self._most} calls of {self.kind} run at this time, and a router takes no more")
        if self._running[peer] >= self._each:
            raise Overloaded(f"{self._each} calls of {self.kind} run on this connection, which may have no more")
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]


def places() -> list[Places]:
    """Return the places of a server. A call belongs to the first kind that its method begins with."""
    return [
        Places("/grpc.health.v1.Health/Watch", 256, 16),
        Places("/grpc.health.v1.Health/", 256, 64),
        Places("/grpc.reflection.", 32, 4),
    ]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The standard's health service.

    grpcio-health-checking's own holds a lock of all watchers while it writes to one. So a client that reads nothing
    would block the router's loop at the next change, and one that leaves makes the others deaf."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._changed = asyncio.Event()  # replaced at each change

    def set(self, service: str, *, serving: bool) -> None:
        """Say from now on whether that service serves."""
        self._status[service] = _kinds.SERVING if serving else _kinds.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 gRPC's name
        if (status := self._status.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _kinds(status=status)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 gRPC's name
        last = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, _kinds.SERVICE_UNKNOWN)
            if status != last:
                await context.write(_kinds(status=status))
                last = status
            await changed.wait()
