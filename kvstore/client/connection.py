"""A worker's end of the link to its node's store: calls out, replies in, and the arena mapped.

Synchronous and never waiting, so that it fits into the loop of a worker whose steps must not be held up. It repeats
nothing: what is reserved, held and waited for is the worker state's to know. Chains of more than `MAX_KEYS_PER_CALL`
keys are the caller's to split, under several leases. A store whose reply does not fit what it was asked
(`kvstore.client.reply_check`) counts as lost.

A lost store is reported once, by `receive` or `tick` raising StoreGone. `call` never raises it, so that no decision is
interrupted half-way. Then `disconnect`, forget every lease, and `connect` again: the store that answers is another
incarnation with other memory. Views of the old arena stay valid memory as long as they are referenced.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence

from baton.clock import PauseDetector
from baton.errors import MalformedMessage, StoreError, StoreGone
from baton.messages import MAX_KEYS_PER_CALL, Namespace, Peer
from baton.store_protocol import Attach, Attached, AttachRefused, LeaseHeartbeat, StoreCall, StoreReply
from baton.unix import UnixSocket
from kvstore.arena.memory import Arena
from kvstore.client.reply_check import ReplyCheck

log = logging.getLogger(__name__)

_LAST_WORD = 1.0  # seconds that the store gets to take what is said at the end
_MAX_ADDRESS = 100  # bytes; Linux takes 107
_MOST_REPLIES = 4_096  # taken at a time, so that no store keeps its worker from its steps


def store_address(cluster: str, node: str) -> str:
    """The abstract Unix address of a node's store. The same after a restart; another for each user, so that two
    people's clusters of one name don't meet."""
    address = f"baton-{os.getuid()}/{cluster}/{node}"
    if len(address.encode()) > _MAX_ADDRESS:
        address = f"baton-{os.getuid()}/{hashlib.blake2b(address.encode(), digest_size=16).hexdigest()}"
    return address


class StoreClient:
    """One worker's attachment to the store of its node, or the lack of one."""

    def __init__(
        self,
        address: str,
        peer: Peer,
        namespace: Namespace,
        page_bytes: int,
        silence_s: float,
        writers: Sequence[int] = (),
    ) -> None:
        """Connects nothing yet. A store that says nothing for `silence_s` seconds counts as gone. `writers`: pidfds of
        the other processes that write pages for this one; they stay the caller's."""
        self._writers = writers
        self._address = address
        self._attach = Attach(peer, namespace, page_bytes)
        self._page_bytes = page_bytes
        self._silence = silence_s
        self._connecting: UnixSocket[StoreReply] | None = None
        self._connecting_since = 0.0
        self._socket: UnixSocket[StoreReply] | None = None
        self._arena: Arena | None = None
        self._check = ReplyCheck(0)
        self._failure: StoreGone | None = None  # found out, but not told yet
        self._heard = False  # since the last tick
        self._last_heard: float | None = None
        self._pauses = PauseDetector(silence_s / 4)
        self._refusal = ""
        self.incarnation = ""  # of the store; empty while not connected

    @property
    def connected(self) -> bool:
        """Whether there is an arena. True until `disconnect`, even when the store has gone since."""
        return self._arena is not None

    @property
    def slots(self) -> int:
        """How many slots the arena has; 0 while not connected."""
        return self._arena.slots if self._arena else 0

    def connect(self) -> None:
        """Attach, without waiting for the store's answer; do nothing when attached already.

        The kernel accepts connections for a store that is stopped, so a wait here would delay every step of the
        worker. Raises StoreGone when no store listens or there is no answer yet: call again, and the attempt
        continues. Raises StoreError when the store refuses this worker, with its reason."""
        if self.connected:
            return
        try:
            self._try()
        except StoreError:
            if self._connecting is None or time.monotonic() - self._connecting_since > self._silence:
                self._give_up()
            raise

    def fileno(self) -> int:
        """A descriptor that can be read when `receive` has something. Raises StoreGone while not connected."""
        if self._socket is None:
            raise StoreGone("not connected to a store")
        return self._socket.fileno()

    def receive(self) -> list[StoreReply]:
        """Some of the replies that are here, at most 4,096. Raises StoreGone when the store is gone, after its last
        replies were taken."""
        if self._socket is None:
            raise StoreGone("not connected to a store")
        replies: list[StoreReply] = []
        while self._failure is None and len(replies) < _MOST_REPLIES:
            try:
                received = self._socket.receive()
                if received is None:
                    return replies
                reply, descriptors = received
                _close(descriptors)
                self._heard = True
                if isinstance(reply, AttachRefused):
                    raise StoreGone(f"the store refused ({reply.reason}): {reply.message}")
                self._check.heard(reply)
                replies.append(reply)
            except (StoreGone, MalformedMessage) as error:
                self._failure = StoreGone(str(error))
        if self._failure is not None and not replies:
            raise self._failure
        return replies

    def call(self, call: StoreCall) -> None:
        """Say something to the store, now or as soon as it reads. Lost without a word when the store is gone."""
        assert len(getattr(call, "keys", b"")) <= MAX_KEYS_PER_CALL * 16
        if self._socket is None or self._failure is not None:
            return
        self._check.called(call)
        try:
            self._socket.send(call)
        except StoreGone as error:
            self._failure = error

    @property
    def arena(self) -> Arena:
        """The store's memory, mapped. Raises StoreGone while not connected."""
        if self._arena is None:
            raise StoreGone("not connected to a store")
        return self._arena

    def slot(self, index: int) -> memoryview:
        """The bytes of an arena slot, `page_bytes` of them, writable."""
        if self._arena is None:
            raise StoreGone("not connected to a store")
        return self._arena.slot(index)

    def tick(self, now: float) -> None:
        """Call every turn, after `receive`: sends what still waits. Raises StoreGone when the store has been silent
        for too long; time during which this loop itself stood still does not count."""
        if self._socket is None:
            return
        paused = self._pauses.tick(now)
        if self._heard or self._last_heard is None:
            self._heard, self._last_heard = False, now
        self._last_heard = min(now, self._last_heard + paused)
        try:
            self._socket.flush()
        except StoreGone as error:
            self._failure = error
        if self._failure is None and now - self._last_heard > self._silence:
            self._failure = StoreGone(f"the store has been silent for {now - self._last_heard:.1f} s")
        if self._failure is not None:
            raise self._failure

    def disconnect(self) -> None:
        """Let go of the store and its arena. Views of slots stay valid memory."""
        self._give_up()
        if self._socket is not None:
            self._socket.close()
        if self._arena is not None:
            self._arena.close()
        self._socket = self._arena = self._failure = self._last_heard = None
        self._pauses = PauseDetector(self._silence / 4)
        self.incarnation = ""

    def leave(self) -> None:
        """End this worker's time at the store: nothing that it reserved is going to be written any more. Without this
        word, slots reserved by a process that goes on would stay so until it ends."""
        self.call(LeaseHeartbeat())
        until = time.monotonic() + _LAST_WORD
        while self._socket is not None and self._failure is None and time.monotonic() < until:
            try:
                if self._socket.flush():
                    break
            except StoreGone:
                break
            time.sleep(0.001)
        self.disconnect()

    close = disconnect

    def _try(self) -> None:
        if self._connecting is None:
            self._connecting = self._open()
            self._connecting_since = time.monotonic()
        connection = self._connecting
        try:
            received = connection.receive()
        except (StoreGone, MalformedMessage) as error:
            self._give_up()
            raise StoreGone(str(error)) from None
        if received is None:
            raise StoreGone("the store has not answered yet")
        self._take(connection, *received)

    def _open(self) -> UnixSocket[StoreReply]:
        connection: UnixSocket[StoreReply] = UnixSocket.connect(self._address, StoreReply)
        try:
            if connection.uid != os.getuid():
                raise StoreError(f"user {connection.uid} listens at {self._address!r}, which is not us")
            connection.send(self._attach, self._writers)
        except StoreError:
            connection.close()
            raise
        return connection

    def _take(self, connection: UnixSocket[StoreReply], reply: StoreReply, descriptors: list[int]) -> None:
        if not isinstance(reply, Attached) or len(descriptors) != 1:
            _close(descriptors)
            self._give_up()
            reason = f"{reply.reason}: {reply.message}" if isinstance(reply, AttachRefused) else f"it said {reply}"
            if reason != self._refusal:
                log.warning("the store does not attach us: %s", reason)
                self._refusal = reason
            raise StoreError(f"the store does not attach us: {reason}")
        (fd,) = descriptors
        os.set_inheritable(fd, False)
        try:
            if reply.page_bytes != self._page_bytes:
                os.close(fd)
                raise ValueError(f"its pages have {reply.page_bytes} bytes, ours {self._page_bytes}")
            self._arena = Arena.attach(fd, reply.slots, reply.page_bytes)
        except ValueError as error:
            self._give_up()
            raise StoreError(f"the store's arena can't be used: {error}") from None
        self._check = ReplyCheck(reply.slots)
        self._connecting, self._socket = None, connection
        self._heard, self._last_heard, self._failure = True, None, None
        self.incarnation = reply.store.incarnation
        self._refusal = ""

    def _give_up(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
