"""Outgoing connections from a local port, as any program of the machine may have them."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager


class Outgoing:
    """A connection whose local end is at `port` of 127.0.0.1."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._client = socket.socket()
        self._client.bind(("127.0.0.1", 0))
        self._client.connect(self._server.getsockname())
        self._accepted, _ = self._server.accept()
        self.port: int = self._client.getsockname()[1]

    def end(self) -> None:
        """End it as programs do: its port stays in TIME_WAIT for a minute."""
        self._client.close()
        self._accepted.recv(1)
        self._accepted.close()

    def reset(self) -> None:
        """End it by a reset, after which its port is free at once."""
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client.close()

    def close(self) -> None:
        for each in (self._client, self._accepted, self._server):
            each.close()


@contextmanager
def outgoing() -> Iterator[Outgoing]:
    """A connection from any port that is closed at the end of the block, if it has not been ended."""
    connection = Outgoing()
    try:
        yield connection
    finally:
        connection.close()
