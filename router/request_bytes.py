"""Requests out of the bytes that clients send: bounded before they are parsed, and never a traceback.

The router parses every request on its event loop, where each stream's tokens pass too. So the size of every field is
read from the bytes first, which costs no more than its few fields: a prompt that no context can hold is refused
unparsed. Larger requests are parsed one at a time, with a turn of the loop after each. gRPC applies its own limit
(`Limits.message`) to what a compressed message expands to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baton.errors import BatonError, ContextTooLong, InvalidRequest
from router.model_files import ServedModel

# The numbers of the fields that hold a prompt, in GenerateRequest as in WarmRequest.
_TEXT, _TOKEN_IDS = 2, 3
_WITH_PROMPT = frozenset(("/baton.v1.Generation/Generate", "/baton.v1.Cache/Warm"))
_OTHER_BYTES = 128 * 2**10  # of all fields but the prompt: 16 stop strings and 1,000 stop tokens take less
_MESSAGE_BYTES = 2**20
_MAX_FIELDS = 2_048  # at the top of a message, each of which is looked at
_ID_BYTES = 6  # of a token id and its tag, at most
_LARGE = 64 * 2**10  # bytes; parsing less takes well below a millisecond

Deserialize = Callable[[bytes], Any]
Abort = Callable[[Any, BatonError], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """How many bytes a request may have, by the model's context."""

    max_context: int  # tokens
    text: int  # bytes of a prompt's text, in UTF-8
    token_ids: int  # bytes of a prompt's token ids, as protobuf writes them

    @classmethod
    def of(cls, model: ServedModel) -> Limits:
        return cls(model.limits.max_context, model.max_text_bytes, _ID_BYTES * model.limits.max_context + 16)

    @property
    def message(self) -> int:
        """Bytes of a whole message. Of a small context some more, so that most clients get an error that says why."""
        return max(max(self.text, self.token_ids) + _OTHER_BYTES, _MESSAGE_BYTES)

    def check(self, data: bytes, with_prompt: bool) -> None:
        """Raises InvalidRequest for bytes that are no message or too many; ContextTooLong for too long a prompt."""
        sizes = _sizes(data)
        if with_prompt:
            if (size := sizes.pop(_TEXT, 0)) > self.text:
                raise ContextTooLong(
                    f"a prompt of {size} bytes of text exceeds the model's context of {self.max_context} tokens, "
                    f"which hold at most {self.text} bytes; send a shorter prompt"
                )
            if (size := sizes.pop(_TOKEN_IDS, 0)) > self.token_ids:
                raise ContextTooLong(
                    f"a prompt of {size} bytes of token ids exceeds the model's context of {self.max_context} tokens; "
                    "send a shorter prompt"
                )
        if (size := sum(sizes.values())) > _OTHER_BYTES:
            raise InvalidRequest(
                f"the request's fields take {size} bytes besides its prompt; at most {_OTHER_BYTES} may"
            )


class RequestParser(grpc.aio.ServerInterceptor):
    """Parses the requests of every service of a server. What is no request ends with INVALID_ARGUMENT."""

    def __init__(self, limits: Limits, abort: Abort) -> None:
        """`abort` ends an RPC with an error's status."""
        self._limits = limits
        self._abort = abort
        self._large = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        deserialize, serialize = handler.request_deserializer, handler.response_serializer
        with_prompt = handler_call_details.method in _WITH_PROMPT
        if handler.request_streaming:  # reflection alone: bytes that are no question ask for nothing
            return grpc.stream_stream_rpc_method_handler(
                handler.stream_stream, _or_empty(deserialize), serialize
            )  # fmt: skip
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def serve(data: bytes, context: Any) -> Any:
            try:
                request = await self._parse(data, deserialize, with_prompt)
            except BatonError as error:
                return await self._abort(context, error)
            return await behaviour(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(serve, None, serialize)

    async def _parse(self, data: bytes, deserialize: Deserialize, with_prompt: bool) -> Any:
        """Raises InvalidRequest."""
        self._limits.check(data, with_prompt)
        if len(data) <= _LARGE:
            return _parsed(data, deserialize)
        async with self._large:
            request = _parsed(data, deserialize)
            await asyncio.sleep(0)  # what has become due meanwhile comes before the next large request
            return request


def _parsed(data: bytes, deserialize: Deserialize) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        raise _garbage(data) from None


def _or_empty(deserialize: Deserialize) -> Deserialize:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data[:_OTHER_BYTES])
        except DecodeError:
            return deserialize(b"")

    return parse


def _sizes(data: bytes) -> dict[int, int]:
    """Bytes of a message's fields by number, added up where a field is repeated. Raises InvalidRequest."""
    sizes: dict[int, int] = {}
    at = fields = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        match tag & 7:  # the wire type
            case 0:  # a varint
                _, at = _varint(data, at)
            case 1:  # 64 bits
                at += 8
            case 2:  # text, bytes, a message or packed numbers
                length, at = _varint(data, at)
                at += length
            case 5:  # 32 bits
                at += 4
            case _:
                raise _garbage(data)
        fields += 1
        if at > len(data) or not tag >> 3:
            raise _garbage(data)
        if fields > _MAX_FIELDS:
            raise InvalidRequest(f"the request has more than {_MAX_FIELDS} fields; no request needs as many")
        sizes[tag >> 3] = sizes.get(tag >> 3, 0) + at - start
    return sizes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and where it ends. Raises InvalidRequest."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _garbage(data)


def _garbage(data: bytes) -> InvalidRequest:
    return InvalidRequest(f"the request's {len(data)} bytes are no message of this method; send protobuf of baton.v1")
