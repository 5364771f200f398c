"""Ends connections so that their clients can read the last answer, within a bounded time.

A socket that is closed while its client still sends is reset, and a reset destroys what the client has not read. So the
server first says that it will send no more, and then drops what still comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

LINGER = 5.0  # seconds in which a client may go on sending what nothing reads
UNREAD = 30.0  # seconds in which the client of a closed connection must have read something


class ClosingTransport:
    """A transport whose `close` keeps to these rules. Everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, still_sends: Callable[[], bool]) -> None:
        """`still_sends` tells whether the client may be in the middle of a request."""
        self._transport = transport
        self._still_sends = still_sends
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what is written, and end the connection once the client has read it."""
        if self._closed:
            return
        self._closed = True
        self.write = _drop
        transport = self._transport
        if self._still_sends() and not transport.is_closing():
            if transport.can_write_eof():
                with contextlib.suppress(OSError):  # the client has gone
                    transport.write_eof()
            transport.resume_reading()
            self._timer = asyncio.get_running_loop().call_later(LINGER, transport.abort)
        else:
            transport.close()
            self._until_read(math.inf)

    def lost(self) -> None:
        """Note that the connection has ended."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _until_read(self, before: float) -> None:
        """Abort the connection if its client reads nothing for so long. asyncio itself would wait for ever."""
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        elif left:
            self._timer = asyncio.get_running_loop().call_later(UNREAD, self._until_read, left)


def _drop(data: object) -> None:
    pass
