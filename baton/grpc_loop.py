"""An event loop on which a burst of gRPC's events takes one turn, not as many turns as it has events.

`grpc.aio` puts its events into a queue and writes a byte for each to a pair of sockets. Its reader takes one byte a
turn, though it handles every event of the queue then. Once some 280 bytes are unread, gRPC's thread waits for room, and
from then on each turn of the loop brings one event: under load every stream of a router stood for seconds.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_MOST = 2**18  # bytes: more than the sockets hold
_SPARE = 16  # bytes that stay: gRPC's reader fails at an event of a loop that was closed, and goes on with another byte
_reading = threading.Lock()  # loops of one process share the sockets


class GrpcEventLoop(asyncio.SelectorEventLoop):
    """The default loop of asyncio, but for gRPC's reader. Use it as a runner's `loop_factory`."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """As the base class. A reader that gRPC adds gets the bytes of all events at once."""
        handler = callback.func if isinstance(callback, partial) else None
        if isinstance(fd, socket.socket) and getattr(handler, "__module__", "") == "grpc._cython.cygrpc":
            callback = partial(_handle_all, fd, callback)
        super().add_reader(fd, callback, *args)


def _handle_all(wakeups: socket.socket, handle_events: Callable[[], None]) -> None:
    """Leave few bytes for gRPC's reader. An event is in the queue before its byte is written, so none is missed."""
    with _reading, contextlib.suppress(BlockingIOError):  # another loop of this process has handled them
        unread = len(wakeups.recv(_MOST, socket.MSG_PEEK))
        if unread > _SPARE:
            wakeups.recv(unread - _SPARE)
        handle_events()
