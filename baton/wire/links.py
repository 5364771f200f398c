"""Links between the router and all other processes.

- `Listener`: the router's end of every link: asyncio, one ROUTER socket
- `RouterSocket`: a worker's or store's end: synchronous and never blocking, one DEALER socket
- `HeartbeatSender`: a thread that sends the worker's heartbeat whatever its main loop is doing

A DEALER that reconnects hands queued messages to the process that listens there now, and a ROUTER drops messages for a
peer that has gone. Envelopes carry both incarnations, and heartbeats repair the rest.
"""

import logging
import threading
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.asyncio

from baton.clock import Clock
from baton.logs import RateLimitedLog
from baton.messages import UNREADABLE, Envelope, Heartbeat, Message, Peer, ToRouter
from baton.wire.periodic_yield import PeriodicYield
from baton.wire.sockets import Reconnector, arrived, bind, configure, connect

log = RateLimitedLog(logging.getLogger(__name__))

_HEART_SUFFIX = b"/heart"
_HELD_UP = 1.0  # seconds; a sender that wakes so much too late was stopped together with its process
_PER_TURN = 1_000  # frames that a worker or store reads from one router in one turn of its loop

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class Listener:
    """The router's socket. Peers are addressed by incarnation, which is also their ZMQ identity."""

    def __init__(self, endpoint: str, me: Peer) -> None:
        """Bind `endpoint` ("tcp://127.0.0.1:0" takes any free port). Raises PortInUse or StartupError."""
        self._me = me
        # A peer that connects anew is heard at once, though its old connection may not have been noticed as dead yet.
        self._socket = configure(zmq.asyncio.Context.instance().socket(zmq.ROUTER), (zmq.ROUTER_HANDOVER, 1))
        self.endpoint = bind(self._socket, endpoint)
        self._decoder = msgspec.msgpack.Decoder(Envelope[ToRouter])
        self._sequences: dict[str, int] = {}
        self._periodic_yield = PeriodicYield()
        self.malformed = 0  # frames dropped because they are no message of this link

    async def receive(self) -> Envelope[ToRouter]:
        """Return the next message. A malformed one, or one with another sender than its socket, is dropped. Yields
        to other tasks now and then, also while messages are there."""
        while True:
            await self._periodic_yield.before_message()
            frames = await self._socket.recv_multipart()
            try:
                identity, body = frames
                envelope = self._decoder.decode(body)
                if identity.removesuffix(_HEART_SUFFIX) != envelope.sender.encode():
                    raise ValueError(f"{identity!r} speaks as {envelope.sender!r}")
            except UNREADABLE as error:
                self.malformed += 1
                log.warning("dropped a malformed message of %d bytes: %s", sum(map(len, frames)), error)
                continue
            return envelope

    def send(self, incarnation: str, message: Message) -> int:
        """Send to the peer of that incarnation; returns the sequence it was given. Never blocks."""
        sequence = self._sequences.get(incarnation, 0) + 1
        self._sequences[incarnation] = sequence
        envelope = Envelope(self._me.incarnation, incarnation, sequence, message)
        # A ROUTER never blocks, it drops: so this is done when it returns. It must be the asyncio socket's own send:
        # ZMQ signals its descriptor once, and a send that takes the signal must wake the receiver for what waits.
        self._socket.send_multipart([incarnation.encode(), _encoder.encode(envelope)])
        return sequence

    def forget(self, incarnation: str) -> None:
        self._sequences.pop(incarnation, None)

    def close(self) -> None:
        self._socket.close(0)


class RouterSocket(Generic[M]):
    """A worker's (or store's) socket to one router. Every method returns at once."""

    def __init__(self, endpoint: str, me: Peer, receives: Any) -> None:
        """Connect to `endpoint`; `receives` is the union of messages that may come in, such as `ToDecode`."""
        self._me = me
        self._decoder: msgspec.msgpack.Decoder[Envelope[M]] = msgspec.msgpack.Decoder(Envelope[receives])
        self.endpoint = endpoint
        self.socket = _dealer(endpoint, me.incarnation.encode())
        self._reconnector = Reconnector(self.socket, endpoint)
        self._sequence = 0
        self.malformed = 0
        self.dropped = 0  # messages not sent because the router has not read for long, or is not the router

    def send(self, addressee: str, message: Message) -> None:
        """Queue `message` for the router of incarnation `addressee` ("" with a Hello)."""
        self._sequence += 1
        envelope = Envelope(self._me.incarnation, addressee, self._sequence, message)
        try:
            self.socket.send(_encoder.encode(envelope), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            self._reconnector.try_again()

    def receive(self) -> Iterator[Envelope[M]]:
        """What is here now and meant for this incarnation: of at most 1,000 frames, malformed ones included. The rest
        stays in the socket, which a poller reports again."""
        for frames in arrived(self.socket, _PER_TURN):
            try:
                envelope = self._decoder.decode(b"".join(frames))
            except UNREADABLE as error:
                self.malformed += 1
                log.warning("dropped a malformed message of %d bytes: %s", sum(map(len, frames)), error)
                continue
            if envelope.addressee == self._me.incarnation:
                yield envelope

    def close(self) -> None:
        self.socket.close(0)


class _Published(NamedTuple):
    """What a main loop has last told the sender of its heartbeats."""

    router: str
    heartbeat: Heartbeat
    turned: float  # when, seconds
    step_started: float | None


class HeartbeatSender:
    """Sends the latest published `Heartbeat` at a fixed pace from a thread and socket of its own.

    So the router can tell a dead worker from one whose step is long: the heartbeat goes on while the step runs, and
    says how old it is. It also says when the main loop last published, so that a loop which hangs outside a step is
    found out as well. The main loop publishes an immutable snapshot; nothing else is shared."""

    def __init__(self, endpoint: str, me: Peer, clock: Clock) -> None:
        self._me = me
        self._clock = clock
        self._socket = _dealer(endpoint, me.incarnation.encode() + _HEART_SUFFIX)
        self._reconnector = Reconnector(self._socket, endpoint)
        self._stop = threading.Event()
        self._latest: _Published | None = None
        self._interval = 0.25
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def publish(self, router: str, heartbeat: Heartbeat, interval: float, step_started: float | None) -> None:
        """From now on say `heartbeat` to that incarnation of the router every `interval` seconds. `step_started` is
        the clock's time at which the running step began (none: idle); the age that is sent counts from it."""
        self._interval = interval
        self._latest = _Published(router, heartbeat, self._clock.now(), step_started)

    def step_ended(self, step_started: float | None = None) -> None:
        """The step that ran has ended, and the next one began at that time, if there is one. The snapshot is as good as
        before."""
        if (latest := self._latest) is not None:
            self._latest = _Published(latest.router, latest.heartbeat, self._clock.now(), step_started)

    def quiet(self) -> None:
        """Say nothing until the next publish: no router knows us."""
        self._latest = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._socket.close(0)

    def _run(self) -> None:
        woke, excused = self._clock.now(), 0.0
        before: _Published | None = None
        while not self._stop.wait(interval := self._interval):
            now, latest = self._clock.now(), self._latest
            late, woke = now - woke - interval, now
            if latest is None:
                continue
            excused, before = excused if latest is before else 0.0, latest
            if late > _HELD_UP:  # this thread stood still too, so the whole process did: its main loop is not to blame
                excused = min(excused + late, now - latest.turned)
            self._sequence += 1
            beat = msgspec.structs.replace(
                latest.heartbeat,
                step_age_ms=0 if latest.step_started is None else _ms(now - latest.step_started - excused),
                loop_age_ms=_ms(now - latest.turned - excused),
            )
            envelope = Envelope(self._me.incarnation, latest.router, self._sequence, beat)
            try:
                self._socket.send(_encoder.encode(envelope), zmq.NOBLOCK)
            except zmq.Again:
                log.warning("the router does not read our heartbeats")
                self._reconnector.try_again()


def _ms(seconds: float) -> int:
    return max(0, int(seconds * 1_000))


def _dealer(endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    socket = configure(zmq.Context.instance().socket(zmq.DEALER), (zmq.IDENTITY, identity))
    connect(socket, endpoint)
    return socket
