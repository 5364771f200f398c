"""The other routers of the cluster: what each of them knows, so that any router's operator is told of all.

Clients share one port among all routers, so no client knows which router has its request. Each router is asked at its
operator's address, which follows from its name. One that does not answer is left out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

import grpc.aio

from baton import operator_port
from baton.client.connection import ONE_ROUTER, OPTIONS, typed
from baton.config import Config
from baton.errors import RequestNotFound
from baton.logs import RateLimitedLog
from baton.operator_address import router_names
from baton.v1 import cluster_pb2, explain_pb2

log = RateLimitedLog(logging.getLogger(__name__))

T = TypeVar("T")

DASHBOARD = "/baton.router.Routers/Dashboard"
"""The gRPC method by which another router reads its page's data: a DashboardAsk as JSON goes in, JSON comes out."""
_SECONDS = 1.0  # for one answer


class OtherRouters:
    """Asks the other routers. A cluster of one router has none."""

    def __init__(self, config: Config, me: str, key: str | None) -> None:
        """`key`: an operator's, for ports on loopback."""
        self._config = config
        self.names = [name for name in router_names(config.cluster.routers) if name != me]
        self._metadata = [(ONE_ROUTER, "1"), *([("authorization", f"Bearer {key}")] if key else [])]
        self._channels: dict[str, grpc.aio.Channel] = {}  # by target

    @property
    def targets(self) -> list[str]:
        """Their operator's gRPC targets, as they are now: a socket moves if its folder is removed."""
        return [*map(self._target, self.names)]

    async def ask(self, context: Any, kind: type, method: str, message: Any) -> list[Any]:
        """Return the answers to that call of a service, unless `context` is of a call about one router alone."""
        if not self.names or ONE_ROUTER in dict(context.invocation_metadata() or ()):
            return []
        calls = (self._ask(name, getattr(kind(self._channel(name)), method), message) for name in self.names)
        return [answer for answer in await asyncio.gather(*calls) if answer is not None]

    async def read_dashboard(self, router: str, ask: bytes) -> bytes:
        """Return a part of the data of another router's page, as JSON. Raises BatonError."""
        if router not in self.names:
            raise RequestNotFound(f"there is no router {router!r} here; the others are {self.names}")
        try:
            read = self._channel(router).unary_unary(DASHBOARD)
            return await read(ask, timeout=_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise typed(failure, router) from None

    async def close(self) -> None:
        """End every call."""
        for channel in self._channels.values():
            await channel.close()

    async def _ask(self, name: str, call: Any, message: Any) -> Any:
        try:
            return await call(message, timeout=_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            if failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                log.warning("%s", typed(failure, name))
            return None  # it does not answer, or knows nothing of this

    def _target(self, name: str) -> str:
        return operator_port.target_of(self._config.router.operator, self._config.cluster.name, name)

    def _channel(self, name: str) -> grpc.aio.Channel:
        target = self._target(name)
        if (channel := self._channels.get(target)) is None:
            channel = self._channels[target] = grpc.aio.insecure_channel(target, OPTIONS)
        return channel


def add_status(status: cluster_pb2.GetStatusResponse, other: cluster_pb2.GetStatusResponse) -> None:
    """Add another router's status: that router itself, its requests, and its attempts on each worker."""
    status.processes.insert(1, other.processes[0])
    attempts = {process.incarnation: process.attempts for process in other.processes[1:]}
    for process in status.processes:
        process.attempts += attempts.get(process.incarnation, 0)
    for field in other.counts.DESCRIPTOR.fields:
        setattr(status.counts, field.name, getattr(status.counts, field.name) + getattr(other.counts, field.name))
    if status.HasField("bottleneck") and other.HasField("bottleneck"):
        # Each tells the use that its own requests make. What one worker more would do can't be added.
        mine, more = status.bottleneck, other.bottleneck
        status.bottleneck.CopyFrom(
            cluster_pb2.Bottleneck(prefill=mine.prefill + more.prefill, decode=mine.decode + more.decode)
        )


def newest(
    mine: list[explain_pb2.RequestSummary], others: list[explain_pb2.ListRequestsResponse], count: int
) -> list[explain_pb2.RequestSummary]:
    """Return the newest requests of all routers, newest first."""
    everyone = [*mine, *(request for other in others for request in other.requests)]
    return sorted(everyone, key=lambda request: request.age_ms)[:count]
