"""Requests under way: their deltas as they come, and their results at the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from baton.client.chat_results import ChatAnswer, ChatCollector, ChatDelta, EventDecoder
from baton.client.connection import ClientConnection, error_of, expired, typed
from baton.client.results import Generated, OutputCollector, OutputDelta
from baton.errors import DeadlineExpired, RequestCancelled, Unavailable
from baton.futures import looked_at

if TYPE_CHECKING:
    from baton.v1 import generation_pb2

D = TypeVar("D")
R = TypeVar("R")


class AsyncStream(Generic[D, R]):
    """One request under way, since it was made.

    Iterate over it for the deltas, or await `result`. `cancel`, or leaving `async with`, ends the request everywhere in
    the cluster unless it has ended. All reading raises the BatonError that the request ended in."""

    async def read(self) -> D | None:
        """Return the next delta; None after the last one."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End the request. Its reader gets RequestCancelled."""
        raise NotImplementedError

    async def results(self) -> tuple[R, ...]:
        """Read to the end; return the result of every sample."""
        while await self.read() is not None:
            pass
        return self._results()

    async def result(self) -> R:
        """Read to the end; return the result, of several samples the first one's."""
        return (await self.results())[0]

    def _results(self) -> tuple[R, ...]:
        raise NotImplementedError

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> D:
        if (delta := await self.read()) is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncGenerationStream(AsyncStream[OutputDelta, Generated]):
    """A call of `Generate`."""

    def __init__(
        self, connection: ClientConnection, request: generation_pb2.GenerateRequest, timeout: float | None
    ) -> None:
        from baton.v1 import generation_pb2_grpc

        stub = connection.public(generation_pb2_grpc.GenerationStub)
        self._address = connection.address
        self._call = stub.Generate(request, timeout=timeout, metadata=connection.metadata)
        self._collector = OutputCollector()

    async def read(self) -> OutputDelta | None:
        import grpc.aio

        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise typed(error, self._address, late=DeadlineExpired) from None
            except asyncio.CancelledError:
                raise_if_ours()
                raise RequestCancelled("the client has cancelled the request") from None
            if message is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
                return None
            if (delta := self._collector.add_message(message)) is not None:
                return delta

    def cancel(self) -> None:
        self._call.cancel()

    def _results(self) -> tuple[Generated, ...]:
        if not (finished := self._collector.finished):
            raise Unavailable("the stream ended without saying why; the router may have been killed")
        return finished


class AsyncChatStream(AsyncStream[ChatDelta, ChatAnswer]):
    """A call of /v1/chat/completions."""

    def __init__(self, connection: ClientConnection, body: Mapping[str, Any], timeout: float | None) -> None:
        self._session, self._url = connection.http("/v1/chat/completions")
        self._timeout = timeout
        self._deltas = deque[ChatDelta]()
        self._collector = ChatCollector()
        self._events = EventDecoder()
        self._response: Any = None
        self._opening = asyncio.ensure_future(self._open(body))
        self._opening.add_done_callback(looked_at)

    async def read(self) -> ChatDelta | None:
        import aiohttp

        try:
            if self._response is None:
                self._response = await self._opening
            while not self._deltas:
                if self._events.done:
                    return None
                if not (data := await self._response.content.readany()):
                    raise Unavailable("the stream ended without saying why; the router may have been killed")
                for event in self._events.feed(data):
                    self._deltas.extend(self._collector.add_chunk(event))
            return self._deltas.popleft()
        except TimeoutError:
            raise expired(self._url) from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"no router answers at {self._url}: {error}") from None
        except asyncio.CancelledError:
            raise_if_ours()
            raise RequestCancelled("the client has cancelled the request") from None

    def cancel(self) -> None:
        self._opening.cancel()
        if self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().close()

    def _results(self) -> tuple[ChatAnswer, ...]:
        return self._collector.answers()

    async def _open(self, body: Mapping[str, Any]) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self._timeout, sock_connect=10)
        response = await self._session.post(self._url, json=body, timeout=limit)
        if response.status == 200:
            return response
        async with response:
            text = await response.text()
        raise error_of(response.status, text, response.headers)


def raise_if_ours() -> None:
    """Raise CancelledError if it is the running task that is cancelled, and not the call that it waits for."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
