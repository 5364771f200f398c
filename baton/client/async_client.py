"""The client for asyncio programs, and the one that the blocking client runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from baton.client.connection import ClientConnection, TlsArgument, typed
from baton.client.options import ChatOptions, PinOptions, SamplingOptions, generate_request, pin_request
from baton.client.streams import AsyncChatStream, AsyncGenerationStream, raise_if_ours
from baton.errors import RequestCancelled

if TYPE_CHECKING:
    from baton.v1 import cache_pb2, cluster_pb2, explain_pb2


class AsyncClient:
    """Connections to one router: its public gRPC port, its operator's port and its HTTP API, each opened when needed.

    The router's errors come back as the classes of `baton.errors`, with `retry_after_ms` where the router told one. No
    call is repeated. `timeout` is in seconds, for the whole call."""

    def __init__(
        self,
        address: str = "",
        operator: str = "",
        *,
        http: str = "",
        api_key: str | None = None,
        tls: TlsArgument = False,
        one_router: bool = False,
    ) -> None:
        """Name the addresses; nothing is connected yet.

        `address` (host:port) serves `generate`, `operator` (unix:PATH or host:port) the operator's calls, `http` (a URL
        or host:port) `chat`. With none of them, they are those of a local cluster named "baton". A client with
        `operator` alone sends its health checks there.

        `api_key`: by default $BATON_API_KEY. `tls`: True to trust the public authorities, a PEM file of those to trust,
        or a ClientTls. It holds for `address` and `http`; the operator's port speaks no TLS. `one_router`: the
        operator's calls are about the router at `operator` alone, and not about all routers of its cluster."""
        self._connection = ClientConnection(address, operator, http, api_key, tls, one_router=one_router)

    @property
    def address(self) -> str:
        """The public gRPC target, or ""."""
        return self._connection.address

    @property
    def operator(self) -> str:
        """The operator's gRPC target, or ""."""
        return self._connection.operator

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncGenerationStream:
        """Start a request from a text or token ids. Call it within a running event loop. Raises BatonError."""
        return AsyncGenerationStream(self._connection, generate_request(prompt, options), timeout)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncChatStream:
        """Start a chat from messages in OpenAI's form, or from the text of one user's message. Raises BatonError."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        fields = {name: value for name, value in options.items() if value is not None}
        body = {"messages": list(messages), **fields, "stream": True, "stream_options": {"include_usage": True}}
        return AsyncChatStream(self._connection, body, timeout)

    async def serving(self, timeout: float = 2.0) -> bool:
        """Whether the router reports that the cluster serves; False if it does not answer."""
        from grpc_health.v1 import health_pb2

        answer = await self._check(timeout)
        return answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING

    async def answers(self, timeout: float = 1.0) -> bool:
        """Whether the router answers a health check at all, serving or not."""
        return await self._check(timeout) is not None

    # --- the operator's calls ----------------------------------------------------------------------------------------

    async def status(self, timeout: float = 2.0) -> cluster_pb2.GetStatusResponse:
        """Return the cluster's status. Raises BatonError: Unavailable if no router answers."""
        from baton.v1 import cluster_pb2

        return await self._cluster("GetStatus", cluster_pb2.GetStatusRequest(), timeout)

    async def explain(self, request_id: str, timeout: float = 5.0) -> explain_pb2.ExplainResponse:
        """Return the record of a recent request. Raises BatonError: RequestNotFound if there is none."""
        from baton.v1 import explain_pb2

        return await self._cluster("Explain", explain_pb2.ExplainRequest(request_id=request_id), timeout)

    async def requests(self, last: int = 0, timeout: float = 5.0) -> list[explain_pb2.RequestSummary]:
        """Return the last requests, newest first (0: the router's default number). Raises BatonError."""
        from baton.v1 import explain_pb2

        answer = await self._cluster("ListRequests", explain_pb2.ListRequestsRequest(last=last), timeout)
        return list(answer.requests)

    async def profile(self, process: str, steps: int = 0, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """Have a worker or store trace its next steps (0: the router's default).

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict while another trace is made.
        """
        from baton.v1 import cluster_pb2

        return await self._cluster("Profile", cluster_pb2.ProfileRequest(process=process, steps=steps), timeout)

    async def stop_profile(self, process: str, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """End the trace of a worker or store early; the steps so far are written.

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict if it is not tracing.
        """
        from baton.v1 import cluster_pb2

        return await self._cluster("Profile", cluster_pb2.ProfileRequest(process=process, stop=True), timeout)

    async def drain(
        self, worker: str, *, now: bool = False, undo: bool = False, timeout: float = 5.0
    ) -> cluster_pb2.Process:
        """Stop placing work on a worker, or resume it with `undo`; return the worker's status.

        Raises BatonError: ProcessNotFound if no such worker is live.
        """
        from baton.v1 import cluster_pb2

        request = cluster_pb2.DrainRequest(worker=worker, now=now, undo=undo)
        return (await self._cluster("Drain", request, timeout)).worker

    async def set_role(
        self,
        worker: str,
        role: Literal["prefill", "decode"],
        *,
        patience: float | None = None,
        timeout: float = 5.0,
    ) -> cluster_pb2.Process:
        """Change a worker's role and return its status. Raises BatonError: ProcessNotFound, InvalidRequest.

        After `patience` seconds (None: the router's default) its remaining requests move to other workers.
        """
        from baton.v1 import cluster_pb2

        code = cluster_pb2.ROLE_PREFILL if role == "prefill" else cluster_pb2.ROLE_DECODE
        patience_ms = None if patience is None else round(patience * 1_000)
        request = cluster_pb2.SetRoleRequest(worker=worker, role=code, patience_ms=patience_ms)
        return (await self._cluster("SetRole", request, timeout)).worker

    async def pin_prefix(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[PinOptions]
    ) -> cache_pb2.PinPrefixResponse:
        """Compute and pin a prefix for `ttl_ms` (an hour by default); return once it is pinned. Raises BatonError."""
        return await self._cache("PinPrefix", pin_request(prompt, options), timeout)

    async def unpin(self, pin: str, tenant: str = "", timeout: float = 5.0) -> None:
        """End a pin of a tenant. Raises BatonError: PinNotFound if there is none of that name."""
        from baton.v1 import cache_pb2

        await self._cache("UnpinPrefix", cache_pb2.UnpinPrefixRequest(id=pin, tenant=tenant), timeout)

    async def pins(self, timeout: float = 5.0) -> list[cache_pb2.Pin]:
        """Return all tenants' pins, ordered by name. Raises BatonError."""
        from baton.v1 import cache_pb2

        return list((await self._cache("ListPins", cache_pb2.ListPinsRequest(), timeout)).pins)

    # --- connections -------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what is under way and close the connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _cluster(self, method: str, message: Any, timeout: float | None) -> Any:
        from baton.v1 import cluster_pb2_grpc

        return await self._ask(
            getattr(self._connection.private(cluster_pb2_grpc.ClusterStub), method), message, timeout
        )

    async def _cache(self, method: str, message: Any, timeout: float | None) -> Any:
        from baton.v1 import cache_pb2_grpc

        return await self._ask(getattr(self._connection.private(cache_pb2_grpc.CacheStub), method), message, timeout)

    async def _ask(self, call: Any, message: Any, timeout: float | None) -> Any:
        import grpc.aio

        try:
            return await call(message, timeout=timeout, metadata=self._connection.metadata)
        except grpc.aio.AioRpcError as error:
            raise typed(error, self.operator) from None
        except asyncio.CancelledError:
            raise_if_ours()
            raise RequestCancelled("the client has been closed") from None

    async def _check(self, timeout: float) -> Any:
        """The answer to a health check, or None."""
        import grpc.aio
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        connection, kind = self._connection, health_pb2_grpc.HealthStub
        stub = connection.public(kind) if connection.address else connection.private(kind)
        try:
            return await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout, metadata=connection.metadata)
        except grpc.aio.AioRpcError:
            return None
