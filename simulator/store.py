"""A node's store around its real state: connections of workers, links to other stores, threads of the disk.

It works as `kvstore.service`, but handles each event when it arrives instead of polling.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from baton import messages as msg
from baton.clock import Tick
from baton.config import Config
from baton.router_links import RouterMessage
from baton.store_protocol import Attach, Attached, StoreHeartbeat, StoreReply
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.transfer import StoreUp
from kvstore.disk.orders import DiskOrder
from kvstore.server import events
from kvstore.server.state import StoreState
from simulator.clock import Agenda
from simulator.disk import SimulatedDisk
from simulator.feed import Feed
from simulator.network import SimulatedNetwork
from simulator.ring import RingMarks
from simulator.routers import RouterAddress, RouterEndpoint, SimulatedRouterLinks
from simulator.store_shell import StoreShell
from simulator.transport import Parcel, SimulatedTransport, SlotMemory
from simulator.worker import SimulatedWorker

_MESSAGE_BYTES = 256 * 2**20  # most bytes of pages in one transfer; many small pages are one event


class SimulatedStore(StoreShell):
    """One store process, from its start to its end."""

    def __init__(
        self, peer: msg.Peer, config: Config, namespace: msg.Namespace, page_bytes: int, agenda: Agenda,
        network: SimulatedNetwork, routers: Sequence[RouterAddress], disk: SimulatedDisk,
        memory: SlotMemory,
    ) -> None:  # fmt: skip
        """`disk` outlives this process."""
        self.peer = peer
        self._namespace, self._page_bytes = namespace, page_bytes
        self._agenda, self._network = agenda, network
        self._disk = disk.opened(self.handle)
        beat, silence = config.cluster.heartbeat_ms / 1_000, config.cluster.heartbeat_timeout_ms / 1_000
        self.begin(
            StoreState(peer, config.store, self._disk.index, config.disk.admit_after, beat, silence),
            SimulatedTransport(
                peer.incarnation, memory, self.handle, self._post, most=_MESSAGE_BYTES // page_bytes
            ),
        )  # fmt: skip
        hello = msg.Hello(peer, events="events", replay="replay", data=f"sim://{peer.incarnation}")
        self._routers = SimulatedRouterLinks(routers, hello, network)
        self.feed = Feed(peer.incarnation, config.pages.page_size)
        self.ring_marks = RingMarks()
        self.followers: dict[str, RouterEndpoint] = {}
        self._connections = itertools.count(1)
        self._workers: dict[int, SimulatedWorker] = {}  # by connection

    # --- workers ------------------------------------------------------------------------------------------------------

    def attach(self, worker: SimulatedWorker) -> int:
        """Connect a worker; return the connection."""
        connection = next(self._connections)
        self._workers[connection] = worker
        self.handle(events.Connected(connection, worker.peer.pid))
        self.hear(connection, Attach(worker.peer, self._namespace, self._page_bytes))
        return connection

    def call(self, worker: SimulatedWorker, call: Any) -> None:
        self._network.call(worker.connection, self.peer.incarnation, self.hear, worker.connection, call)

    def hear(self, connection: int, call: Any) -> None:
        """Handle a worker's call that has arrived."""
        self.handle(events.CallReceived(connection, call))

    def worker_gone(self, worker: SimulatedWorker) -> None:
        """Handle a worker's death, as the kernel reports it. Its earlier calls still count."""
        self._network.call(worker.connection, self.peer.incarnation, self._bury, worker)

    def worker_left(self, worker: SimulatedWorker) -> None:
        """Handle a worker that closes its connection while its process lives on."""
        self._network.call(worker.connection, self.peer.incarnation, self._disconnect, worker)

    def _disconnect(self, worker: SimulatedWorker) -> None:
        if self._workers.pop(worker.connection, None) is not None:
            self.handle(events.Disconnected(worker.connection))

    def _bury(self, worker: SimulatedWorker) -> None:
        self._disconnect(worker)
        self.handle(events.WriterDied(worker.peer.pid))
        self._routers.tell_all(msg.WorkerDied(worker.peer.incarnation, worker.peer.pid))

    # --- routers ------------------------------------------------------------------------------------------------------

    def receive_from_router(self, place: int, envelope: msg.Envelope[Any]) -> None:
        """Take a router's message. A lost router needs no action: its pins expire."""
        for event in self._routers.hear(place, envelope, self._agenda.now):
            if isinstance(event, RouterMessage) and isinstance(event.message, msg.PinPages | msg.UnpinPages):
                self.handle(events.RouterMessageReceived(event.message, event.router))

    def beat(self) -> float:
        """Run an idle iteration of its loop and send heartbeats; return the seconds until the next."""
        self.handle(Tick())
        for _ in self._routers.tick(self._agenda.now):
            pass
        self._routers.beat(self._heartbeat)
        return self._routers.heartbeat

    def _heartbeat(self, heard: int, router: str) -> msg.Heartbeat:
        return msg.Heartbeat(
            heard,
            self.state.load(),
            attempts=self.state.pins(router),
            events=self.feed.sequence,
            digest=self.feed.digest,
        )

    def snapshot(self) -> list[msg.Snapshot]:
        self._publish()
        return self.feed.snapshot(self.state.snapshot())

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._agenda.now

    def handle(self, event: events.StoreEvent) -> None:
        """Handle an event and all that follow from it at once. A dead process handles none."""
        if self._network.process(self.peer.incarnation) is not self:
            return
        handling = self.handling
        super().handle(event)
        if not handling:
            self._publish()

    def reply(self, connection: int, reply: StoreReply) -> None:
        """Answer a worker. Heartbeats are not simulated: workers learn of a store's end at once."""
        if not isinstance(reply, StoreHeartbeat) and (worker := self._workers.get(connection)) is not None:
            event = StoreUp(reply.slots, reply.page_bytes) if isinstance(reply, Attached) else reply
            self._network.call(connection, worker.peer.incarnation, worker.receive_from_store, event, connection)

    def tell_router(self, message: msg.FromStore, router: str) -> None:
        self._routers.say(message, router)

    def leave_ring(self, left: LeaveRing) -> None:
        self.ring_marks.leave(left)

    def order_disk(self, order: DiskOrder) -> None:
        self._disk.submit(order)

    def _publish(self) -> None:
        for batch in self.feed.batches(self.state.drain_events()):
            for incarnation, router in self.followers.items():
                self._network.message(self.peer.incarnation, incarnation, router.hear_events, batch)

    # --- other stores -------------------------------------------------------------------------------------------------

    def _post(self, to: str, parcel: Parcel) -> None:
        store = self._network.process(to)
        if isinstance(store, SimulatedStore):
            size = sum(len(order.pages) for order in parcel.orders) * self._page_bytes
            self._network.pages(self._place, store._place, size, parcel.leave, store.transport.arrive, parcel)
        else:
            parcel.release()

    @property
    def _place(self) -> tuple[str, str]:
        return self.peer.node, self.peer.incarnation
