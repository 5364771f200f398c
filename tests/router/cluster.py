"""The lab with processes that follow the protocol, and links that misbehave."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Self

from baton import config as settings
from baton import messages as msg
from baton.operator_api import NewPin
from kvstore.keys import pack_tokens, split_keys
from router import events
from router.prefix_pinning.pin import PinnedPrefix, PinPhase
from tests.router import model
from tests.router.lab import Lab
from tests.router.model import CONFIG, CONTEXT, NAMESPACE, PAGE, card
from tests.router.processes import Process, Store, StorePin
from tests.support.held_agenda import HeldAgenda


class Cluster(Lab):
    """A lab whose clients check that they get the tokens of the model."""

    def __init__(self, config: settings.Config = CONFIG) -> None:
        super().__init__(config)
        self.adapters = sorted(config.model.lora_modules)  # that its workers have
        self.namespace = NAMESPACE  # of workers to come
        self.serves_none: set[str] = set()  # nodes whose stores serve no others
        self.processes: dict[str, Process] = {}  # by incarnation: dead ones are gone
        self.snapshots: list[str] = []  # holders that were asked for one
        self.endpoints: dict[str, str] = {}  # of every store that ever was, by incarnation
        self.accepted: set[tuple[str, int]] = set()
        self.births = 0
        self.random = random.Random(0)
        self.agenda = HeldAgenda()
        self.wishes: dict[str, events.PinPrefix] = {}
        self.answers: dict[str, NewPin | events.Failed | events.Cancelled] = {}  # by the name of the wish

    @classmethod
    def of_two_nodes(cls, seed: int) -> Self:
        """Two workers of each kind on each of two nodes, which have run for a moment."""
        cluster = cls()
        cluster.random.seed(seed)
        for node in "ab":
            cluster.start("store", f"store-{node}", node)
            for i in range(2):
                cluster.start("decode", f"decode-{node}{i}", node)
                cluster.start("prefill", f"prefill-{node}{i}", node, slots=2)
        cluster.run(0.5)
        return cluster

    # --- processes --------------------------------------------------------------------------------------------------

    def start(self, role: Any, name: str, node: str = "a", pool_pages: int = 256, slots: int = 100) -> Process:
        self.births += 1
        peer = msg.Peer(role, name, node, f"{name}.{self.births}", self.births)
        if role == "store":
            data = "" if node in self.serves_none else f"tcp://{peer.incarnation}"
            self.endpoints[peer.incarnation] = data
            process = Store(self, msg.Hello(peer, events=f"kv://{peer.incarnation}", data=data), slots)
        else:
            adapters = {each: f"digest of {each}" for each in self.adapters}
            process = Process(self, msg.Hello(peer, model=card(pool_pages, self.namespace, adapters=adapters)), slots)
        self.processes[peer.incarnation] = process
        return process

    def named(self, name: str) -> list[Process]:
        return [process for process in self.processes.values() if process.peer.name == name]

    @property
    def stores(self) -> list[Store]:
        return [process for process in self.processes.values() if isinstance(process, Store)]

    def store_of(self, node: str) -> Store | None:
        """Return the store that workers of a node are attached to: the last one to start, while it lives."""
        latest = next((store for store in reversed(self.stores) if store.peer.node == node), None)
        return None if latest is None or latest.stopped else latest

    def kill(self, process: Process) -> None:
        """End a process. What it has said and is on its way is lost."""
        del self.processes[process.peer.incarnation]
        self.agenda.drop("message", self.incarnation, process.peer.incarnation)

    def evict(self) -> None:
        for store in self.stores:
            store.evict()

    # --- the router's links and clients -----------------------------------------------------------------------------

    def post(self, envelope: msg.Envelope[Any]) -> None:
        if (process := self.processes.get(envelope.addressee)) is not None:
            self._hold(envelope.addressee, self.incarnation, process.take, envelope)

    def send(self, envelope: msg.Envelope[Any]) -> None:
        """Send a process's message to the router."""
        self._hold(self.incarnation, envelope.sender, self.hear, envelope)

    def _hold(self, to: str, sender: str, deliver: Callable[..., object], envelope: msg.Envelope[Any]) -> None:
        """Let a message wait. Heartbeats have a lane of their own, as they come from a thread of their own."""
        self.agenda.hold(("message", to, sender, isinstance(envelope.message, msg.Heartbeat)), deliver, envelope)

    def arrive(self, to: str, loss: float, lag: float) -> None:
        """Deliver what is on its way to a process, lane by lane in any order. `loss`: probability that a message is
        lost (and, as likely, that it comes twice); `lag`: that nothing more arrives this time on its lane."""
        dice, lanes = self.random, self.agenda.loaded("message", to)
        dice.shuffle(lanes)
        for lane in lanes:
            for _ in self.agenda.waiting(*lane):
                if lag and dice.random() < lag:
                    break
                chance = dice.random() if loss else 1.0
                deliver = self.agenda.pop(lane)
                for _ in range((chance >= loss) + (loss <= chance < 2 * loss)):
                    deliver()

    def hear(self, envelope: msg.Envelope[Any]) -> None:
        """Let the router read a message."""
        self.tell(events.MessageReceived(envelope))

    def ask_snapshot(self, holder: str) -> None:
        self.snapshots.append(holder)

    def expected(self, request: str) -> tuple[list[int], str]:
        order = self.requests[request]
        return model.expected(order.sampling.seed, len(order.tokens) // 4, order.max_tokens or CONTEXT)

    def emit(self, request: str, tokens: Sequence[int]) -> None:
        super().emit(request, tokens)
        output = self.outputs[request]
        assert output == self.expected(request)[0][: len(output)]

    # --- clients that pin -------------------------------------------------------------------------------------------

    def pin_prefix(self, pin: str = "p", pages: int = 3, ttl: float = 60.0, seed: int = 0, **more: Any) -> str:
        name = f"{events.PIN}{len(self.wishes) + 1}"
        tokens = [1 + (seed + i) % 100 for i in range(pages * PAGE + 1)]
        order = self.wishes[name] = events.PinPrefix(name, pin, pack_tokens(tokens), ttl, **more)
        self.tell(order)
        return name

    def unpin_prefix(self, pin: str = "p") -> None:
        self.tell(events.UnpinPrefix(pin))

    def answer_pin(self, answer: events.PinAnswered) -> None:
        assert answer.name not in self.answers, f"{answer.name} was answered twice"
        self.answers[answer.name] = answer.outcome

    def prefixes(self) -> list[PinnedPrefix]:
        return list(self.state._pinner.prefixes.values())

    def pin_of(self, prefix: PinnedPrefix) -> StorePin | None:
        """Return the pin of a prefix that counts as pinned; none if its store has gone."""
        assert prefix.phase is PinPhase.PINNED
        assert prefix.store is not None
        store = self.processes.get(prefix.store)
        if not isinstance(store, Store):
            return None
        pin = store.pins.get(self.state._pinner._pin_name(prefix))
        assert pin is not None, f"{prefix.name} counts as pinned, and its store does not have it"
        assert set(split_keys(pin.order.keys)) <= store.pages.keys()
        assert pin.order.keys == prefix.keys
        return pin

    # --- many turns -------------------------------------------------------------------------------------------------

    def round(self, seconds: float = 0.02, loss: float = 0.0, lag: float = 0.0) -> None:
        """Run each process once. `loss`, `lag`: see `arrive`."""
        for process in list(self.processes.values()):
            if process.stopped:
                continue
            if process.hung_since is not None:
                process.repeat()
                continue
            process.turn()
            self.arrive(process.peer.incarnation, loss, lag)
            process.step()
            if process.becomes is not None:
                self.kill(process)
                self.start(process.becomes, process.peer.name, process.peer.node, slots=process.slots)
        self.arrive(self.incarnation, loss, lag)
        holders, self.snapshots = self.snapshots, []
        for holder in holders:
            if isinstance(store := self.processes.get(holder), Store) and not store.stopped:
                self.tell(events.KvSnapshot(holder, store.snapshot()))
        self.advance(seconds)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.02)):
            self.round()

    def settle(self, limit: float = 300.0) -> None:
        """No more faults: run until every request has ended, then long enough for heartbeats to repair the rest."""
        self._run_until(limit, lambda: self.requests.keys() - self.ends.keys())
        for process in self.processes.values():
            process.wake()
        for _ in range(100):
            self.round(0.05)
        for process in self.processes.values():
            assert not process.sequences, process.peer.name
            assert not process.jobs, process.peer.name

    def assert_all_served(self) -> None:
        assert self.ends.keys() == self.requests.keys()
        for name, end in self.ends.items():
            assert isinstance(end.outcome, events.Finished)
            assert self.outputs[name] == self.expected(name)[0]

    def finish(self, limit: float = 300.0) -> None:
        """No more faults: every wish is answered, then `settle`. Stores have exactly what counts as pinned then. One
        that was replaced, and lives, belongs to no router and keeps its pages until their time is over."""
        for process in self.processes.values():
            process.wake()
        self._run_until(limit, lambda: self.wishes.keys() - self.answers.keys())
        self.settle()
        pinned = [(p.store, self.state._pinner._pin_name(p)) for p in self.prefixes() if p.phase is PinPhase.PINNED]
        for store in self.stores:
            if self.state._members.get(store.peer.incarnation) is not None:
                assert set(store.pins) == {name for at, name in pinned if at == store.peer.incarnation}

    def _run_until(self, limit: float, alive: Callable[[], set[str]]) -> None:
        deadline = self.now + limit
        while alive():
            assert self.now < deadline, f"still alive: {alive()}"
            self.round()
