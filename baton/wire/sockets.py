"""What every ZMQ socket of ours has in common: bounded queues, bounded messages, no lingering, and who may speak.

What stays on this machine is plain; everything else is encrypted and authenticated with the cluster's keys (CURVE),
always. Both ends tell by the text of the endpoint alone, so a socket is never bound to "every interface".
"""

from __future__ import annotations

from typing import Any

import zmq

from baton import hosts
from baton.errors import PortInUse, StartupError
from baton.wire.guard import DOMAIN, guard_of
from baton.wire.keys import Keys

MAX_MESSAGE_BYTES = 64 * 2**20
_QUEUE = 100_000  # messages kept for a peer that does not read; past it they are dropped and heartbeats repair

# Between machines a connection may die without a word, and TCP notices after minutes. Any traffic counts as an answer.
_PING = 1_000  # milliseconds between two pings
_SILENT = 5_000  # milliseconds without an answer until the connection is given up, and made anew
_CONNECTING = 2_000  # milliseconds for one try to connect; TCP alone would pause for longer and longer between its own

_HANDSHAKE = 5_000  # milliseconds for a connection's handshake; one that never ends would keep a descriptor for 30 s

_keys: Keys | None = None


def use_keys(keys: Keys | None) -> None:
    """From now on this process speaks with these keys, and only with those who have them. Sockets that are connected
    already stay as they are; those that are bound take nobody without the new keys any more."""
    global _keys
    _keys = keys


def configure(socket: Any) -> Any:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUE)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
    return socket


def bind(socket: Any, endpoint: str, *, secure: bool = False) -> str:
    """Listen; returns the endpoint with the port that it got. Encrypted when it can be reached from other machines,
    or `secure`. Closes the socket and raises PortInUse or StartupError."""
    try:
        if hosts.is_wildcard(hosts.host_of(endpoint)) and endpoint.startswith("tcp:"):
            raise StartupError(
                f"{endpoint} is every interface, which is no address to announce: name the one that the other nodes "
                "reach (--host, or router.host)"
            )
        if secure or _leaves_machine(endpoint):
            keys = _needed(endpoint, secure)
            # The guard first: from the moment that it listens the socket asks it about everybody.
            guard_of(socket.context, _accepted).watch(socket)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        _notice_silence(socket, endpoint)
        socket.bind(endpoint)
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if _leaves_machine(bound) != _leaves_machine(endpoint):
            raise StartupError(f"{endpoint} is really {bound}, which tells the other end something else: name that one")
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == zmq.EADDRINUSE:
            raise PortInUse(f"{endpoint} is in use; stop what listens there or choose another port") from None
        raise StartupError(f"can't listen on {endpoint}: {error.strerror}") from None
    except StartupError:
        socket.close(0)
        raise
    return bound


def connect(socket: Any, endpoint: str, *, secure: bool = False) -> None:
    """Connect; returns at once, and goes on trying for as long as the socket lives. Encrypted when the endpoint is on
    another machine, or `secure`. Closes the socket and raises StartupError without the keys for that."""
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    if secure or _leaves_machine(endpoint):
        try:
            keys = _needed(endpoint, secure)
        except StartupError:
            socket.close(0)
            raise
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    _notice_silence(socket, endpoint)
    socket.connect(endpoint)


def _notice_silence(socket: Any, endpoint: str) -> None:
    if _leaves_machine(endpoint):
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECTING)


def _leaves_machine(endpoint: str) -> bool:
    return not endpoint.startswith(("inproc:", "ipc:")) and not hosts.is_loopback(hosts.host_of(endpoint))


def _needed(endpoint: str, secure: bool) -> Keys:
    if _keys is None:
        why = "carries what only the cluster may read" if secure else "is not on loopback"
        raise StartupError(
            f"{endpoint} {why} and there are no keys: make some with `baton keys FILE`, and set cluster.key_file to "
            "that file on every node"
        )
    return _keys


def _accepted() -> bytes | None:
    return _keys.public_bytes if _keys is not None else None
