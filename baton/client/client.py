"""The blocking client: `AsyncClient`, run on an event loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from baton.client.async_client import AsyncClient
from baton.client.chat_results import ChatAnswer, ChatDelta
from baton.client.connection import TlsArgument
from baton.client.loop_thread import LoopThread
from baton.client.options import ChatOptions, Params, Prompt, SamplingOptions, is_many
from baton.client.results import Generated, OutputDelta
from baton.client.streams import AsyncStream
from baton.errors import ConfigError

D = TypeVar("D")
P = ParamSpec("P")
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

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class GenerationStream(BlockingStream[OutputDelta, Generated]):
    """A call of `Generate`."""


class ChatStream(BlockingStream[ChatDelta, ChatAnswer]):
    """A call of /v1/chat/completions."""


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a coroutine of `AsyncClient` as a method of `Client`."""

    @wraps(method)
    def run(client: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(method(client._client, *args, **kwargs))

    return run


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
        """The operator's address, or ""."""
        return self._client.operator

    # --- requests ----------------------------------------------------------------------------------------------------

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload] - of an empty list
        self, prompts: Prompt, params: SamplingOptions | None = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> GenerationStream: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[tuple[Generated, ...]]: ...  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Any = None, *, timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> GenerationStream | list[tuple[Generated, ...]]:  # fmt: skip
        """Start a request from a text or token ids, or serve several prompts, as `AsyncClient` has it. Raises
        BatonError."""
        if is_many(prompts):
            return self._run(self._client.generate(prompts, params, timeout=timeout, **options))
        one: Any = prompts
        return self._start(GenerationStream, lambda: self._client.generate(one, params, timeout=timeout, **options))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatStream:
        """Start a chat from messages in OpenAI's form, or from the text of one user's message. Raises BatonError."""
        return self._start(ChatStream, lambda: self._client.chat(messages, timeout=timeout, **options))

    serving = _blocking(AsyncClient.serving)
    answers = _blocking(AsyncClient.answers)

    # --- the operator's calls ----------------------------------------------------------------------------------------

    status = _blocking(AsyncClient.status)
    explain = _blocking(AsyncClient.explain)
    requests = _blocking(AsyncClient.requests)
    profile = _blocking(AsyncClient.profile)
    stop_profile = _blocking(AsyncClient.stop_profile)
    drain = _blocking(AsyncClient.drain)
    set_role = _blocking(AsyncClient.set_role)
    reload_weights = _blocking(AsyncClient.reload_weights)
    pin_prefix = _blocking(AsyncClient.pin_prefix)
    unpin = _blocking(AsyncClient.unpin)
    pins = _blocking(AsyncClient.pins)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    adapters = _blocking(AsyncClient.adapters)

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

    def __exit__(self, *_: object) -> None:
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
