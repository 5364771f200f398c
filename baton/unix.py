"""Unix sockets that speak messages and hand over file descriptors: the link between a worker and its node's store.

Addresses live in Linux's abstract namespace: no file, so nothing to leak when a process is killed, and no directory to
guard. What a 0700 directory would do the kernel does better: every connection carries the peer's uid and pid, and a
pidfd taken from it tells of the process's death. SOCK_SEQPACKET keeps message boundaries.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from baton.errors import MalformedMessage, PortInUse, StoreGone
from baton.messages import UNREADABLE, Message

MAX_PACKET_BYTES = 160 * 1_024  # below Linux's default socket buffer
MAX_DESCRIPTORS = 32  # with one packet
_QUEUE = 4_096  # packets kept for a peer that does not read
_FD_SETSIZE = 1_024  # descriptors from here on are too large for select
_SO_PEERPIDFD = 77  # Linux 6.5 and later; Python has no name for it
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # of accept: not now

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def is_pidfd(descriptor: int) -> bool:
    """Whether it tells of a process's end."""
    try:
        return "\nPid:" in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:
        return False


class OutOfDescriptors(Exception):
    """The process or the machine has no descriptor left for a connection. It may have one later."""


def readable(descriptor: int, seconds: float) -> bool:
    """Wait for at most `seconds` until `descriptor` can be read. It takes any descriptor, also one above 1,023."""
    if descriptor < _FD_SETSIZE:  # select waits to the microsecond, poll to the millisecond: more than some steps take
        return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1_000))


class UnixSocket(Generic[M]):
    """One connection. Non-blocking: what the kernel does not take at once waits in a bounded queue."""

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(receives)
        self._outgoing: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.closed_by_peer = False  # what it had said before may still be received
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)

    @classmethod
    def connect(cls, address: str, receives: Any) -> UnixSocket[M]:
        """Connect to the abstract `address`. Raises StoreGone when no store listens there."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise StoreGone(f"no socket to reach a store with: {error.strerror}") from None
        connection.setblocking(False)  # with a full backlog connect fails at once instead of waiting
        try:
            connection.connect(_abstract(address))
        except OSError as error:
            connection.close()
            raise StoreGone(f"no store answers at {address!r}: {error.strerror}") from None
        return cls(connection, receives)

    def fileno(self) -> int:
        return self._socket.fileno()

    def pidfd(self) -> int:
        """A descriptor that turns readable when the peer's process is gone. The caller closes it.
        Raises ProcessLookupError when it is gone already, another OSError when no descriptor is left."""
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise
            if error.errno == errno.ENOPROTOOPT:
                # An older kernel: by number, which could in principle have been given to another process since.
                return os.pidfd_open(self.pid)
            raise ProcessLookupError(f"process {self.pid} is gone") from None

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send now, or queue and send with the next `flush`. Raises StoreGone when the peer has closed or has not
        read for so long that the queue is full."""
        if len(self._outgoing) >= _QUEUE:
            raise StoreGone(f"process {self.pid} has left {_QUEUE} messages unread")
        packet = _encoder.encode(message)
        if len(packet) > MAX_PACKET_BYTES:
            raise MalformedMessage(f"{type(message).__name__} of {len(packet)} bytes exceeds {MAX_PACKET_BYTES}")
        self._outgoing.append((packet, tuple(descriptors)))
        self.flush()

    def flush(self) -> bool:
        """Push what waits; True when nothing is left. Raises StoreGone when the peer has closed."""
        while self._outgoing:
            packet, descriptors = self._outgoing[0]
            try:
                socket.send_fds(self._socket, [packet], list(descriptors))
            except BlockingIOError:
                return False
            except OSError as error:
                self.closed_by_peer = True
                raise StoreGone(f"process {self.pid} has closed its connection: {error.strerror}") from None
            self._outgoing.popleft()
        return True

    def receive(self) -> tuple[M, list[int]] | None:
        """The next message and the descriptors that came with it (the caller closes them); None when none is here.
        Raises StoreGone at the end of the connection, MalformedMessage for bytes that are no message."""
        try:
            packet, ancillary, flags, _ = self._receive()
        except BlockingIOError:
            return None
        except OSError as error:
            raise StoreGone(f"process {self.pid} has closed its connection: {error.strerror}") from None
        descriptors = _descriptors(ancillary)
        try:
            if not packet:
                raise StoreGone(f"process {self.pid} has closed its connection")
            if flags & socket.MSG_TRUNC:
                raise MalformedMessage(f"process {self.pid} sent a packet above {MAX_PACKET_BYTES} bytes")
            return self._decoder.decode(packet), descriptors
        except Exception as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, UNREADABLE):
                raise MalformedMessage(f"process {self.pid} sent {len(packet)} bytes, no message: {error}") from None
            raise

    def _receive(self) -> tuple[bytes, list[Any], int, Any]:
        """A peer that closes with messages unread resets the connection. The kernel tells that first, once, and then
        gives what the peer had said."""
        try:
            return self._socket.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))
        except ConnectionResetError:
            return self._socket.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))

    def close(self) -> None:
        self._socket.close()


class UnixListener(Generic[M]):
    """Accepts connections at an abstract address."""

    def __init__(self, address: str, receives: Any) -> None:
        """Raises PortInUse when another process listens there."""
        self._receives = receives
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.bind(_abstract(address))
        except OSError:
            self._socket.close()
            raise PortInUse(f"another process listens at {address!r}; stop it or name this node differently") from None
        self._socket.listen(128)
        self.address = address

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> UnixSocket[M] | None:
        """The next connection, or None when none waits. Raises OutOfDescriptors when one waits and can't be taken."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise OutOfDescriptors(str(error.strerror)) from None
            raise
        return UnixSocket(connection, self._receives)

    def close(self) -> None:
        self._socket.close()


def _abstract(address: str) -> bytes:
    return b"\0" + address.encode()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers)
