"""Sends responses over HTTP as they are generated: one JSON object at the end, or server-sent events.

A response runs the generations of its request to their end. It cancels them if the client closes its connection, or
reads nothing after the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import asdict
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from baton.messages import TOKEN_BYTES
from router.events import RequestEnded
from router.frontend.api.errors import error_response
from router.frontend.api.protocol import GenerationOrder
from router.frontend.api.response_builder import Choice, ResponseBuilder
from router.frontend.detokenizer import TextStream
from router.frontend.generation import Generation, GenerationService
from router.frontend.output_stream import News, Output, merged

_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_JSON = "application/json"
_ENCODED_AT_ONCE = 500  # members of a list
_ENCODED_WHOLE = 2_000  # bytes of a response, about, up to which it is encoded at once
_SCORED_BYTES = 64  # of a response, for each log-probability
STATUS_SECONDS = 0.5  # in which a request that is refused has a status of its own
ALIVE_SECONDS = 10.0  # without an event, after which a stream shows that it lives: proxies close quiet connections


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces. msgspec holds the GIL while it encodes one."""
    if isinstance(value, Struct):
        config, members = value.__struct_config__, asdict(value)
        tag = {config.tag_field: config.tag} if config.tag_field else {}
        value = tag | {name: member for name, member in members.items() if member is not UNSET}
    if isinstance(value, dict):
        for number, (name, member) in enumerate(value.items()):
            yield (b"," if number else b"{") + msgspec.json.encode(name) + b":"
            yield from json_pieces(member)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > _ENCODED_AT_ONCE:
        for start in range(0, len(value), _ENCODED_AT_ONCE):
            yield (b"," if start else b"[") + msgspec.json.encode(value[start : start + _ENCODED_AT_ONCE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and any(isinstance(one, dict | Struct) for one in value):
        for number, member in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(member)
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def _size(choice: Choice) -> int:
    """Return about how many bytes a choice's part of a response has, by what takes time to build."""
    scored = len(choice.logprobs) + sum(1 + len(one.top) for one in choice.prompt_logprobs)
    return TOKEN_BYTES * len(choice.tokens) + _SCORED_BYTES * scored


class _GeneratedResponse(Response):
    """A response that runs generations to their end, or until the client has gone."""

    def __init__(
        self, order: GenerationOrder, builder: ResponseBuilder, generations: Sequence[Generation], linger: float,
        name: str, service: GenerationService,
    ) -> None:  # fmt: skip
        self.builder, self.generations, self._linger, self._apart = builder, generations, linger, service.apart
        if order.logprobs is not None:
            for choice, generation in zip(builder.choices, generations, strict=True):
                choice.stream = TextStream.of(builder.options.names.tokenizer, generation.request)
        self._stops = frozenset(order.fields.stop_token_ids or ())
        self.raw_headers = [(b"x-request-id", name.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and cancel whatever has not ended."""
        # In a task of its own, each output resumes four coroutines and not fourteen.
        answering = asyncio.create_task(self._answer(scope, receive, send))
        watching = asyncio.create_task(self._watch(receive, answering))
        try:
            await answering
        except asyncio.CancelledError:
            if not watching.done():
                raise
            scope.get("state", {}).get("abort", lambda: None)()
        finally:
            watching.cancel()
            for generation in self.generations:
                generation.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive, answering: asyncio.Task[None]) -> None:
        """End the answer when the client closes its connection, or reads nothing after the end."""
        before = None
        while True:
            try:
                async with asyncio.timeout(self._linger):
                    await disconnected(receive)
                break
            except TimeoutError:
                now = [(one.stream.ended, one.stream.reads) for one in self.generations]
                if now == before and all(ended for ended, _ in now):
                    break
                before = now
        answering.cancel()

    def _outputs(self) -> contextlib.aclosing[AsyncGenerator[tuple[int, News], None]]:
        """Yield what comes of each choice, as it comes."""
        return contextlib.aclosing(merged([generation.stream for generation in self.generations]))

    def _end(self, choice: Choice, end: RequestEnded) -> None:
        """Note the end of a choice. Raises the error that it ended in."""
        reason, choice.end = end.finish_reason(), end
        choice.stop_reason = self.generations[choice.index].stream.stop_string
        if reason == "stop" and choice.stop_reason is None and choice.tokens:
            last = choice.tokens[-1]
            choice.stop_reason = last if last in self._stops else None


class WholeResponse(_GeneratedResponse):
    """One JSON object at the end."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._outputs() as outputs:
                async for index, news in outputs:
                    choice = self.builder.choices[index]
                    if isinstance(news, Output):
                        self.builder.add_piece(choice, news)
                    else:
                        self._end(choice, news)
                        choice.finish()
            size = sum(map(_size, self.builder.choices))
            encoded = msgspec.json.encode if size < _ENCODED_WHOLE else lambda whole: b"".join(json_pieces(whole))
            body = await self._apart(size, lambda: encoded(self.builder.whole()))
            response = Response(body, media_type=_JSON)
        except BatonError as error:
            response = error_response(error, self.builder.failed)
        response.headers.update(self.headers)
        await response(scope, receive, send)


class EventStream(_GeneratedResponse):
    """Server-sent events, an output at a time. The headers do not wait for the first one."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + STATUS_SECONDS  # of a sign of life
        self._timer = loop.call_at(self._due, self._wake)
        try:
            await self._stream(scope, receive, send)
        finally:
            self._timer.cancel()

    def _wake(self) -> None:
        """Have an output without content read, where no other one has come in time."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self._due = loop.time() + ALIVE_SECONDS
            if (quiet := next((one.stream for one in self.generations if not one.stream.ended), None)) is not None:
                quiet.wake()
        self._timer = loop.call_at(self._due, self._wake)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        builder, opened, loop = self.builder, False, asyncio.get_running_loop()
        events: list[bytes] = []  # that are not sent yet
        try:
            async with self._outputs() as outputs:
                async for index, news in outputs:
                    choice = builder.choices[index]
                    if isinstance(news, RequestEnded):
                        self._end(choice, news)
                    if not opened:
                        opened = True
                        headers = [
                            (b"content-type", _EVENT_STREAM), (b"cache-control", b"no-cache"),
                            (b"x-accel-buffering", b"no"), *self.raw_headers,
                        ]  # fmt: skip
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        events += map(builder.event, builder.opening())
                    elif isinstance(news, Output) and not news.size:
                        events.append(builder.sign_of_life())
                    if isinstance(news, Output):
                        # The first chunk of an echo has all of the prompt's log-probabilities.
                        scored = choice.stream is not None and not choice.characters
                        size = _SCORED_BYTES * len(choice.prompt_scores) if scored else 0
                        work = partial(builder.output, choice, news)
                        events += await self._apart(size, work) if size else work()
                    else:
                        events += map(builder.event, builder.ending(choice))
                        if all(one.end is not None for one in builder.choices):
                            continue  # the rest goes with it
                    if events:
                        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                        events.clear()
                        self._due = loop.time() + ALIVE_SECONDS
            events += map(builder.event, builder.closing())
        except BatonError as error:
            if not opened:
                response = error_response(error, builder.failed)
                response.headers.update(self.headers)
                await response(scope, receive, send)
                return
            events.append(builder.event(msgspec.to_builtins(builder.failed(error))))
        body = b"".join((*events, builder.end_of_stream))
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection, once its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
