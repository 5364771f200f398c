"""ZMQ sockets with the cluster's keys, and one peer's end of a link with a router."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import zmq

from baton.wire import ClusterKeys
from tests.fuzz.case import Case
from tests.support import cluster_keys

PATIENCE = 60.0  # seconds in which a live process must answer

PART = 64  # bytes of a part of several: libzmq aborts a process that closes a socket in the middle of a message

_AGAIN = 3.0  # seconds after which a question is repeated

_context = zmq.Context()


@contextmanager
def opened(kind: int, endpoint: str, keys: ClusterKeys, identity: bytes = b"") -> Iterator[Any]:
    """A socket that is connected to an endpoint. What it could not send is dropped at the end."""
    socket = client(kind, endpoint, keys, identity)
    try:
        yield socket
    finally:
        socket.close(0)


def client(kind: int, endpoint: str, keys: ClusterKeys, identity: bytes = b"") -> Any:
    """A socket that is connected to an endpoint."""
    socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1_000))
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    cluster_keys.client(socket, keys)
    socket.connect(endpoint)
    return socket


def listening(kind: int, keys: ClusterKeys, endpoint: str = "tcp://127.0.0.1:*") -> tuple[Any, str]:
    socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    cluster_keys.server(socket, keys)
    socket.bind(endpoint)
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


class RouterLink:
    """What a worker or store would have: frames out, envelopes in. Nothing that comes in is trusted to be of a kind."""

    def __init__(self, socket: Any, me: str, heart: Any = None) -> None:
        self._socket, self._heart = socket, heart
        self.me = me
        self.router = ""  # its incarnation, once it has said anything
        self.heard = 0  # the number of its last message
        self._sequence = 0

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def send(self, case: Case, *frames: bytes, heart: bool = False) -> None:
        for frame in frames:
            case.sending(frame)
        self.say(*frames, heart=heart)

    def say(self, *frames: bytes, heart: bool = False) -> None:
        """Send what no case need tell of."""
        with suppress(zmq.Again):
            (self._heart if heart else self._socket).send_multipart(frames)

    def close(self) -> None:
        for socket in (self._socket, self._heart):
            if socket is not None:
                socket.close(0)

    def receive(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Messages that come within so long, decoded only as MessagePack."""
        until = time.monotonic() + seconds
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1_000))):
            *_, body = self._socket.recv_multipart()
            sender, _, self.heard, message = msgspec.msgpack.decode(body)
            self.router = sender
            yield message

    def ask(
        self, case: Case, question: Callable[[], bytes], answers: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Ask, and return the answer. What ends with a connection is lost, so the question is repeated, as in every
        heartbeat. Raises AssertionError when no answer comes."""
        seen = list[str]()
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.send(case, question())
            again = time.monotonic() + _AGAIN
            while time.monotonic() < again:
                for message in self.receive(0.1):
                    if answers(message):
                        return message
                    seen.append(message["type"])
        raise AssertionError(f"no answer within {PATIENCE} s, but {seen[-20:]}")
