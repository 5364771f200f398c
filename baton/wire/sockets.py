"""What every ZMQ socket of ours has in common: bounded queues, bounded messages, no lingering, loopback by default."""

from __future__ import annotations

from typing import Any

import zmq

from baton.errors import PortInUse, StartupError

MAX_MESSAGE_BYTES = 64 * 2**20
_QUEUE = 100_000  # messages kept for a peer that does not read; past it they are dropped and heartbeats repair


def configure(socket: Any) -> Any:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def bind(socket: Any, endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == zmq.EADDRINUSE:
            raise PortInUse(f"{endpoint} is in use; stop what listens there or choose another port") from None
        raise StartupError(f"can't listen on {endpoint}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: Any, endpoint: str) -> None:
    """Connect; returns at once, and goes on trying for as long as the socket lives."""
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    socket.connect(endpoint)
