"""Several routers on the same workers and stores, as data: real states of all, real memberships, links that misbehave.

The devices (`tests.rig`) check each step: a page of another request, or one that is freed while a sequence reads it,
fails the test at once. Every request belongs to the router that it was sent to, and ends there once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

from baton import config as settings
from baton.clock import Tick
from baton.membership import RouterLost
from baton.messages import (
    Envelope,
    Heartbeat,
    Hello,
    ModelCard,
    Peer,
    PinPages,
    SamplingParams,
    UnpinPages,
    WorkerDied,
)
from baton.router_links import RouterMessage
from kvstore.events.wire_format import KvEventBatch
from kvstore.keys import pack_tokens, unpack_tokens
from kvstore.server.events import RouterMessageReceived
from router.events import (
    PIN,
    Finished,
    KvEvents,
    MessageReceived,
    PinAnswered,
    Pinned,
    PinPrefix,
    RequestEnded,
    Submit,
    UnpinPrefix,
)
from router.queueing.admission import ModelLimits
from router.state import RouterState
from simulator.held_messages import HeldMessages
from simulator.routers import SimulatedRouterLinks
from tests.rig import NAMESPACE, PAGE, PAGE_BYTES, VOCAB, Rig, RigStore, RigWorker, reference
from tests.router.checked import CheckedRouter

CONTEXT = 1_024
CONFIG = settings.Config(
    cluster=settings.ClusterConfig(heartbeat_ms=250, heartbeat_timeout_ms=1_000, step_timeout_ms=5_000),
    pages=settings.PagesConfig(page_size=PAGE),
    router=settings.RouterConfig(max_attempts=4, queue_timeout_ms=20_000, attempt_timeout_ms=4_000),
    prefill=settings.PrefillConfig(max_num_batched_tokens=8, max_num_seqs=2, store_timeout_ms=2_000),
    decode=settings.DecodeConfig(max_num_batched_tokens=16, fetch_timeout_ms=2_000),
)
_POOL = 40  # device pages of a worker
_SLOTS = 120  # of an arena
NAMES = ("one", "two")  # of routers


class Router(CheckedRouter):
    """One router process, its streams, and its pins."""

    def __init__(self, world: World, peer: Peer) -> None:
        super().__init__(peer, RouterState(peer, CONFIG, ModelLimits(VOCAB, CONTEXT)))
        self.no_clients()
        self.world = world
        self.name = peer.name
        self.pinned: dict[str, PinAnswered] = {}
        self.wishes: set[str] = set()
        self._outputs: dict[str, list[int]] = {}  # that are expected

    @property
    def at_rest(self) -> bool:
        return len(self.ended) == len(self.submitted) and len(self.pinned) == len(self.wishes)

    @property
    def now(self) -> float:
        return self.world.rig.now

    def hear(self, envelope: Envelope[Any], spacing: float) -> None:
        """Take a message for this address, where another process may listen by now."""
        self.world.routers[self.name].tell(MessageReceived(envelope))

    def hear_events(self, batch: KvEventBatch) -> None:
        self.tell(KvEvents(batch))

    def post(self, envelope: Envelope[Any]) -> None:
        if (process := self.world.processes.get(envelope.addressee)) is not None:
            place = NAMES.index(self.name)
            self.world.messages.message(
                self.incarnation, envelope.addressee, process.receive_from_router, place, envelope
            )  # fmt: skip

    def output(self, request: str) -> list[int]:
        if request not in self._outputs:
            order = self.submitted[request]
            self._outputs[request] = reference(unpack_tokens(order.tokens), order.max_tokens or 0)
        return self._outputs[request]

    def end_request(self, end: RequestEnded) -> None:
        super().end_request(end)
        if isinstance(end.outcome, Finished):
            assert self.emitted[end.request] == self.output(end.request), "it ended too early"

    def answer_pin(self, answer: PinAnswered) -> None:
        self.pinned[answer.name] = answer


class Process:
    """A worker or a store, with a link to every router."""

    def __init__(self, world: World, peer: Peer, body: RigWorker | RigStore) -> None:
        card = ModelCard(NAMESPACE, PAGE_BYTES, VOCAB, CONTEXT, _POOL) if isinstance(body, RigWorker) else None
        self.world, self.peer, self.body = world, peer, body
        hello = Hello(peer, model=card, data="" if card else f"tcp://{peer.incarnation}")
        addresses = [partial(world.routers.get, name) for name in NAMES]
        self.links = SimulatedRouterLinks(addresses, hello, world.messages)
        self.lost: set[str] = set()  # routers, by incarnation
        self._beat_at = 0.0

    def heartbeat(self, heard: int, router: str) -> Heartbeat:
        if isinstance(self.body, RigWorker):
            return self.body.state.heartbeat(heard, router)
        return Heartbeat(heard, self.body.state.load(), attempts=self.body.state.pins(router))

    def receive_from_router(self, place: int, envelope: Envelope[Any]) -> None:
        self._hear(self.links.hear(place, envelope, self.world.rig.now))

    def turn(self) -> None:
        """Have a turn, after all that has arrived."""
        now = self.world.rig.now
        self._hear(self.links.tick(now))
        if isinstance(self.body, RigWorker):
            self.body.handle(Tick())
            self.body.turn()
        said = self.body.letters if isinstance(self.body, RigWorker) else self.body.told
        for each in said:
            self.links.say(each.message, each.router)
        said.clear()
        if now >= self._beat_at:
            self._beat_at = now + self.links.heartbeat
            self.links.beat(self.heartbeat)

    def _hear(self, said: Iterable[RouterMessage | RouterLost]) -> None:
        for each in said:
            if isinstance(each, RouterLost):
                self.lost.add(each.router)
            if isinstance(self.body, RigWorker):
                lost = isinstance(each, RouterLost)
                self.body.handle(each if lost else each.message, "" if lost else each.router)
            elif isinstance(each, RouterMessage) and isinstance(each.message, PinPages | UnpinPages):
                self.body.handle(RouterMessageReceived(each.message, each.router))


class World:
    """Two routers, and whatever a test starts below them."""

    def __init__(self, seed: int = 0, nodes: str = "a") -> None:
        self.random = random.Random(seed)
        self.rig = Rig(_SLOTS, hold=3.0, nodes=tuple(nodes))
        self.rig.now = 100.0
        self.processes: dict[str, Process] = {}  # by incarnation
        self.routers: dict[str, Router] = {}
        self.dead: list[Router] = []
        self.messages = HeldMessages(self.rig, self.random)
        self.births = 0
        for name in NAMES:
            self.start_router(name)
        for store in self.rig.stores.values():
            self._join(Peer("store", f"store-{store.name}", store.name, store.incarnation, 0), store)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_router(self, name: str) -> None:
        """Also in the place of one that lives: that one is dead then, and so are its streams."""
        if name in self.routers:
            self.dead.append(self.routers[name])
        self.births += 1
        me = Peer("router", name, "a", f"{name}.{self.births}", self.births)
        self.routers[name] = Router(self, me)
        self.messages.join(me.incarnation, name)

    def start_worker(self, role: Any, node: str = "a") -> Process:
        worker = self.rig.worker(role, _POOL, CONFIG.decode if role == "decode" else CONFIG.prefill, node)
        return self._join(worker.peer, worker)

    def kill_worker(self, process: Process) -> None:
        """Its node's store tells every router of that."""
        assert isinstance(process.body, RigWorker)
        del self.processes[process.peer.incarnation]
        self.rig.kill(process.body)
        store = self.processes[process.body.node.incarnation]
        store.links.tell_all(WorkerDied(process.peer.incarnation, process.peer.pid))

    def restart_store(self, node: str) -> None:
        """Its workers attach to the new one."""
        store = self.rig.stores[node]
        del self.processes[store.incarnation]
        self.rig.restart_store(node)
        self._join(Peer("store", f"store-{node}", node, store.incarnation, 0), store)
        for process in self.workers:
            if process.body.node is store:
                process.body.attach()

    @property
    def workers(self) -> list[Any]:
        return [process for process in self.processes.values() if isinstance(process.body, RigWorker)]

    def _join(self, peer: Peer, body: RigWorker | RigStore) -> Process:
        process = self.processes[peer.incarnation] = Process(self, peer, body)
        return process

    # --- routers -----------------------------------------------------------------------------------------------------

    def cut(self, process: Process, name: str, cut: bool = True) -> None:
        """Cut the link of a process to a router, or mend it. Nothing arrives over it, and nothing is lost."""
        pair = frozenset((process.peer.incarnation, name))
        (self.messages.cut.add if cut else self.messages.cut.discard)(pair)

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> str:
        router = self.routers[name]
        request = f"r-{router.incarnation}-{len(router.submitted)}"
        order = Submit(request, pack_tokens(prompt), SamplingParams(temperature=0.0), self.rig.now, max_tokens)
        router.submit(order)
        return request

    def pin_prefix(self, name: str, pin: str, tokens: list[int], ttl: float) -> None:
        router = self.routers[name]
        wish = f"{PIN}{router.incarnation}-{len(router.wishes)}"
        router.wishes.add(wish)
        router.tell(PinPrefix(wish, pin, pack_tokens(tokens), ttl))

    def unpin_prefix(self, name: str) -> None:
        """Every pin of that router."""
        router = self.routers[name]
        for pin in router.state.pins("", self.rig.now):
            router.tell(UnpinPrefix(pin.pin))

    def check(self) -> None:
        """Check that no client has received a wrong token."""
        for router in [*self.routers.values(), *self.dead]:
            for request, tokens in router.emitted.items():
                assert tokens == router.output(request)[: len(tokens)], request

    # --- time --------------------------------------------------------------------------------------------------------

    def round(self, seconds: float = 0.02, loss: float = 0.0, lag: float = 0.0) -> None:
        """Run each process once. `loss`: probability that a message is lost (and, as likely, that it comes twice);
        `lag`: that a link delivers nothing more in this round."""
        for process in list(self.processes.values()):
            self.messages.arrive(process.peer.incarnation, loss, lag)
            process.turn()
        self.rig.turn("wire")
        self.rig.turn("disk")
        for name in NAMES:
            self.messages.arrive(name, loss, lag)
        self.rig.tick(seconds)
        for router in self.routers.values():
            router.tell(Tick())

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.02)):
            self.round()

    def settle(self, limit: float = 200.0) -> None:
        """Run without further faults: every request ends, and then no worker or store holds anything for a request."""
        self.messages.cut.clear()
        deadline = self.rig.now + limit
        while not all(router.at_rest for router in self.routers.values()):
            assert self.rig.now < deadline, [
                set(router.submitted) - set(router.ended) for router in self.routers.values()
            ]
            self.round()
        for name in self.routers:
            self.unpin_prefix(name)
        for _ in range(120):
            self.round(0.05)
        self.check()
        for process in self.workers:
            state = process.body.state
            assert not state.heartbeat(0).load.running
            assert state.blocks.available == _POOL, process.peer.name
            assert not state.leases, process.peer.name
        for store in self.rig.stores.values():
            stats = store.state.stats(self.rig.now)
            assert stats.leases == stats.reserved == stats.held == stats.pins == 0, store.name

    def kept(self, name: str) -> int:
        """How many wishes of that router were granted."""
        return sum(isinstance(pinned.outcome, Pinned) for pinned in self.routers[name].pinned.values())
