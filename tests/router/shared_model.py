"""Several routers on the same workers and stores, as data: real states of all, real memberships, links that misbehave.

The devices (`tests.rig`) check each step: a page of another request, or one that is freed while a sequence reads it,
fails the test at once. Every request belongs to the router that it was sent to, and ends there once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton import config as settings
from baton.clock import Tick
from baton.membership import Membership, RouterLost
from baton.messages import (
    Envelope,
    Heartbeat,
    Hello,
    Message,
    ModelCard,
    Peer,
    PinPages,
    SamplingParams,
    UnpinPages,
    WorkerDied,
)
from kvstore.keys import pack_tokens
from kvstore.server.events import RouterMessageReceived
from router.events import (
    PIN,
    Emit,
    ForgetPeer,
    MessageReceived,
    PinAnswered,
    Pinned,
    PinPrefix,
    RequestEnded,
    RouterEvent,
    SendMessage,
    Submit,
    UnpinPrefix,
)
from router.queueing.admission import ModelLimits
from router.state import RouterState
from tests.rig import NAMESPACE, PAGE, PAGE_BYTES, VOCAB, Rig, RigStore, RigWorker, reference

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
_LETTERS = deque[Envelope[Any]]


@dataclass
class Router:
    """One router process, its streams, and its counts of messages sent to each process."""

    name: str
    state: RouterState
    incarnation: str
    sent: Counter[str] = field(default_factory=Counter[str])
    submitted: dict[str, Submit] = field(default_factory=dict[str, Submit])
    emitted: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    ended: dict[str, RequestEnded] = field(default_factory=dict[str, RequestEnded])
    pinned: dict[str, PinAnswered] = field(default_factory=dict[str, PinAnswered])
    wishes: set[str] = field(default_factory=set[str])

    @property
    def at_rest(self) -> bool:
        return len(self.ended) == len(self.submitted) and len(self.pinned) == len(self.wishes)


@dataclass
class Link:
    """One process's end of its link to one router: by the router's name, since the endpoint is all that is known."""

    membership: Membership
    inbox: _LETTERS = field(default_factory=deque[Envelope[Any]])
    outbox: _LETTERS = field(default_factory=deque[Envelope[Any]])
    heart: _LETTERS = field(default_factory=deque[Envelope[Any]])
    sent: int = 0
    beat_at: float = 0.0
    cut: bool = False  # nothing arrives, and nothing is lost
    lost: list[str] = field(default_factory=list[str])

    def say(self, sender: str, addressee: str, message: Message) -> None:
        self.sent += 1
        self.outbox.append(Envelope(sender, addressee, self.sent, message))


class Process:
    """A worker or a store, with a link to every router."""

    def __init__(self, peer: Peer, body: RigWorker | RigStore, routers: Iterator[str]) -> None:
        card = ModelCard(NAMESPACE, PAGE_BYTES, VOCAB, CONTEXT, _POOL) if isinstance(body, RigWorker) else None
        self.peer = peer
        self.body = body
        hello = Hello(peer, model=card, data="" if card else f"tcp://{peer.incarnation}")
        self.links = {name: Link(Membership(hello)) for name in routers}

    def heartbeat(self, heard: int, router: str) -> Heartbeat:
        if isinstance(self.body, RigWorker):
            return self.body.state.heartbeat(heard, router)
        return Heartbeat(heard, self.body.state.load(), attempts=self.body.state.pins(router))

    def told(self) -> list[tuple[str, Message]]:
        """What it wants to say, and to which router."""
        body = self.body
        if isinstance(body, RigWorker):
            letters, body.letters = body.letters, []
            return [(letter.router, letter.message) for letter in letters]
        told, body.told = body.told, []
        return [(each.router, each.message) for each in told]

    def hear(self, event: Any, router: str = "") -> None:
        if isinstance(self.body, RigWorker):
            self.body.handle(event, router)
        elif isinstance(event, PinPages | UnpinPages):
            self.body.handle(RouterMessageReceived(event, router))


class World:
    """Two routers, and whatever a test starts below them."""

    def __init__(self, seed: int = 0, nodes: str = "a") -> None:
        self.random = random.Random(seed)
        self.rig = Rig(_SLOTS, hold=3.0, nodes=tuple(nodes))
        self.rig.now = 100.0
        self.processes: dict[str, Process] = {}  # by incarnation
        self.routers: dict[str, Router] = {}
        self.dead: list[Router] = []
        self.births = 0
        for name in ("one", "two"):
            self.start_router(name)
        for store in self.rig.stores.values():
            self._join(Peer("store", f"store-{store.name}", store.name, store.incarnation, 0), store)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_router(self, name: str) -> None:
        """Also in the place of one that lives: that one is dead then, and so are its streams."""
        if (old := self.routers.pop(name, None)) is not None:
            self.dead.append(old)
        self.births += 1
        me = Peer("router", name, "a", f"{name}.{self.births}", self.births)
        self.routers[name] = Router(name, RouterState(me, CONFIG, ModelLimits(VOCAB, CONTEXT)), me.incarnation)
        for process in self.processes.values():
            process.links[name].inbox.clear()

    def start_worker(self, role: Any, node: str = "a") -> Process:
        worker = self.rig.worker(role, _POOL, CONFIG.decode if role == "decode" else CONFIG.prefill, node)
        return self._join(worker.peer, worker)

    def kill_worker(self, process: Process) -> None:
        """Its node's store tells every router of that."""
        assert isinstance(process.body, RigWorker)
        del self.processes[process.peer.incarnation]
        self.rig.kill(process.body)
        store = self.processes[process.body.node.incarnation]
        for link in store.links.values():
            if link.membership.router is not None:
                departed = WorkerDied(process.peer.incarnation, process.peer.pid)
                link.say(store.peer.incarnation, link.membership.router, departed)

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
        process = self.processes[peer.incarnation] = Process(peer, body, iter(["one", "two"]))
        return process

    # --- routers -----------------------------------------------------------------------------------------------------

    def tell(self, router: Router, event: RouterEvent) -> None:
        for command in router.state.handle(event, self.rig.now):
            match command:
                case SendMessage(incarnation=incarnation, message=message):
                    router.sent[incarnation] += 1
                    if (process := self.processes.get(incarnation)) is not None:
                        envelope = Envelope(router.incarnation, incarnation, router.sent[incarnation], message)
                        process.links[router.name].inbox.append(envelope)
                case ForgetPeer(incarnation=incarnation):
                    del router.sent[incarnation]
                case Emit(request=request, tokens=tokens):
                    assert request not in router.ended, "tokens after the end"
                    router.emitted[request] += tokens
                case RequestEnded(request=request):
                    assert request not in router.ended, f"{request} ended twice"
                    router.ended[request] = command
                case PinAnswered(name=name):
                    router.pinned[name] = command
                case _:
                    pass
        router.state.validate()

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> str:
        router = self.routers[name]
        request = f"r-{router.incarnation}-{len(router.submitted)}"
        order = Submit(request, pack_tokens(prompt), SamplingParams(temperature=0.0), self.rig.now, max_tokens)
        router.submitted[request] = order
        router.emitted[request] = []
        self.tell(router, order)
        return request

    def pin_prefix(self, name: str, pin: str, tokens: list[int], ttl: float) -> None:
        router = self.routers[name]
        wish = f"{PIN}{router.incarnation}-{len(router.wishes)}"
        router.wishes.add(wish)
        self.tell(router, PinPrefix(wish, pin, pack_tokens(tokens), ttl))

    def unpin_prefix(self, name: str) -> None:
        """Every pin of that router."""
        router = self.routers[name]
        for pin in router.state.pins("", self.rig.now):
            self.tell(router, UnpinPrefix(pin.pin))

    def check(self) -> None:
        """Check that no client has received a wrong token."""
        for router in [*self.routers.values(), *self.dead]:
            for request, tokens in router.emitted.items():
                order = router.submitted[request]
                prompt = [int.from_bytes(order.tokens[i : i + 4], "little") for i in range(0, len(order.tokens), 4)]
                right = reference(prompt, order.max_tokens or 0)
                assert tokens == right[: len(tokens)], request
                if (end := router.ended.get(request)) is not None and type(end.outcome).__name__ == "Finished":
                    assert tokens == right, request

    # --- time --------------------------------------------------------------------------------------------------------

    def round(self, seconds: float = 0.02, loss: float = 0.0, lag: float = 0.0) -> None:
        """Run each process once. `loss`: probability that a message is lost (and, as likely, that it comes twice);
        `lag`: that a link delivers nothing more in this round."""
        for process in list(self.processes.values()):
            for name, link in process.links.items():
                self._follow(process, name, link, link.membership.tick(self.rig.now))
                for envelope in self._arriving(link, link.inbox, loss, lag):
                    verdict = link.membership.handle(envelope, self.rig.now)
                    self._follow(process, name, link, verdict)
                    if verdict.deliver:
                        process.hear(envelope.message, envelope.sender)
            if isinstance(process.body, RigWorker):
                process.hear(Tick())
                process.body.turn()
            self._speak(process)
        for store in self.rig.stores.values():
            store.deliver()
            store.work()
        for process in list(self.processes.values()):
            for name, link in process.links.items():
                for letters in self.random.sample([link.outbox, link.heart], 2):
                    for envelope in self._arriving(link, letters, loss, lag):
                        self.tell(self.routers[name], MessageReceived(envelope))
        self.rig.tick(seconds)
        for router in self.routers.values():
            self.tell(router, Tick())

    def _follow(self, process: Process, name: str, link: Link, verdict: Any) -> None:
        for message in verdict.send:
            link.say(process.peer.incarnation, "", message)
        if verdict.lost is not None:
            link.lost.append(verdict.lost)
            process.hear(RouterLost(verdict.lost))

    def _speak(self, process: Process) -> None:
        me = process.peer.incarnation
        for router, message in process.told():
            for link in process.links.values():
                if link.membership.router == router:
                    link.say(me, router, message)
        for link in process.links.values():
            if (router := link.membership.router) is not None and self.rig.now >= link.beat_at:
                link.beat_at = self.rig.now + link.membership.heartbeat
                link.heart.append(Envelope(me, router, 0, process.heartbeat(link.membership.heard, router)))

    def _arriving(self, link: Link, letters: _LETTERS, loss: float, lag: float) -> Iterator[Envelope[Any]]:
        for _ in range(len(letters)):
            if link.cut or (lag and self.random.random() < lag):
                return
            envelope, chance = letters.popleft(), self.random.random()
            if chance >= loss:
                yield envelope
            if chance < 2 * loss and chance >= loss:
                yield envelope

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.02)):
            self.round()

    def settle(self, limit: float = 200.0) -> None:
        """Run without further faults: every request ends, and then no worker or store holds anything for a request."""
        for process in self.processes.values():
            for link in process.links.values():
                link.cut = False
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
