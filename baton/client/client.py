"""The blocking client: `AsyncClient`, run on an event loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack

from baton.client.async_client import AsyncClient
from baton.client.chat_results import ChatAnswer, ChatDelta
from baton.client.connection import TlsArgument
from baton.client.loop_thread import LoopThread
from baton.client.options import ChatOptions, PinOptions, SamplingOptions
from baton.client.results import Generated, OutputDelta
from baton.client.streams import AsyncStream
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.v1 import cache_pb2, cluster_pb2, explain_pb2

D = TypeVar("D")
R = TypeVar("R")
T = TypeVar("T")


class BlockingStream(Generic[D, R]):
    """One request under way, since it was made.

    Iterate over it for the deltas, or call `result`. `cancel`, `close`, or leaving `with` ends the request everywhere
    in the cluster unless it has ended. All reading raises the BatonError that the request ended in."""

    def __init__(self, loop: LoopThread, stream: AsyncStream[D, R]) -> None:
        self._loop = loop
        self._stream = stream

    def results(self) -> tuple[R, ...]:
        """Read to the end; return the result of every sample."""
        return self._loop.run(self._stream.results())

    def result(self) -> R:
        """Read to the end; return the result, of several samples the first one's."""
        return self._loop.run(self._stream.result())

    def cancel(self) -> None:
        """End the request. A thread that reads it gets RequestCancelled."""
        self._loop.call(self._stream.cancel)

    close = cancel

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> D:
        if (delta := self._loop.run(self._stream.read())) is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class GenerationStream(BlockingStream[OutputDelta, Generated]):
    """A call of `Generate`."""


class ChatStream(BlockingStream[ChatDelta, ChatAnswer]):
    """A call of /v1/chat/completions."""


class Client:
    """What `AsyncClient` is, for programs without an event loop. Several threads may use one client."""

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
        """Name the addresses, as `AsyncClient` has them; nothing is connected yet."""
        self._client = AsyncClient(address, operator, http=http, api_key=api_key, tls=tls, one_router=one_router)
        self._loop: LoopThread | None = LoopThread.acquire()

    @property
    def address(self) -> str:
        """The public gRPC target, or ""."""
        return self._client.address

    @property
    def operator(self) -> str:
        """The operator's gRPC target, or ""."""
        return self._client.operator

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[SamplingOptions]
    ) -> GenerationStream:
        """Start a request from a text or token ids. Raises BatonError."""
        return self._start(GenerationStream, lambda: self._client.generate(prompt, timeout=timeout, **options))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatStream:
        """Start a chat from messages in OpenAI's form, or from the text of one user's message. Raises BatonError."""
        return self._start(ChatStream, lambda: self._client.chat(messages, timeout=timeout, **options))

    def serving(self, timeout: float = 2.0) -> bool:
        """Whether the router reports that the cluster serves; False if it does not answer."""
        return self._run(self._client.serving(timeout))

    def answers(self, timeout: float = 1.0) -> bool:
        """Whether the router answers a health check at all, serving or not."""
        return self._run(self._client.answers(timeout))

    # --- the operator's calls ----------------------------------------------------------------------------------------

    def status(self, timeout: float = 2.0) -> cluster_pb2.GetStatusResponse:
        """Return the cluster's status. Raises BatonError: Unavailable if no router answers."""
        return self._run(self._client.status(timeout))

    def explain(self, request_id: str, timeout: float = 5.0) -> explain_pb2.ExplainResponse:
        """Return the record of a recent request. Raises BatonError: RequestNotFound if there is none."""
        return self._run(self._client.explain(request_id, timeout))

    def requests(self, last: int = 0, timeout: float = 5.0) -> list[explain_pb2.RequestSummary]:
        """Return the last requests, newest first (0: the router's default number). Raises BatonError."""
        return self._run(self._client.requests(last, timeout))

    def profile(self, process: str, steps: int = 0, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """Have a worker or store trace its next steps (0: the router's default).

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict while another trace is made.
        """
        return self._run(self._client.profile(process, steps, timeout))

    def stop_profile(self, process: str, timeout: float = 5.0) -> cluster_pb2.ProfileResponse:
        """End the trace of a worker or store early; the steps so far are written.

        Raises BatonError: ProcessNotFound if no such process is live, TraceConflict if it is not tracing.
        """
        return self._run(self._client.stop_profile(process, timeout))

    def drain(self, worker: str, *, now: bool = False, undo: bool = False, timeout: float = 5.0) -> cluster_pb2.Process:
        """Stop placing work on a worker, or resume it with `undo`; return the worker's status.

        Raises BatonError: ProcessNotFound if no such worker is live.
        """
        return self._run(self._client.drain(worker, now=now, undo=undo, timeout=timeout))

    def set_role(
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
        return self._run(self._client.set_role(worker, role, patience=patience, timeout=timeout))

    def pin_prefix(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[PinOptions]
    ) -> cache_pb2.PinPrefixResponse:
        """Compute and pin a prefix for `ttl_ms` (an hour by default); return once it is pinned. Raises BatonError."""
        return self._run(self._client.pin_prefix(prompt, timeout=timeout, **options))

    def unpin(self, pin: str, tenant: str = "", timeout: float = 5.0) -> None:
        """End a pin of a tenant. Raises BatonError: PinNotFound if there is none of that name."""
        self._run(self._client.unpin(pin, tenant, timeout))

    def pins(self, timeout: float = 5.0) -> list[cache_pb2.Pin]:
        """Return all tenants' pins, ordered by name. Raises BatonError."""
        return self._run(self._client.pins(timeout))

    # --- connections -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what is under way and close the connections."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._client.close())
            finally:
                loop.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise _closed()
        return self._loop.run(coroutine)

    def _start(self, kind: Callable[[LoopThread, AsyncStream[D, R]], T], start: Callable[[], AsyncStream[D, R]]) -> T:
        async def started() -> AsyncStream[D, R]:
            return start()

        if self._loop is None:
            raise _closed()
        return kind(self._loop, self._loop.run(started()))


def _closed() -> ConfigError:
    return ConfigError("the client is closed; make another one")
