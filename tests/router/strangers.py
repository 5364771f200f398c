"""Raw HTTP over a socket, for what no client library sends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from dataclasses import dataclass

PATIENCE = 60.0
HOST = b"Host: localhost\r\n"


@dataclass(frozen=True)
class Reply:
    """What came until the end of a connection."""

    raw: bytes

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.raw)]


class Stranger:
    """A connection. Bytes that the other end no longer takes are dropped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: str, tls: ssl.SSLContext | None = None) -> Stranger:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=2**24, ssl=tls))

    async def send(self, data: bytes) -> bool:
        """Send, and return whether the other end still took it."""
        try:
            self._writer.write(data)
            await asyncio.wait_for(self._writer.drain(), PATIENCE)
        except OSError:
            return False
        return not self._writer.transport.is_closing()

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)

    async def rest(self) -> Reply:
        """Read until the other end closes."""
        read = bytearray()
        with contextlib.suppress(OSError):
            while piece := await asyncio.wait_for(self.reader.read(2**16), PATIENCE):
                read += piece
        self.close()
        return Reply(bytes(read))

    async def gone(self) -> bool:
        """Whether the other end has closed by now."""
        return self.reader.at_eof() or self._writer.transport.is_closing() or self.reader.exception() is not None

    def close(self) -> None:
        self._writer.close()


async def say(address: str, *pieces: bytes) -> Reply:
    """Send these bytes and return what comes until the other end closes."""
    stranger = await Stranger.connect(address)
    for piece in pieces:
        if not await stranger.send(piece):
            break
        await asyncio.sleep(0.01)  # so that pieces come apart
    return await stranger.rest()


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A request that closes its connection."""
    lines = b"".join(header + b"\r\n" for header in (b"Connection: close", *headers))
    return b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n%s" % (path.encode(), HOST, lines, len(body), body)


def get(path: str, *headers: bytes, close: bool = True) -> bytes:
    lines = b"".join(header + b"\r\n" for header in ((b"Connection: close",) if close else ()) + headers)
    return b"GET %s HTTP/1.1\r\n%s%s\r\n" % (path.encode(), HOST, lines)
