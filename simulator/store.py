"""A node's store around its real state: connections of workers, links to other stores, threads of the disk.

It works as `kvstore.service`, but handles each event when it arrives instead of polling.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from baton.clock import Tick
from baton.config import Config
from baton.messages import Envelope, Heartbeat, Hello, Namespace, Peer, PinPages, Snapshot, UnpinPages, WorkerDied
from baton.peer_protocol import FetchedPages, PageReply, PageRequest
from baton.router_links import RouterMessage
from baton.store_protocol import Attach, Attached, StoreHeartbeat
from kvstore.client.transfer import StoreUp
from kvstore.disk.interface import DiskOrder
from kvstore.server.events import (
    CallReceived,
    CloseConnection,
    Connected,
    Disconnected,
    RouterMessageReceived,
    SendReply,
    StoreCommand,
    StoreEvent,
    TellRouter,
    WriterDied,
)
from kvstore.server.state import StoreState
from kvstore.transport.interface import (
    AnswerPeer,
    AskPeer,
    ExpectPages,
    FetchRetracted,
    PagesLanded,
    PagesSent,
    PeerReplied,
    PeerRequested,
    RetractFetch,
    SendPages,
    SlotVerified,
    VerifySlot,
)
from simulator.clock import Agenda
from simulator.disk import SimulatedDisk
from simulator.feed import Feed
from simulator.network import SimulatedNetwork
from simulator.routers import RouterAddress, RouterEndpoint, SimulatedRouterLinks
from simulator.worker import SimulatedWorker

_MESSAGE_BYTES = 256 * 2**20  # most bytes of pages in one transfer; many small pages are one event


class SimulatedStore:
    """One store process, from its start to its end."""

    def __init__(
        self, peer: Peer, config: Config, namespace: Namespace, page_bytes: int, agenda: Agenda,
        network: SimulatedNetwork, routers: Sequence[RouterAddress], disk: SimulatedDisk,
    ) -> None:  # fmt: skip
        """`disk` outlives this process."""
        self.peer = peer
        self._namespace, self._page_bytes = namespace, page_bytes
        self._agenda, self._network = agenda, network
        self._disk = disk.opened(self._handle)
        beat, silence = config.cluster.heartbeat_ms / 1_000, config.cluster.heartbeat_timeout_ms / 1_000
        self.state = StoreState(peer, config.store, self._disk.index, config.disk.admit_after, beat, silence)
        hello = Hello(peer, events="events", replay="replay", data=f"sim://{peer.incarnation}")
        self._routers = SimulatedRouterLinks(routers, hello, network)
        self.feed = Feed(peer.incarnation, config.pages.page_size)
        self.followers: dict[str, RouterEndpoint] = {}
        self._connections = itertools.count(1)
        self._workers: dict[int, SimulatedWorker] = {}  # by connection
        self._expected: dict[int, set[int]] = {}  # indices by fetch
        self._events: deque[StoreEvent] = deque()
        self._serves: dict[tuple[str, int], list[SendPages]] = {}  # by peer and fetch; not sent yet
        self._handling = False

    # --- workers ------------------------------------------------------------------------------------------------------

    def attach(self, worker: SimulatedWorker) -> int:
        """Connect a worker; return the connection."""
        connection = next(self._connections)
        self._workers[connection] = worker
        self._handle(Connected(connection, worker.peer.pid))
        self.hear(connection, Attach(worker.peer, self._namespace, self._page_bytes))
        return connection

    def call(self, worker: SimulatedWorker, call: Any) -> None:
        """Send a worker's call to this store."""
        self._network.call(self.peer.incarnation, self.hear, worker.connection, call)

    def hear(self, connection: int, call: Any) -> None:
        """Handle a worker's call that has arrived."""
        self._handle(CallReceived(connection, call))

    def worker_gone(self, worker: SimulatedWorker) -> None:
        """Handle a worker's death, as the kernel reports it. Its earlier calls still count."""
        self._network.call(self.peer.incarnation, self._bury, worker)

    def worker_left(self, worker: SimulatedWorker) -> None:
        """Handle a worker that closes its connection while its process lives on."""
        self._network.call(self.peer.incarnation, self._disconnect, worker)

    def _disconnect(self, worker: SimulatedWorker) -> None:
        if self._workers.pop(worker.connection, None) is not None:
            self._handle(Disconnected(worker.connection))

    def _bury(self, worker: SimulatedWorker) -> None:
        self._disconnect(worker)
        self._handle(WriterDied(worker.peer.pid))
        self._routers.tell_all(WorkerDied(worker.peer.incarnation, worker.peer.pid))

    # --- routers ------------------------------------------------------------------------------------------------------

    def receive_from_router(self, place: int, envelope: Envelope[Any]) -> None:
        """Take a router's message. A lost router needs no action: its pins expire."""
        for said in self._routers.hear(place, envelope, self._agenda.now):
            if isinstance(said, RouterMessage) and isinstance(said.message, PinPages | UnpinPages):
                self._handle(RouterMessageReceived(said.message, said.router))

    def beat(self) -> float:
        """Run an idle iteration of its loop and send heartbeats; return the seconds until the next."""
        self._handle(Tick())
        for _ in self._routers.tick(self._agenda.now):
            pass
        self._routers.beat(self._heartbeat)
        return self._routers.heartbeat

    def _heartbeat(self, heard: int, router: str) -> Heartbeat:
        return Heartbeat(
            heard,
            self.state.load(),
            attempts=self.state.pins(router),
            events=self.feed.sequence,
            digest=self.feed.digest,
        )

    def snapshot(self) -> list[Snapshot]:
        """Return a snapshot for followers of its KV events."""
        self._publish()
        return self.feed.snapshot(self.state.snapshot())

    # --- the state ----------------------------------------------------------------------------------------------------

    def _handle(self, event: StoreEvent) -> None:
        """Handle an event and all that follow from it at once. A dead process handles none."""
        if self._network.process(self.peer.incarnation) is not self:
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events or self._serves:
            while self._events:
                for command in self.state.handle(self._events.popleft(), self._agenda.now):
                    self._do(command)
            self._serve()
        self._handling = False
        self._publish()

    def _do(self, command: StoreCommand) -> None:
        match command:
            case SendReply(reply=StoreHeartbeat()):
                pass  # not simulated: workers learn of a store's end at once
            case SendReply(connection=connection, reply=reply):
                if (worker := self._workers.get(connection)) is not None:
                    said = StoreUp(reply.slots, reply.page_bytes) if isinstance(reply, Attached) else reply
                    self._network.call(worker.peer.incarnation, worker.receive_from_store, said, connection)
            case CloseConnection(connection=connection):
                raise AssertionError(f"the store dropped the well-behaved {self._workers.get(connection)}")
            case TellRouter(message=message, router=router):
                self._routers.say(message, router)
            case AskPeer(source=source, request=request):
                self._tell(source.store, "asked", request)
            case AnswerPeer(peer=peer, reply=reply):
                self._tell(peer, "answered", reply)
            case ExpectPages(fetch=fetch, slots=slots):
                self._expected.setdefault(fetch, set()).update(index for index, _ in slots)
            case RetractFetch(fetch=fetch):
                self._expected.pop(fetch, None)
                self._events.append(FetchRetracted(fetch))
            case SendPages(peer=peer, fetch=fetch):
                self._serves.setdefault((peer, fetch), []).append(command)
            case VerifySlot(number=number):
                self._events.append(SlotVerified(number, intact=True))
            case DiskOrder():
                self._disk.submit(command)
            case _:  # orders to divide the arena: there is no memory
                pass

    def _publish(self) -> None:
        for batch in self.feed.batches(self.state.drain_events()):
            for incarnation, router in self.followers.items():
                self._network.message(self.peer.incarnation, incarnation, router.hear_events, batch)

    # --- other stores -------------------------------------------------------------------------------------------------

    def asked(self, peer: str, request: PageRequest) -> None:
        self._handle(PeerRequested(peer, request))

    def answered(self, peer: str, reply: PageReply) -> None:
        self._handle(PeerReplied(peer, reply))

    def landed(self, sent: FetchedPages) -> None:
        """Take arriving pages, and drop those that no fetch expects any more."""
        expected = self._expected.get(sent.fetch, set())
        pages = tuple((page.index, page.checksum) for page in sent.pages if page.index in expected)
        expected.difference_update(index for index, _ in pages)
        self._handle(PagesLanded(sent.fetch, pages))

    def _tell(self, peer: str, how: str, words: PageRequest | PageReply) -> None:
        if isinstance(store := self._network.process(peer), SimulatedStore):
            deliver = getattr(store, how)
            self._network.pages(self._place, store._place, 0, _nothing, deliver, self.peer.incarnation, words)

    def _serve(self) -> None:
        """Send the pages ordered in this iteration, those of one fetch together."""
        serves, self._serves = self._serves, {}
        for (peer, fetch), orders in serves.items():
            store = self._network.process(peer)
            if not isinstance(store, SimulatedStore):
                self._events.extend(PagesSent(order.number) for order in orders)
                continue
            for part in _parts(orders, _MESSAGE_BYTES // self._page_bytes):
                pages = tuple(page for order in part for page in order.pages)
                self._network.pages(
                    self._place, store._place, len(pages) * self._page_bytes, partial(self._served, part),
                    store.landed, FetchedPages(fetch, pages),
                )  # fmt: skip

    def _served(self, orders: Iterable[SendPages]) -> None:
        for order in orders:
            self._handle(PagesSent(order.number))

    @property
    def _place(self) -> tuple[str, str]:
        return self.peer.node, self.peer.incarnation


def _nothing() -> None:
    pass


def _parts(orders: Iterable[SendPages], most: int) -> Iterator[list[SendPages]]:
    """Yield the orders in groups of at most `most` pages, in order. A larger order is a group of its own."""
    part: list[SendPages] = []
    pages = 0
    for order in orders:
        if part and pages + len(order.pages) > most:
            yield part
            part, pages = [], 0
        part.append(order)
        pages += len(order.pages)
    if part:
        yield part
