"""What every RPC passes before its handler: how many run at a time, and whether its message is one.

gRPC's own handling reads and parses a message before any code of ours runs, and answers bytes that are no message with
UNKNOWN and a traceback. The guard takes every RPC as a stream of raw messages instead. It reads the message itself,
bounds it for its method, parses it, and only then calls the handler.

gRPC's own limits bound the bytes of a message, the streams of a connection and the calls of a server. They give a call
whose message never comes no end, tell generation from health checks no more than a prompt's text from other fields, and
may be used up by clients without a key. 15 MiB of text are parsed within 0.1 s, 15 MiB of small fields within 2 s.

Open calls, health and reflection, need no key. They have places of their own, and take none from generation. Any
process that reaches the port may make them, and hold them for as long as it likes. So each kind is bounded in all, by
connection, and in the bytes of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import BatonError, DeadlineExpired, InvalidRequest, Overloaded, PayloadTooLarge
from baton.futures import looked_at
from router.frontend.identity import caller, note_refusal

_MESSAGE_S = 30.0  # seconds that a client has to send the message of an RPC that it has begun
_LARGE = 2**20  # bytes; the event loop goes on before, between and after the copies that a larger message takes
_MAX_FIELDS = 4_096  # at the top of a message that is large
_LENGTH_DELIMITED = 2  # a wire type of protobuf
_FIXED_BYTES = {1: 8, 5: 4}  # of wire types

Refuse = Callable[[Any, BatonError], Awaitable[NoReturn]]
Admit = Callable[[str, Mapping[str, str]], Callable[[], None]]
"""Takes the method and metadata of an RPC."""

OPEN_CALLS = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_OPEN_BYTES = 4_096  # of a message of theirs, which names a service or a symbol
_kinds: Any = health_pb2.HealthCheckResponse  # pyright: ignore[reportAttributeAccessIssue] - no stubs


class MessageGuard(grpc.aio.ServerInterceptor):
    """Stands before every handler of a server."""

    def __init__(
        self,
        refuse: Refuse,
        max_rpcs: int,
        max_bytes: int,
        texts: Mapping[str, Collection[int]],
        message_s: float = _MESSAGE_S,
        *,
        admit: Admit,
    ) -> None:
        """`max_bytes`: of a message; of those in `texts`, by method, without the fields that are named there. `admit`
        raises BatonError for a call that may not come in, and returns what is to be called after its end."""
        self.undecodable = 0  # messages so far
        self.rpcs = 0  # that are served, open calls aside
        self._places = places()
        self._refuse = refuse
        self._max_rpcs = max_rpcs
        self._max_bytes = max_bytes
        self._texts = texts
        self._message_s = message_s
        self._admit = admit
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method: str = handler_call_details.method
        try:
            leave = self._admit(method, _text_of(handler_call_details.invocation_metadata))
        except BatonError as error:
            return grpc.stream_stream_rpc_method_handler(partial(self._not_admitted, error, method))
        # This task runs the whole RPC, also while its message has not come.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: leave())
        if (guarded := self._guarded.get(method)) is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler
            guarded = self._guarded[method] = self._guard(method, handler)
        if method.startswith(OPEN_CALLS):
            return guarded
        if self.rpcs >= self._max_rpcs:
            return grpc.stream_stream_rpc_method_handler(self._full)
        self.rpcs += 1
        task.add_done_callback(self._ended)
        return guarded

    async def _not_admitted(self, error: BatonError, method: str, messages: Any, context: Any) -> None:
        """Answer without reading the message."""
        if not isinstance(error, Overloaded):
            note_refusal(method, context.peer(), error)
        await self._refuse(context, error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.rpcs -= 1

    async def _full(self, messages: Any, context: Any) -> None:
        """Answer without reading the message."""
        await self._refuse(
            context,
            Overloaded(f"{self.rpcs} RPCs are served at this time, as many as router.max_concurrent_rpcs allows"),
        )

    def _guard(self, method: str, handler: Any) -> Any:
        """The handler, behind our own reading of its messages."""
        parse: Callable[[bytes], Any] = handler.request_deserializer

        async def one(context: Any) -> Any:
            try:
                data = await self._received(context)
                if len(data) <= _LARGE:
                    return self._parsed(method, parse, data)
                return await asyncio.to_thread(self._parsed, method, parse, data)
            except BatonError as error:
                await self._refuse(context, error)

        async def answer_once(messages: Any, context: Any) -> None:
            # Written here: gRPC's own writing of a single answer logs a traceback where the client has gone.
            answer = await handler.unary_unary(await one(context), context)
            with connected():
                await context.write(answer)

        async def answer(messages: Any, context: Any) -> None:
            request = await one(context)
            with connected():
                await handler.unary_stream(request, context)  # which writes itself

        async def parsed(context: Any) -> AsyncIterator[Any]:
            try:
                while (data := await self._next(context)) is not None:
                    yield self._parsed(method, parse, data)
            except BatonError as error:
                await self._refuse(context, error)

        async def converse(messages: Any, context: Any) -> None:
            async for message in handler.stream_stream(parsed(context), context):
                with connected():
                    await context.write(message)

        serve = answer if handler.response_streaming else answer_once
        if handler.request_streaming:
            assert handler.response_streaming, (
                f"{method} takes a stream and gives one answer, which no service here does"
            )
            serve = converse
        places = next((places for places in self._places if method.startswith(places.kind)), None)
        if places is not None:
            serve = partial(self._in_place, places, serve)
        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _in_place(
        self, places: Places, serve: Callable[[Any, Any], Awaitable[None]], messages: Any, context: Any
    ) -> None:
        """Serve an open call, if there is a place for it."""
        with contextlib.ExitStack() as place:
            try:
                place.enter_context(places.hold_place(context.peer()))
            except BatonError as error:
                await self._refuse(context, error)
            await serve(messages, context)

    async def _received(self, context: Any) -> bytes:
        if (data := await self._next(context)) is None:
            raise InvalidRequest("the RPC has no message")
        return data

    async def _next(self, context: Any) -> bytes | None:
        """Return the next message; none: the client sends no more."""
        # Not cancelled when time is up: gRPC's core still holds what it is to be read into.
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(looked_at)
        done, _ = await asyncio.wait({reading}, timeout=self._message_s)
        if not done:
            raise DeadlineExpired(f"no message came within {self._message_s:g} s")
        data = reading.result()
        return None if data is grpc.aio.EOF else data  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it

    def _parsed(self, method: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
        """The message. Raises InvalidRequest."""
        if method.startswith(OPEN_CALLS) and len(data) > _OPEN_BYTES:
            raise InvalidRequest(f"the message has {len(data)} bytes; {method} takes at most {_OPEN_BYTES}")
        allowed = caller.get().max_body_bytes
        if allowed is not None and len(data) > allowed:
            raise PayloadTooLarge(
                f"the message has {len(data)} bytes, and the API key {caller.get().name!r} may send {allowed}"
            )
        try:
            if len(data) > self._max_bytes:
                fields = self._texts.get(method)
                rest = len(data) if fields is None else _without(data, fields)
                if rest > self._max_bytes:
                    beside = "" if fields is None else " beside its text"
                    raise InvalidRequest(
                        f"the message has {rest} bytes{beside}; at most {self._max_bytes} are taken for this model"
                    )
            return parse(data)
        except (DecodeError, _NoMessage):
            self.undecodable += 1
            raise InvalidRequest(f"{len(data)} bytes that are no message of {method}") from None


def _text_of(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


class _NoMessage(Exception):
    """Bytes that are no protobuf message."""


def _without(data: bytes, fields: Collection[int]) -> int:
    """How many bytes a message has without the last value of these length-delimited fields. Parses nothing else, since
    that would hold the event loop up. Raises _NoMessage."""
    at, value = 0, 0
    for _ in range(_MAX_FIELDS):
        if at == len(data):
            return len(data) - value
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == _LENGTH_DELIMITED:
            length, at = _varint(data, at)
            at += length
            if tag >> 3 in fields:
                value = length
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise _NoMessage
        if at > len(data):
            raise _NoMessage
    raise _NoMessage


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _NoMessage
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if not byte & 128:
            return number, at
    raise _NoMessage


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Take what gRPC can't write any more for what it is: the client has gone, which is no failure of the router."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


class Places:
    """How many calls of one kind run, in all and of each connection."""

    def __init__(self, kind: str, most: int, each: int) -> None:
        """`kind`: how the methods begin. `most`: in all. `each`: of one connection."""
        self.kind, self._most, self._each = kind, most, each
        self._running = Counter[str]()  # by connection

    @contextlib.contextmanager
    def hold_place(self, peer: str) -> Iterator[None]:
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
