"""Access to our encrypted sockets: one thread per ZMQ context, which ZMQ asks about every client (ZAP).

It accepts clients that show the cluster's public key, and logs a refusal. Clients that never get as far (no encryption,
another server's key) are reported by ZMQ's own monitors. A refused client tries again for as long as it lives, so
refusals are counted and logged at most once in a while. Without its guard an encrypted socket accepts no client: ZMQ is
told to insist on the answer.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

DOMAIN = b"baton"
_ZAP = "inproc://zeromq.zap.01"
_NEWS = 500  # milliseconds until a socket that was just bound is watched; its events wait meanwhile
_SILENCE = 10.0  # seconds between two lines about refusals
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

_guards: dict[int, ConnectionGuard] = {}
_lock = threading.Lock()
_numbers = itertools.count()


def guard_of(context: zmq.Context[Any], accepted: Callable[[], bytes | None]) -> ConnectionGuard:
    """The guard of that context, started when there is none yet. asyncio's context is another than the plain one."""
    with _lock:
        guard = _guards.get(context.underlying)
        if guard is None or not guard.alive:
            guard = _guards[context.underlying] = ConnectionGuard(context, accepted)
        return guard


def refused() -> int:
    """How many connections were refused in this process."""
    return sum(guard.refused for guard in list(_guards.values()))


class ConnectionGuard:
    """Answer ZMQ until the context ends. `accepted`: the public key that is accepted now; none: no key."""

    def __init__(self, context: zmq.Context[Any], accepted: Callable[[], bytes | None]) -> None:
        self.refused = 0
        self._accepted = accepted
        # A shadow: plain sockets whatever kind the context makes, and nothing ends with it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._questions = self._context.socket(zmq.REP)
        self._questions.bind(_ZAP)
        self._bound: deque[zmq.Socket[bytes]] = deque()  # monitors that the thread has not taken over yet
        self._last_warning = float("-inf")
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def watch(self, socket: Any) -> None:
        """Have this socket's failed handshakes counted, for as long as it lives. Call it before it is bound."""
        address = f"inproc://baton.monitor.{next(_numbers)}"
        socket.monitor(address, _FAILURES | zmq.EVENT_MONITOR_STOPPED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # ZMQ's own thread would wait for a reader that is slow
        monitor.connect(address)
        self._bound.append(monitor)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        monitors: set[zmq.Socket[bytes]] = set()
        try:
            while True:
                ready = [socket for socket, _ in poller.poll(_NEWS)]
                while self._bound:
                    monitors.add(self._bound[0])
                    poller.register(self._bound.popleft(), zmq.POLLIN)
                for socket in ready:
                    if socket is self._questions:
                        self._answer()
                    elif not self._note(socket):
                        poller.unregister(socket)
                        monitors.discard(socket)
                        socket.close(0)
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in (self._questions, *monitors, *self._bound):
                socket.close(0)

    def _answer(self) -> None:
        version, number, _domain, address, _identity, mechanism, *credentials = self._questions.recv_multipart()
        expected = self._accepted()
        good = mechanism == b"CURVE" and expected is not None and hmac.compare_digest(credentials[0], expected)
        if not good:
            self._count(f"{address.decode(errors='replace')} showed other keys than the cluster's")
        status = (b"200", b"OK") if good else (b"400", b"not the keys of this cluster")
        self._questions.send_multipart([version, number, *status, b"", b""])

    def _note(self, monitor: zmq.Socket[bytes]) -> bool:
        """One event of a monitor; False when its socket has closed."""
        event: Any = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        self._count(f"{event['endpoint'].decode(errors='replace')} was spoken to without the cluster's keys")
        return True

    def _count(self, what: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._last_warning >= _SILENCE:
            self._last_warning = now
            log.warning("refused a connection: %s (%d so far)", what, self.refused)
