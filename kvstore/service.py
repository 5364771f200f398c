"""The store's process: one loop on one thread that owns the sockets, the arena and the clock, and does what
`StoreState` says.

    workers ⇄ Unix socket ──calls──▶ state ──replies──▶
    a pidfd per process that writes ──a worker is gone, and all that write for it──▶ state
    threads of the disk tier and of the page transport ⇄ orders, events ⇄ state
    state ──changes──▶ KV events (PUB)          state.load() ──▶ heartbeats to the routers

The loop never touches a page's bytes: workers copy them between their device and the arena themselves, and threads
between the arena and the disk or other stores.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import msgspec

from baton import hosts
from baton.clock import PauseDetector, Tick
from baton.config import Config
from baton.errors import MalformedMessage, StoreGone
from baton.logs import RateLimit, RateLimitedLog
from baton.messages import Heartbeat, Hello, Peer, PinPages, StartTrace, StopTrace, ToStore, UnpinPages, WorkerDied
from baton.metrics import Metrics
from baton.monotonic_clock import MonotonicClock
from baton.process import settle
from baton.router_links import RouterLinks, RouterMessage
from baton.store_protocol import Attach, Attached, AttachRefused, StoreCall
from baton.system_memory import available_memory
from baton.trace import Tracer, new_mark
from baton.unix import OutOfDescriptors, UnixListener, UnixSocket, is_pidfd, readable
from baton.wire import Poller, refused
from kvstore.arena.memory import Arena, arena_bytes
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.connection import store_address
from kvstore.disk.index import DiskIndex
from kvstore.disk.io_threads import DiskTier
from kvstore.disk.orders import DiskOrder
from kvstore.events.publisher import KvEventPublisher
from kvstore.server import events
from kvstore.server.metrics import metric_samples
from kvstore.server.state import StoreState
from kvstore.transport.nixl_transport import NixlTransport
from kvstore.transport.zmq_transport import ZmqTransport

log = logging.getLogger(__name__)
of_peers = RateLimitedLog(log, RateLimit(burst=10))  # lines that a worker can trigger
of_strangers = RateLimitedLog(log)  # lines that any process of the machine can trigger

_TURN = 0.1  # seconds between two turns of a loop that has nothing to do
_CONGESTED = 0.002  # the same while a worker is slow to read, or a follower reads
_PAUSE = 1.0  # seconds; a longer turn means that this process was paused, and no other one is to blame
_MAX_REFUSAL = 1_000  # characters: what was refused may be quoted in it
_CALLS_PER_TURN = 64  # of one connection, so that no worker keeps the others waiting
_ACCEPTED_PER_TURN = 16  # connections, refused ones included
_ACCEPT_AGAIN = 0.5  # seconds without accepting, after the process had no descriptor left for a connection


def run(
    config: Config, name: str, node: str, routers: Sequence[str], stop: threading.Event, host: str = "127.0.0.1"
) -> None:
    """Serve until `stop` is set. `routers` are ZMQ endpoints (none: serve workers without one), `node` the machine
    whose workers find this store. Raises NotEnoughMemory or PortInUse when it can't start."""
    with StoreService(config, name, node, routers, host) as store:
        settle()
        log.info("store %s serves %d bytes at %s", store.me.incarnation, store.settings.host_cache_bytes, store.address)
        while not stop.is_set():
            store.turn()


@dataclass(eq=False, slots=True)
class _Connection:
    number: int
    socket: UnixSocket[StoreCall]
    fd: int


class StoreService:
    """The process around the state."""

    def __init__(self, config: Config, name: str, node: str, routers: Sequence[str], host: str = "127.0.0.1") -> None:
        """Allocate the arena and start listening, on `host` where others reach this node. Raises NotEnoughMemory or
        PortInUse."""
        self.me = Peer("store", name, node, f"{name}-{secrets.token_hex(6)}", os.getpid())
        self.address = store_address(config.cluster.name, node)
        size = arena_bytes(config, available_memory())
        self.settings = msgspec.structs.replace(config.store, host_cache_bytes=size)
        self._clock = MonotonicClock()
        self._pauses = PauseDetector(_PAUSE)
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup:
            self._listener: UnixListener[StoreCall] = UnixListener(self.address, StoreCall)
            cleanup.callback(self._listener.close)
            self._arena = Arena.create(self.settings.host_cache_bytes)
            cleanup.callback(self._arena.close)
            silence = config.cluster.heartbeat_timeout_ms / 1_000
            transport = NixlTransport if config.store.transport == "nixl" else ZmqTransport
            self._transport = transport(self.me, hosts.endpoint(host), silence)
            cleanup.callback(self._transport.close)
            self._disk: DiskTier | None = None
            if config.disk.path:
                disk = self._disk = DiskTier(Path(config.disk.path) / node, self._arena.slot)
                cleanup.callback(disk.close)
            self._events = KvEventPublisher(self.me.incarnation, config.model.served_name, self._clock, host)
            cleanup.callback(self._events.close)
            self._metrics = Metrics()
            cleanup.callback(self._metrics.close)
            hello = Hello(
                self.me,
                events=self._events.endpoint,
                replay=self._events.replay,
                metrics=self._metrics.serve(host),
                data=self._transport.endpoint,
            )
            self._routers = RouterLinks(routers, hello, ToStore, self._clock)
            cleanup.callback(self._routers.close)
            self._poller = Poller()
            self._poller.add(self._listener.fileno())
            self._poller.add(self._transport.fileno())
            self._poller.add(self._events)
            if self._disk is not None:
                self._poller.add(self._disk.fileno())
            for link in self._routers.links:
                self._poller.add(link)
            self._cleanup = cleanup.pop_all()
        self._heartbeat_seconds = config.cluster.heartbeat_ms / 1_000
        self._state = StoreState(
            self.me,
            self.settings,
            DiskIndex(config.disk),
            config.disk.admit_after,
            self._heartbeat_seconds,
            config.cluster.heartbeat_timeout_ms / 1_000,
        )
        self._connections: dict[int, _Connection] = {}
        self._pidfds: dict[int, int] = {}  # pid → pidfd, of every process whose end matters
        self._writers: dict[int, list[int]] = {}  # pid → pidfds of the other processes that write for it
        self._dying: dict[int, list[int]] = {}  # the same of processes that are gone, while some of these are not
        self._workers: dict[int, set[str]] = {}  # pid → incarnations that have attached; routers hear of their end
        self._next_number = 0
        self._next_metrics = 0.0
        self._congested = False
        self._accept_at: float | None = None  # when to accept again; none: connections are accepted
        self._strangers = 0  # connections of other users, closed at once
        self._calls: Counter[str] = Counter()
        self._malformed = 0
        self._traces = config.cluster.traces
        self._tracer = Tracer(name, config.cluster.kept_traces)
        if config.cluster.trace_steps:
            self._tracer.start(self._traces, new_mark(), config.cluster.trace_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracer.close()
        for connection in self._connections.values():
            connection.socket.close()
        for pidfd in chain(self._pidfds.values(), *self._writers.values(), *self._dying.values()):
            os.close(pidfd)
        self._cleanup.close()

    def turn(self) -> None:
        """Wait for something to do, for a moment at most, and do it. In a trace, turns with something to do are
        steps."""
        self._metrics.loop_turned()
        with self._tracer.turn():
            self._turn()

    def _turn(self) -> None:
        span = self._tracer.span
        with span("wait", "sockets"):
            ready = self._poller.wait(_CONGESTED if self._congested or self._events.under_way else _TURN)
        if ready:
            self._tracer.count()
        now = self._clock.now()
        paused = self._pauses.tick(now)
        for connection in [connection for connection in self._connections.values() if connection.fd in ready]:
            with span("calls", "sockets", connection=connection.number):
                self._hear(connection, _CALLS_PER_TURN)
        for pid in [pid for pid, pidfd in self._pidfds.items() if pidfd in ready]:
            self._writer_died(pid)
        for pid in [pid for pid, pidfds in self._dying.items() if not ready.isdisjoint(pidfds)]:
            self._await_writers(pid)
        if self._accept_at is not None and now >= self._accept_at:
            self._accept_at = None
            self._poller.add(self._listener.fileno())
        if self._listener.fileno() in ready:
            self._accept(now)
        with span("routers", "sockets"):
            self._attend_routers(now, paused)
        for threads in (self._transport, self._disk):
            for event in threads.poll() if threads is not None else ():
                self._handle(event)
        self._handle(Tick(paused))
        with span("flush", "sockets"):
            self._flush()
        with span("publish", "sockets"):
            self._publish(now)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        """Take some of the connections that wait; the poller reports the rest in the next turn."""
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                socket = self._listener.accept()
            except OutOfDescriptors as error:
                of_strangers.warning("no connection is accepted for %.1f s: %s", _ACCEPT_AGAIN, error)
                # A listener with a connection that can't be taken stays readable: to poll it would be a busy loop.
                self._poller.remove(self._listener.fileno())
                self._accept_at = now + _ACCEPT_AGAIN
                return
            if socket is None:
                return
            if socket.uid != os.getuid():
                self._strangers += 1
                of_strangers.warning("user %d (process %d) may not attach to this store", socket.uid, socket.pid)
                socket.close()
                continue
            if not self._watch(socket):
                socket.close()
                continue
            self._next_number += 1
            connection = _Connection(self._next_number, socket, socket.fileno())
            self._connections[connection.number] = connection
            self._poller.add(connection.fd)
            self._handle(events.Connected(connection.number, socket.pid))

    def _watch(self, socket: UnixSocket[StoreCall]) -> bool:
        """Make sure that the kernel tells us of the end of the peer's process. False when it has ended already, or
        while processes still write for an earlier one of its number."""
        known = self._pidfds.get(socket.pid)
        if known is not None:
            if not readable(known, 0):
                return True
            self._writer_died(socket.pid)  # another process has its number now
        if socket.pid in self._dying:
            return False
        try:
            self._pidfds[socket.pid] = socket.pidfd()
        except OSError:  # it has ended, or there is no descriptor left: the worker connects again
            return False
        self._poller.add(self._pidfds[socket.pid])
        return True

    def _hear(self, connection: _Connection, limit: int | None = None) -> None:
        """Take at most `limit` calls of one worker (none: all there are)."""
        heard = 0
        while connection.number in self._connections and (limit is None or heard < limit):
            heard += 1
            try:
                received = connection.socket.receive()
            except StoreGone:
                self._connection_lost(connection)
                return
            except MalformedMessage as error:
                self._malformed += 1
                of_peers.warning("closing the connection of process %d: %s", connection.socket.pid, error)
                with contextlib.suppress(StoreGone):
                    connection.socket.send(AttachRefused(error.reason, str(error)[:_MAX_REFUSAL]))
                self._connection_lost(connection)
                return
            if received is None:
                return
            call, descriptors = received
            self._calls[type(call).__name__] += 1
            if isinstance(call, Attach):
                self._take_writers(connection.socket.pid, descriptors)
                self._workers.setdefault(connection.socket.pid, set()).add(call.peer.incarnation)
            else:
                _close(descriptors)
            self._handle(events.CallReceived(connection.number, call))

    def _writer_died(self, pid: int) -> None:
        """The kernel has told of a process's end; what it had said before still counts. Its slots are free once all
        that write for it have ended, too."""
        for connection in [each for each in self._connections.values() if each.socket.pid == pid]:
            self._hear(connection)
        self._dying[pid] = self._writers.pop(pid, [])
        self._unwatch(pid)
        for pidfd in self._dying[pid]:
            self._poller.add(pidfd)
        self._await_writers(pid)
        for incarnation in self._workers.pop(pid, ()):
            of_peers.info("process %d, %s, is gone", pid, incarnation)
            self._routers.tell_all(WorkerDied(incarnation, pid))

    def _await_writers(self, pid: int) -> None:
        """Tell the state that a process is gone, if all that write for it are."""
        ended = [pidfd for pidfd in self._dying[pid] if readable(pidfd, 0)]
        for pidfd in ended:
            self._poller.remove(pidfd)
        _close(ended)
        if left := [pidfd for pidfd in self._dying[pid] if pidfd not in ended]:
            self._dying[pid] = left
            return
        del self._dying[pid]
        self._handle(events.WriterDied(pid))

    def _take_writers(self, pid: int, descriptors: Sequence[int]) -> None:
        """Keep the pidfds that came with an Attach, in place of those of an earlier one."""
        if not descriptors:
            return
        pidfds = [fd for fd in descriptors if is_pidfd(fd)]
        _close([fd for fd in descriptors if fd not in pidfds])
        _close(self._writers.pop(pid, []))
        self._writers[pid] = pidfds

    def _connection_lost(self, connection: _Connection) -> None:
        self._close(connection)
        self._handle(events.Disconnected(connection.number))
        self._unwatch_if_done(connection.socket.pid)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.number]
        self._poller.remove(connection.fd)
        connection.socket.close()

    def _unwatch_if_done(self, pid: int) -> None:
        here = any(connection.socket.pid == pid for connection in self._connections.values())
        if not here and pid not in self._workers and not self._state.needs_proof(pid):
            self._unwatch(pid)

    def _unwatch(self, pid: int) -> None:
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            self._poller.remove(pidfd)
            os.close(pidfd)
        _close(self._writers.pop(pid, []))

    # --- the state's commands ---------------------------------------------------------------------------------------

    def _handle(self, event: events.StoreEvent) -> None:
        with self._tracer.span(
            type(event.call if isinstance(event, events.CallReceived) else event).__name__, "scheduler"
        ):
            waiting: deque[events.StoreCommand] = deque(self._state.handle(event, self._clock.now()))
        while waiting:
            match waiting.popleft():
                case events.SendReply(connection=number, reply=reply) if (
                    connection := self._connections.get(number)
                ) is not None:
                    try:
                        with self._tracer.span("reply", "sockets"):
                            connection.socket.send(reply, [self._arena.fd] if isinstance(reply, Attached) else ())
                    except (StoreGone, MalformedMessage) as error:
                        if connection.socket.closed_by_peer:
                            continue  # `_hear` takes what it had said, and then the end
                        of_peers.warning("closing a connection: %s", error)
                        self._close(connection)
                        waiting += self._state.handle(events.Disconnected(number), self._clock.now())
                        self._unwatch_if_done(connection.socket.pid)
                case events.CloseConnection(connection=number) if (
                    connection := self._connections.get(number)
                ) is not None:
                    self._close(connection)
                    self._unwatch_if_done(connection.socket.pid)
                case events.SendReply() | events.CloseConnection():
                    pass  # the connection has ended meanwhile
                case events.TellRouter(message=message, router=router):
                    self._routers.say(message, router)
                case events.DivideArena(page_bytes=page_bytes, kv_heads=kv_heads):
                    self._arena.divide(page_bytes)
                    self._transport.use(self._arena.view, page_bytes, kv_heads)
                case LeaveRing(header=header) as left:
                    left.mark(self._arena.slot(header))
                case DiskOrder() as order:
                    assert self._disk is not None, "an order for a disk tier that there is not"
                    with self._tracer.span("order to the disk", "copies"):
                        self._disk.submit(order)
                case order:
                    with self._tracer.span("order to the transport", "copies"):
                        self._transport.submit(order)

    def _flush(self) -> None:
        """Push on what workers have been slow to read."""
        self._congested = False
        for connection in list(self._connections.values()):
            try:
                self._congested |= not connection.socket.flush()
            except StoreGone:
                self._connection_lost(connection)

    # --- routers ----------------------------------------------------------------------------------------------------

    def _attend_routers(self, now: float, paused: float) -> None:
        """Drop nothing for a lost router: pages serve all routers, and pins end with their time."""
        for event in self._routers.receive(now, paused):
            match event:
                case RouterMessage(message=StartTrace(mark=mark, steps=steps)):
                    self._tracer.start(self._traces, mark, steps)
                case RouterMessage(message=StopTrace(mark=mark)):
                    self._tracer.stop(mark)
                case RouterMessage(router=router, message=PinPages() | UnpinPages() as message):
                    self._handle(events.RouterMessageReceived(message, router))
                case _:
                    pass
        self._routers.beat(self._heartbeat, None)

    def _heartbeat(self, heard: int, router: str) -> Heartbeat:
        return Heartbeat(
            heard,
            self._state.load(),
            attempts=self._state.pins(router),
            events=self._events.sequence,
            digest=self._events.digest,
            tracing=self._tracer.mark,
        )

    # --- what others read -------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        self._events.publish(self._state.drain_events(), self._state.page_size)
        self._events.answer(self._state.snapshot)
        if now >= self._next_metrics:
            self._next_metrics = now + self._heartbeat_seconds
            stats, peers = self._state.stats(now), self._transport.stats()
            malformed = self._malformed + self._routers.malformed + self._events.malformed + peers.malformed
            self._metrics.publish(
                {
                    **metric_samples(stats),
                    **self._events.metric_samples,
                    "store_calls": {(call,): count for call, count in self._calls.items()},
                    "malformed_messages": malformed + stats.refusals,
                    "connections_refused": refused() + self._strangers,
                    "pages_unexpected": peers.unexpected,
                    "peer_links": peers.links,
                    "peer_messages_dropped": peers.dropped,
                }
            )


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
