"""KV events from the owners of pages to their followers.

    `Publisher`      ──PUB────▶ `Subscriber`     batches: [topic, sequence, payload], as vLLM's
    `ReplayServer`   ◀─ROUTER─▶ `ReplayClient`   older batches, as vLLM's replay, or a whole snapshot

Of a replay socket a follower may ask two things, in a frame behind an empty one: eight bytes, the first sequence wanted
(big-endian), or a `SnapshotRequest`. Batches come back as [empty, sequence, payload], and [empty, -1, empty] ends them.
A snapshot's parts come as [empty, topic, part]. The topic names the owner of the pages, because an endpoint may have
passed to another process.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baton.messages import UNREADABLE, FromPublisher, Snapshot, SnapshotRequest, ToPublisher
from baton.wire.periodic_yield import PeriodicYield
from baton.wire.sockets import arrived, bind, configure, connect

_SEQUENCE_BYTES = 8
_BATCHES = 1_000  # kept for a subscriber that does not read; past it they are dropped, and it asks
_ANSWERS = 128  # messages kept for a follower that does not read: the rest waits with its owner
_QUESTIONS = 64  # kept of one follower
_QUESTION_BYTES = 1_024
_GONE = ((zmq.HEARTBEAT_IVL, 5_000), (zmq.HEARTBEAT_TIMEOUT, 15_000))
"""Milliseconds: a follower that is gone or stuck keeps nothing for longer."""


class Publisher:
    """A PUB socket for KV events: frames [topic, sequence, payload]. Slow subscribers lose batches and see the gap."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        """Raises PortInUse or StartupError."""
        self._socket = configure(zmq.Context.instance().socket(zmq.PUB), (zmq.SNDHWM, _BATCHES), *_GONE)
        self.endpoint = bind(self._socket, endpoint)

    def send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._socket.send_multipart([topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)


class Subscriber:
    """The router's ear for the KV events of one source: asyncio."""

    def __init__(self, endpoint: str) -> None:
        self._socket = configure(zmq.asyncio.Context.instance().socket(zmq.SUB), (zmq.SUBSCRIBE, b""))
        connect(self._socket, endpoint)
        self._periodic_yield = PeriodicYield()
        self.malformed = 0

    async def receive(self) -> tuple[bytes, int, bytes]:
        """Topic, sequence and payload of the next batch. Yields to other tasks now and then."""
        while True:
            await self._periodic_yield.before_message()
            frames = await self._socket.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == _SEQUENCE_BYTES:
                return frames[0], int.from_bytes(frames[1], "big"), frames[2]
            self.malformed += 1

    def close(self) -> None:
        self._socket.close(0)


class ReplayServer:
    """The publisher's end of its replay socket. Never blocks; what a follower does not read, it keeps little of."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        """Raises PortInUse or StartupError."""
        self.socket = configure(
            zmq.Context.instance().socket(zmq.ROUTER), (zmq.SNDHWM, _ANSWERS), (zmq.RCVHWM, _QUESTIONS),
            (zmq.MAXMSGSIZE, _QUESTION_BYTES), (zmq.ROUTER_MANDATORY, 1), *_GONE,
        )  # fmt: skip
        self.endpoint = bind(self.socket, endpoint)
        self._decoder = msgspec.msgpack.Decoder(ToPublisher)
        self.malformed = 0

    def receive(self, limit: int) -> Iterator[tuple[bytes, int | SnapshotRequest]]:
        """At most `limit` of the questions that are here, malformed ones included: the follower that asks, and the
        first sequence wanted or a request for everything."""
        for frames in arrived(self.socket, limit):
            try:
                follower, empty, question = frames
                if empty:
                    raise ValueError("no empty frame before the question")
                if len(question) == _SEQUENCE_BYTES:
                    yield follower, int.from_bytes(question, "big")
                else:
                    yield follower, self._decoder.decode(question)
            except UNREADABLE:
                self.malformed += 1

    def send_batch(self, follower: bytes, sequence: int, payload: bytes) -> bool | None:
        """Send one batch of a replay, or with sequence -1 its end. True: sent; False: not now; None: the follower is
        gone."""
        return self._send(follower, sequence.to_bytes(_SEQUENCE_BYTES, "big", signed=True), payload)

    def send_part(self, follower: bytes, topic: bytes, part: bytes) -> bool | None:
        """One part of a snapshot, encoded; returns the same."""
        return self._send(follower, topic, part)

    def _send(self, follower: bytes, *frames: bytes) -> bool | None:
        try:
            self.socket.send_multipart([follower, b"", *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH: it has gone
            return None
        return True

    def close(self) -> None:
        self.socket.close(0)


class ReplayClient:
    """A follower's end of one publisher's replay socket: asyncio."""

    def __init__(self, endpoint: str) -> None:
        self._socket: Any = configure(
            zmq.asyncio.Context.instance().socket(zmq.DEALER),
            (zmq.SNDHWM, 1),  # a second question to a publisher that is gone asks nothing new
            (zmq.RCVHWM, _ANSWERS),
        )
        connect(self._socket, endpoint)
        self._decoder = msgspec.msgpack.Decoder(FromPublisher)
        self._question = [b"", msgspec.msgpack.encode(SnapshotRequest())]
        self._periodic_yield = PeriodicYield()
        self.malformed = 0

    def ask(self) -> None:
        """Ask for a snapshot. Never blocks; a question may be lost, like its answer."""
        sent = self._socket.send_multipart(self._question, zmq.NOBLOCK)
        sent.add_done_callback(lambda future: future.cancelled() or future.exception())  # lost: it is asked again

    async def receive(self) -> tuple[bytes, Snapshot]:
        """The next part of a snapshot, with its topic. Yields to other tasks now and then."""
        while True:
            await self._periodic_yield.before_message()
            frames = await self._socket.recv_multipart()
            try:
                empty, topic, part = frames
                if empty:
                    raise ValueError("no empty frame before the answer")
                return topic, self._decoder.decode(part)
            except UNREADABLE:
                self.malformed += 1

    def close(self) -> None:
        self._socket.close(0)
