"""Reads the bodies of requests within bounds of time and size, and decodes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from baton.errors import BodyTimeout, InvalidRequest, Overloaded, PayloadTooLarge, UnsupportedEncoding, shown
from router.frontend.api.protocol import decode
from router.frontend.chat.repairs import Repairs, with_whole_characters
from router.frontend.generation import GenerationService
from router.frontend.identity import caller

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

_BODY_SECONDS = 30.0  # within which a body must have come
_OTHER_BYTES = 640 * 2**10  # of a body: everything but the prompt; a grammar has up to 512 KiB
_BYTES_PER_ID = 12  # of a token id as JSON
_BYTES_PER_BYTE = 6  # of text as JSON, where every character is escaped
_BYTES_AT_ONCE = 512 * 2**20  # of all bodies that are being read or decoded
_CONTAINERS = 2**17  # objects and lists of a body


class BodyReader:
    """Counts the bytes of all bodies that are being read."""

    def __init__(self, service: GenerationService) -> None:
        model = service.model
        context = model.limits.max_context
        text = model.tokenizer.max_bytes(context) if model.tokenizer else 0
        self._max_body = _OTHER_BYTES + _BYTES_PER_ID * context + _BYTES_PER_BYTE * text
        self._max_containers = _CONTAINERS + context  # a prompt's text has some, too
        self._apart = service.apart
        self._bytes = 0

    async def read(self, request: Request, kind: type[T], work: Callable[[T], R]) -> R:
        """Read and decode a body, and return what the work makes of it. Work on a large body holds no other request up.
        Raises BatonError."""
        with self._reading() as count:
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    body = await self._body(request, count)
            except TimeoutError:
                raise BodyTimeout(f"the request's body did not come within {_BODY_SECONDS:g} s") from None
            repairs: Repairs = request.state.repairs
            return await self._apart(len(body), lambda: work(self._decoded(body, kind, repairs)))

    def _decoded(self, body: bytes, kind: type[T], repairs: Repairs) -> T:
        # msgspec holds the GIL while it decodes, 0.2 µs for each object or list.
        if (count := body.count(b"{") + body.count(b"[")) > self._max_containers:
            raise PayloadTooLarge(
                f"the request's body has {count} opening braces and brackets; send at most {self._max_containers}"
            )
        try:
            return decode(body, kind)
        except InvalidRequest:
            if (whole := with_whole_characters(body)) == body or not repairs.make("surrogate"):
                raise
            return decode(whole, kind)

    async def _body(self, request: Request, count: Callable[[int], None]) -> bytes:
        parts: list[bytes] = []
        if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            raise UnsupportedEncoding(f"the body's Content-Encoding is {shown(encoding)!r}; send it uncompressed")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20:
            self._check(int(length))  # before a client that expects a 100 sends anything
        size = 0
        async for part in request.stream():
            size += len(part)
            self._check(size)
            count(len(part))
            parts.append(part)
        return b"".join(parts)

    def _check(self, size: int) -> None:
        """Raises PayloadTooLarge."""
        if size > self._max_body:
            raise PayloadTooLarge(f"the request's body has more than {self._max_body} bytes; send less")
        who = caller.get()
        if who.max_body_bytes is not None and size > who.max_body_bytes:
            raise PayloadTooLarge(
                f"the request's body has more than the {who.max_body_bytes} bytes that the API key {who.name!r} "
                "may send; send less"
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body among those of all bodies."""
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            if self._bytes + size > _BYTES_AT_ONCE:
                raise Overloaded("too many large requests are being read; try again")
            mine += size
            self._bytes += size

        try:
            yield count
        finally:
            self._bytes -= mine
