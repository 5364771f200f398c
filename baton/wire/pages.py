"""Sockets that carry pages between stores: those that ask connect, those that have pages answer where they listen.

    PageLink, DEALER  ──[envelope of a PageRequest]─────────────▶  PageServer, ROUTER
                      ◀─[envelope of a PageReply, page, page…]──

Page bytes are never copied on their way out: ZMQ reads them where they lie until `Sending.done`, which comes when they
have gone or when their connection has. What is lost with a connection is not sent again from here; the stores' own
heartbeats find it. Queues are short: what a peer does not read stays in the sender's arena, not in anybody's heap.

Two things are not ZMQ's habit. A peer may stop in the middle of a frame, where ZMQ's heartbeats can't tell, because the
ping would go behind it: TCP's own limit on bytes that stay unread does. And a peer that comes back takes over from its
old connection, which may not know yet that it is dead.
"""

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from baton.errors import StartupError
from baton.messages import UNREADABLE, Envelope, Message
from baton.peer_protocol import FetchedPages, PageReply, PageRequest
from baton.wire.sockets import Reconnector, arrived, bind, configure, connect

_IO_THREADS = 2  # so that one can send while the other receives, and encryption has two cores
_REQUEST_BYTES = 2**20  # the largest request, and the largest first frame of a reply
_REQUESTS = 1_000  # kept for a store that does not read, or from one that we don't
_REPLIES_SENT = 10_000  # messages; their pages lie in the arena
_REPLIES_READ = 2  # messages from one store that wait in our heap: with more, fresh memory is touched for each

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_HEAP_FRAME = 2**25  # bytes: the largest that glibc lets come from the heap
_FREE_HEAP = 2**26  # bytes free at its end

_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class DropCounters:
    """Messages that came to nothing, on all sockets."""

    malformed: int = 0
    dropped: int = 0  # not sent because the peer is gone or does not read, or received and meant for another process


@dataclass(frozen=True, slots=True)
class _Common:
    """What all sockets of one store's transport share."""

    context: zmq.Context[Any]
    me: str
    silence_s: float
    requests: Any  # unions of messages
    replies: Any
    drops: DropCounters


class Sending:
    """Pages that ZMQ may still read.

    A sender without copies must keep the bytes' owner alive until ZMQ has freed the frame, and pyzmq does that with
    the view that it was given. So a view that only ZMQ was given lives for as long as ZMQ may read it. Its end says
    the same as a `MessageTracker`, which costs as much as sending a page of 128 KiB."""

    def __init__(self) -> None:
        self._views: deque[weakref.ref[memoryview]] = deque()

    def add_view(self, view: memoryview) -> None:
        self._views.append(weakref.ref(view))

    @property
    def done(self) -> bool:
        """Whether none of them will be read any more, sent or not. ZMQ lets go of an ended connection's frames while
        its owner waits for or uses the socket."""
        while self._views and self._views[0]() is None:
            self._views.popleft()
        return not self._views


class PageServer:
    """The one socket where other stores ask this one. Never blocks."""

    def __init__(self, common: _Common, endpoint: str) -> None:
        """Bind `endpoint`. Raises PortInUse or StartupError."""
        self._me = common.me
        self._drops = common.drops
        self.socket = _configured(
            common.context.socket(zmq.ROUTER), common.silence_s, (zmq.SNDHWM, _REPLIES_SENT), (zmq.RCVHWM, _REQUESTS),
            (zmq.MAXMSGSIZE, _REQUEST_BYTES), (zmq.ROUTER_MANDATORY, 1), (zmq.ROUTER_HANDOVER, 1),
        )  # fmt: skip
        self.socket.copy_threshold = 0  # small pages, too, are read where they lie: their slots bound the memory
        self.endpoint = bind(self.socket, endpoint)
        self._decoder: msgspec.msgpack.Decoder[Envelope[Any]] = msgspec.msgpack.Decoder(Envelope[common.requests])
        self._sequences: dict[str, int] = {}

    def receive(self, limit: int) -> Iterator[tuple[str, Any]]:
        """Return at most `limit` of the requests that are here, with their senders."""
        for frames in arrived(self.socket, limit):
            try:
                identity, body = frames
                envelope = self._decoder.decode(body)
                if identity != envelope.sender.encode():
                    raise ValueError(f"{identity!r} speaks as {envelope.sender!r}")
            except UNREADABLE:
                self._drops.malformed += 1
                continue
            if envelope.addressee == self._me:
                yield envelope.sender, envelope.message
            else:
                self._drops.dropped += 1

    def send(self, peer: str, reply: Message) -> bool:
        """Send words to the store of that incarnation. False when it is not connected, or has not read for long."""
        return self._start(peer, reply, 0)

    def send_pages(self, peer: str, reply: FetchedPages, pages: Iterable[memoryview], sending: Sending) -> bool:
        """The same, with the bytes of its pages behind it. The caller keeps none of the views."""
        if not self._start(peer, reply, zmq.SNDMORE):
            return False
        last = len(reply.pages) - 1
        for place, page in enumerate(pages):
            sending.add_view(page)
            self.socket.send(page, 0 if place == last else zmq.SNDMORE, copy=False)
        return True

    def _start(self, peer: str, reply: Message, more: int) -> bool:
        sequence = self._sequences.get(peer, 0) + 1
        try:
            self.socket.send(peer.encode(), zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.ZMQError as error:  # EHOSTUNREACH or EAGAIN, and then nothing of this message has been sent
            if error.errno == zmq.EHOSTUNREACH:
                self._sequences.pop(peer, None)
            self._drops.dropped += 1
            return False
        # From here on a message goes as a whole: ZMQ takes its other frames, or drops them with their connection.
        self.socket.send(_encoder.encode(Envelope(self._me, peer, sequence, reply)), more)
        self._sequences[peer] = sequence
        return True

    def close(self) -> None:
        self.socket.close(0)


class PageLink:
    """A connection to one store that we ask. Never blocks."""

    def __init__(self, common: _Common, store: str, endpoint: str) -> None:
        """Connect to the store of incarnation `store`. Raises StartupError for an endpoint that can't be one."""
        self._me = common.me
        self._drops = common.drops
        self.store = store
        self.endpoint = endpoint
        if not endpoint.startswith("tcp://"):
            raise StartupError(f"{endpoint!r} is no endpoint of a store")
        self.socket = _configured(
            common.context.socket(zmq.DEALER), common.silence_s, (zmq.SNDHWM, _REQUESTS), (zmq.RCVHWM, _REPLIES_READ),
            (zmq.CONNECT_TIMEOUT, int(common.silence_s * 1_000)), (zmq.IDENTITY, common.me.encode()),
        )  # fmt: skip
        try:
            connect(self.socket, endpoint)
        except zmq.ZMQError as error:
            raise StartupError(f"{endpoint!r} is no endpoint of a store: {error.strerror}") from None
        self._reconnector = Reconnector(self.socket, endpoint)
        self._decoder: msgspec.msgpack.Decoder[Envelope[Any]] = msgspec.msgpack.Decoder(Envelope[common.replies])
        self._sequence = 0

    def send(self, request: Message) -> None:
        """Queue a request, also while there is no connection."""
        self._sequence += 1
        try:
            self.socket.send(_encoder.encode(Envelope(self._me, self.store, self._sequence, request)), zmq.NOBLOCK)
        except zmq.Again:
            self._drops.dropped += 1
            self._reconnector.try_again()

    def receive(self, limit: int) -> Iterator[tuple[Any, list[memoryview]]]:
        """At most `limit` of the replies that are here; with `FetchedPages` as many frames, each the bytes of a
        page."""
        for body, *frames in arrived(self.socket, limit, copy=False):
            try:
                if len(body) > _REQUEST_BYTES:
                    raise ValueError(f"a reply of {len(body)} bytes")
                envelope = self._decoder.decode(body.buffer)
                message = envelope.message
                if len(frames) != (len(message.pages) if isinstance(message, FetchedPages) else 0):
                    raise ValueError(f"{len(frames)} frames behind {type(message).__name__}")
            except UNREADABLE:
                self._drops.malformed += 1
                continue
            if envelope.addressee == self._me and envelope.sender == self.store:
                yield message, [frame.buffer for frame in frames]
            else:
                self._drops.dropped += 1

    def close(self) -> None:
        self.socket.close(0)


class PageSockets:
    """All sockets of one store's transport, and the waiting for them. For one thread. ZMQ's threads behind it are
    its own, so that no heartbeat waits behind a page."""

    def __init__(
        self, me: str, endpoint: str, silence_s: float, requests: Any = PageRequest, replies: Any = PageReply
    ) -> None:
        """Listen on `endpoint`. The unions are of the messages that may come in. Raises PortInUse or StartupError."""
        _keep_heap()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_IO_THREADS)
        self.drops = DropCounters()
        self._common = _Common(self._context, me, silence_s, requests, replies, self.drops)
        try:
            self.server = PageServer(self._common, endpoint)
        except StartupError:
            self._context.term()
            raise
        self.links: dict[str, PageLink] = {}  # by the store's incarnation
        self._poller = zmq.Poller()
        self._poller.register(self.server.socket, zmq.POLLIN)

    def add_fd(self, fd: int) -> None:
        """Wait for this descriptor, too."""
        self._poller.register(fd, zmq.POLLIN)

    def link(self, store: str, endpoint: str) -> PageLink:
        """Return the link to that store, made when there is none; a link to the former owner of its endpoint is
        dropped. Raises StartupError for an endpoint that can't be one."""
        link = self.links.get(store)
        if link is not None and link.endpoint == endpoint:
            return link
        for other in [each for each in self.links.values() if each is link or each.endpoint == endpoint]:
            self.drop(other)  # first: two connections of one name would take over from each other for ever
        link = self.links[store] = PageLink(self._common, store, endpoint)
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def drop(self, link: PageLink) -> None:
        del self.links[link.store]
        self._poller.unregister(link.socket)
        link.close()

    def wait(self, seconds: float) -> set[int | zmq.Socket[bytes]]:
        """What can be read, after at most so long: descriptors and sockets."""
        return {source for source, _ in self._poller.poll(max(0, int(seconds * 1_000)))}

    def close(self) -> None:
        """Drop everything at once, sent or not; afterwards ZMQ reads no page any more."""
        for link in list(self.links.values()):
            self.drop(link)
        self.server.close()
        self._context.term()


def _keep_heap() -> None:
    """Have this process keep memory that is freed. ZMQ takes memory for every frame that comes in. Memory that glibc
    gives back to the kernel has to be mapped and zeroed again: a third of the time of a 1 MiB page."""
    with contextlib.suppress(AttributeError, OSError):  # another C library: slower
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _HEAP_FRAME)
        libc.mallopt(_M_TRIM_THRESHOLD, _FREE_HEAP)


def _configured(socket: Any, silence_s: float, *options: tuple[int, Any]) -> Any:
    silence = int(silence_s * 1_000)
    return configure(
        socket, (zmq.HEARTBEAT_IVL, max(1, silence // 3)), (zmq.HEARTBEAT_TIMEOUT, silence),
        (zmq.HANDSHAKE_IVL, silence), (zmq.TCP_MAXRT, silence), *options,
    )  # fmt: skip
