"""The client for asyncio programs, and the one that the blocking client runs."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack, overload

from baton import operator_api as api
from baton.client.connection import ClientConnection, TlsArgument
from baton.client.options import (
    ChatOptions,
    Params,
    PinOptions,
    Prompt,
    SamplingOptions,
    generate_request,
    is_many,
    options_of,
    pin_call,
)
from baton.client.results import Generated
from baton.client.streams import AsyncChatStream, AsyncGenerationStream
from baton.errors import BatonError
from baton.messages import WorkerRole

A = TypeVar("A")

_AT_ONCE = 64  # prompts of a call that are under way


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
        """The operator's address, or ""."""
        return self._connection.operator

    # --- requests ----------------------------------------------------------------------------------------------------

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload] - of an empty list
        self, prompts: Prompt, params: SamplingOptions | None = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerationStream: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Coroutine[Any, Any, list[tuple[Generated, ...]]]: ...  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerationStream | Coroutine[Any, Any, list[tuple[Generated, ...]]]:  # fmt: skip
        """Start a request from a text or token ids. Call it within a running event loop. Raises BatonError.

        Several prompts: return a coroutine with the results of each, in their order. `params` are options of all of
        them, or for each one its own. They come before `options`, which all have. The first error ends the others."""
        if is_many(prompts):
            requests = map(generate_request, prompts, options_of(len(prompts), params, options))
            return self._generate_all(list(requests), timeout)
        one: Any = prompts
        (chosen,) = options_of(1, params, options)
        return AsyncGenerationStream(self._connection, generate_request(one, chosen), timeout)

    async def _generate_all(self, requests: Sequence[Any], timeout: float | None) -> list[tuple[Generated, ...]]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def results(request: Any) -> tuple[Generated, ...]:
            async with turns, AsyncGenerationStream(self._connection, request, timeout) as stream:
                return await stream.results()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(results(request)) for request in requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

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
        return await self._unready(timeout) is False

    async def answers(self, timeout: float = 1.0) -> bool:
        """Whether the router answers a health check at all, serving or not."""
        return await self._unready(timeout) is not None

    # --- the operator's calls ----------------------------------------------------------------------------------------

    async def ask(self, call: api.OperatorCall[A], timeout: float | None) -> A:
        """Make a call of `baton.operator_api` and return its answer. Raises BatonError."""
        return await self._connection.ask_operator(call, timeout)

    async def status(self, timeout: float = 2.0) -> api.Status:
        """Return the cluster's status. Raises BatonError: Unavailable if no router answers."""
        return await self.ask(api.GetStatus(), timeout)

    async def explain(self, request_id: str, timeout: float = 5.0) -> api.Explanation:
        """Return the record of a recent request. Raises BatonError: RequestNotFound if there is none."""
        return await self.ask(api.Explain(request_id), timeout)

    async def requests(self, last: int = 0, timeout: float = 5.0, session: str = "") -> list[api.RequestSummary]:
        """Return the last requests, newest first (0: the router's default number), or those of a session.

        Raises BatonError.
        """
        return await self.ask(api.ListRequests(last, session), timeout)

    async def profile(self, process: str, steps: int = 0, timeout: float = 5.0) -> api.TraceFile:
        """Have a worker or store trace its next steps (0: the router's default).

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict while another trace is made.
        """
        return await self.ask(api.Profile(process, steps), timeout)

    async def stop_profile(self, process: str, timeout: float = 5.0) -> api.TraceFile:
        """End the trace of a worker or store early; the steps so far are written.

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict if it is not tracing.
        """
        return await self.ask(api.Profile(process, stop=True), timeout)

    async def drain(self, worker: str, *, now: bool = False, undo: bool = False, timeout: float = 5.0) -> api.Process:
        """Stop placing work on a worker, or resume it with `undo`; return the worker's status.

        Raises BatonError: ProcessNotFound if no such worker is live.
        """
        return await self.ask(api.Drain(worker, now, undo), timeout)

    async def set_role(
        self, worker: str, role: WorkerRole, *, patience: float | None = None, timeout: float = 5.0
    ) -> api.Process:
        """Change a worker's role and return its status. Raises BatonError: ProcessNotFound, InvalidRequest.

        After `patience` seconds (None: the router's default) its remaining requests move to other workers.
        """
        return await self.ask(api.SetRole(worker, role, None if patience is None else round(patience * 1_000)), timeout)

    async def reload_weights(
        self, path: str, *, patience: float | None = None, model: str = "", timeout: float = 5.0
    ) -> None:
        """Begin to replace the weights of a model's workers by those of another checkpoint. Raises BatonError.

        After `patience` seconds (None: the router's default) requests that have tokens fail.
        """
        ms = None if patience is None else round(patience * 1_000)
        await self.ask(api.ReloadWeights(path, ms, model), timeout)

    async def pin_prefix(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[PinOptions]
    ) -> api.NewPin:
        """Compute and pin a prefix for `ttl_ms` (an hour by default); return once it is pinned. Raises BatonError."""
        return await self.ask(pin_call(prompt, options, timeout), timeout)

    async def unpin(self, pin: str, tenant: str = "", timeout: float = 5.0) -> None:
        """End a pin of a tenant. Raises BatonError: PinNotFound if there is none of that name."""
        await self.ask(api.Unpin(pin, tenant), timeout)

    async def pins(self, timeout: float = 5.0) -> list[api.Pin]:
        """Return all tenants' pins, ordered by name. Raises BatonError."""
        return await self.ask(api.ListPins(), timeout)

    async def load_adapter(self, name: str, path: str, *, model: str = "", timeout: float = 150.0) -> None:
        """Have all workers of a model load the LoRA adapter in a directory. Raises BatonError, also where one can't."""
        await self.ask(api.LoadAdapter(name, path, model=model), timeout)

    async def unload_adapter(self, name: str, timeout: float = 5.0) -> None:
        """End a LoRA adapter. Raises BatonError: ModelMismatch if there is none of that name."""
        await self.ask(api.UnloadAdapter(name), timeout)

    async def adapters(self, timeout: float = 5.0) -> list[api.LoraAdapter]:
        """Return the LoRA adapters that clients may name. Raises BatonError."""
        return await self.ask(api.ListAdapters(), timeout)

    # --- connections -------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what is under way and close the connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unready(self, timeout: float) -> bool | None:
        """Whether the router reports that it can't serve; None if it does not answer."""
        connection = self._connection
        if not connection.address:
            try:
                return bool(await self.ask(api.GetHealth(), timeout))
            except BatonError:
                return None
        import grpc.aio
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub, kinds = connection.public(health_pb2_grpc.HealthStub), health_pb2.HealthCheckResponse
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout, metadata=connection.metadata)
            return answer.status != kinds.SERVING
        except grpc.aio.AioRpcError:
            return None
