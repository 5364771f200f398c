"""What all ZMQ sockets have in common: bounded queues, bounded messages, no lingering, and keys.

Every TCP socket is encrypted and authenticated with the cluster's keys (CURVE), on loopback too: every user of a
machine reaches its loopback addresses. A socket is never bound to "every interface", which is no address to announce.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import zmq

from baton import hosts
from baton.errors import PortInUse, StartupError
from baton.wire.guard import DOMAIN, guard_of
from baton.wire.keys import ClusterKeys

MAX_MESSAGE_BYTES = 64 * 2**20
_QUEUE = 100_000  # messages kept for a peer that does not read; past it they are dropped and heartbeats repair

# Between machines a connection may die without a word, and TCP notices after minutes. Any traffic counts as an answer.
_PING = 1_000  # milliseconds between two pings
_SILENT = 5_000  # milliseconds without an answer until the connection is given up, and made anew
_CONNECTING = 2_000  # milliseconds for one try to connect; TCP alone would pause for longer and longer between its own

_HANDSHAKE = 5_000  # milliseconds for a connection's handshake; one that never ends would keep a descriptor for 30 s
_REVIVAL = 0.25  # seconds between two times that a socket is connected anew
_NO_NETWORK = ("inproc:", "ipc:")  # endpoints that need no keys

_COMMON = (
    (zmq.LINGER, 0), (zmq.SNDHWM, _QUEUE), (zmq.RCVHWM, _QUEUE), (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
    (zmq.HANDSHAKE_IVL, _HANDSHAKE),
)  # fmt: skip

_keys: ClusterKeys | None = None


def operator_key() -> str | None:
    """Return the API key of the cluster's own processes; None if this process has no keys of a cluster."""
    return _keys.operator_key if _keys else None


def use_keys(keys: ClusterKeys | None) -> None:
    """From now on this process uses these keys, and accepts only peers that have them. Sockets that are connected
    already stay as they are; bound ones accept no new peer without the new keys."""
    global _keys
    _keys = keys


def configure(socket: Any, *options: tuple[int, Any]) -> Any:
    """Set what all sockets have in common, and then these options."""
    for option, value in (*_COMMON, *options):
        socket.setsockopt(option, value)
    return socket


def bind(socket: Any, endpoint: str) -> str:
    """Listen; returns the endpoint with the port that it got. Closes the socket and raises PortInUse or StartupError,
    also without the keys that a TCP socket needs."""
    try:
        if hosts.is_wildcard(hosts.host_of(endpoint)) and endpoint.startswith("tcp:"):
            raise StartupError(
                f"{endpoint} is every interface, which is no address to announce: name the one that the other nodes "
                "reach (--host, or router.host)"
            )
        _speak_ipv6(socket, endpoint)
        if not endpoint.startswith(_NO_NETWORK):
            keys = _needed(endpoint)
            # The guard first: the socket asks it about every peer from the moment that it listens.
            guard_of(socket.context, _accepted).watch(socket)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        _notice_silence(socket, endpoint)
        socket.bind(endpoint)
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if _leaves_machine(bound) != _leaves_machine(endpoint):
            raise StartupError(f"{endpoint} is really {bound}, which other nodes can't reach: name an address they can")
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == zmq.EADDRINUSE:
            raise PortInUse(f"{endpoint} is in use; stop what listens there or choose another port") from None
        raise StartupError(f"can't listen on {endpoint}: {error.strerror}") from None
    except StartupError:
        socket.close(0)
        raise
    return bound


def arrived(socket: Any, limit: int, *, copy: bool = True) -> Iterator[Any]:
    """Yield the frames of the messages that are here, of `limit` at most."""
    with contextlib.suppress(zmq.Again):
        for _ in range(limit):
            yield socket.recv_multipart(zmq.NOBLOCK, copy)


def connect(socket: Any, endpoint: str) -> None:
    """Connect; returns at once, and goes on trying for as long as the socket lives. Else closes the socket: raises
    StartupError without the keys that a TCP socket needs, and what ZMQ raises for what is no endpoint."""
    try:
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        _speak_ipv6(socket, endpoint)
        if not endpoint.startswith(_NO_NETWORK):
            keys = _needed(endpoint)
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        _notice_silence(socket, endpoint)
        socket.connect(endpoint)
    except BaseException:
        socket.close(0)
        raise


class Reconnector:
    """Connects a socket anew that ZMQ has given up, which is told by a send that finds no room.

    ZMQ tries again after a connection has ended, but not after the other end has broken the protocol. A program that
    listens on the port of a router that has died does that, and so does a flipped bit. What waits in the socket is
    lost, as with a connection."""

    def __init__(self, socket: Any, endpoint: str) -> None:
        """The socket is connected to that endpoint."""
        self._socket = socket
        self._endpoint = endpoint
        self._next = float("-inf")

    def try_again(self) -> None:
        """Connect anew; at most once in a while. Call it from the socket's own thread."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REVIVAL
            with contextlib.suppress(zmq.ZMQError):  # ENOENT: ZMQ has forgotten the endpoint as well
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)


def _speak_ipv6(socket: Any, endpoint: str) -> None:
    # Only where the address is one: with this option ZMQ makes IPv6 addresses of all others.
    socket.setsockopt(zmq.IPV6, int(hosts.is_ipv6(hosts.host_of(endpoint))))


def _notice_silence(socket: Any, endpoint: str) -> None:
    if _leaves_machine(endpoint):
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECTING)


def _leaves_machine(endpoint: str) -> bool:
    return not endpoint.startswith(_NO_NETWORK) and not hosts.is_loopback(hosts.host_of(endpoint))


def _needed(endpoint: str) -> ClusterKeys:
    if _keys is None:
        raise StartupError(
            f"{endpoint} needs the cluster's keys and this process has none: read them from cluster.key_file and hand "
            "them to baton.wire.use_keys()"
        )
    return _keys


def _accepted() -> bytes | None:
    return _keys.public_bytes if _keys is not None else None
