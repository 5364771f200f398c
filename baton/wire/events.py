"""KV events from whoever owns pages to whoever follows them."""

from __future__ import annotations

import zmq
import zmq.asyncio

from baton.wire.sockets import bind, configure, connect


class Publisher:
    """A PUB socket for KV events: frames [topic, sequence, payload]. Slow subscribers lose batches and see the gap."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self._socket = configure(zmq.Context.instance().socket(zmq.PUB))
        self.endpoint = bind(self._socket, endpoint)

    def send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._socket.send_multipart([topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)


class Subscriber:
    """The router's ear for the KV events of one source: asyncio."""

    def __init__(self, endpoint: str) -> None:
        self._socket = configure(zmq.asyncio.Context.instance().socket(zmq.SUB))
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        connect(self._socket, endpoint)
        self.malformed = 0

    async def receive(self) -> tuple[bytes, int, bytes]:
        """Topic, sequence and payload of the next batch."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                return frames[0], int.from_bytes(frames[1], "big"), frames[2]
            self.malformed += 1

    def close(self) -> None:
        self._socket.close(0)
