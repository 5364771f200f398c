"""Worker states, real store states with disks and wires between them, and devices whose pages remember what was
computed into them; no sockets, no threads, no clock.

What lies at a position of a page is a digest of every token up to there, as K and V depend on all of them. A step that
finds any other digest below its chunk has read a wrong, stale or half-copied page, and says so.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from baton.clock import Tick
from baton.config import ArenaBytes, DecodeConfig, PrefillConfig, StoreConfig
from baton.membership import SendToRouter
from baton.messages import Cancel, FromStore, Message, Namespace, PageSource, Peer, Tokens, WorkerRole
from baton.store_protocol import Attach, Attached, LeaseHeartbeat, StoreReply
from baton.waits import WaitEdge
from decode_worker.scheduler import DecodeScheduler
from engine.step.batch import Chunk, Sampled
from engine.step.outcome import ScheduledBatch, StepDone, StepOutOfMemory
from engine.step.recomputation import NAME, ComparePages
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.device_block_manager import DuplicatePage
from kvstore.client.transfer import Copy, StoreLost, StoreUp
from kvstore.server.events import CallReceived, Connected, Disconnected, TellRouter, WriterDied
from kvstore.server.state import StoreState
from kvstore.transport.interface import PeerOrder, SlotVerified, VerifySlot
from kvstore.window_groups import NO_GROUPS
from prefill_worker.scheduler import PrefillScheduler
from simulator.clock import Body
from simulator.device import CheckingDevice, PageMemory, digests
from simulator.transport import SimulatedTransport
from simulator.worker_shell import WorkerShell, at_once, copied
from tests.support.fake_disk import FakeDisk
from tests.support.held_agenda import HeldAgenda
from tests.support.held_store import HeldStore
from tests.support.wait_graph import assert_no_cycle
from tests.support.wires import Wires

PAGE = 4
PAGE_BYTES = 512  # room for the marks of eight workers
VOCAB = 50
ROOT = b"r" * 16
NAMESPACE = Namespace(b"m" * 16, "test", "float32", PAGE, 1, form="split", kv_heads=1)


def next_token(tokens: Sequence[int]) -> int:
    """The reference model."""
    return digests(tokens)[-1] % VOCAB


def reference(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device(CheckingDevice):
    def run(self, known: Sequence[int], chunk: Chunk) -> Sampled | None:
        return self.run_rows(known, chunk)[-1]

    def run_rows(self, known: Sequence[int], chunk: Chunk) -> list[Sampled | None]:
        """Run a chunk, proposals included, and return what all of its rows have drawn."""
        tokens = [*known[: chunk.known], *chunk.proposals]
        self.compute(tokens, chunk)
        if chunk.sample is None:
            return [None]
        return [Sampled(next_token(tokens[:position])) for position, _ in chunk.draws]

    def weights(self, known: Sequence[int], chunk: Chunk) -> list[list[float]]:
        """Return what the observed tokens of a chunk attend to, by page: any numbers that follow from the tokens."""
        pages = range(-(-chunk.end // self._page_size))
        values = digests(known)[chunk.end - chunk.observed : chunk.end]
        return [[hash((value, page)) % 997 / 997 for page in pages] for value in values]


class RigWorker(WorkerShell):
    """One worker: its state, its device, what the store has told it, what it has said to the router."""

    patience = 0.0  # time stands still during a turn
    copies_overlap = False

    def __init__(
        self, rig: Rig, role: WorkerRole, num_pages: int, config: DecodeConfig | PrefillConfig, node: RigStore,
        window: int | None = None, recompute_share: float = 0.0,
    ) -> None:  # fmt: skip
        self.role = role
        self.rig = rig
        self.node = node
        self.num_pages = num_pages
        self.most_tokens = 1_000_000  # a step of more does not fit into the device's memory
        self.device = Device(num_pages, PAGE, window, rig.groups)
        self.state: Any = (
            DecodeScheduler(
                config, PAGE, num_pages, window=window, recompute_share=recompute_share,
                copies_overlap=self.copies_overlap, grammars=rig.grammars, groups=rig.groups,
            )
            if isinstance(config, DecodeConfig)
            else PrefillScheduler(
                config, PAGE, num_pages, recompute_share=recompute_share, copies_overlap=self.copies_overlap,
                groups=rig.groups,
            )
        )  # fmt: skip
        self.pid = next(rig.ids)
        self.connection = 0
        self.peer = Peer(role, f"{role}-{self.pid}", node.name, f"{role}-{self.pid}", self.pid)
        self.inbox: deque[Message] = deque()  # from the store
        self.messages: list[Message] = []
        self.letters: list[SendToRouter] = []  # the same, each with its receiver

    def now(self) -> float:
        return self.rig.now

    def handle(self, event: Any, router: str = "") -> None:
        super().handle(event, router)
        self.state.validate()

    def tell_router(self, message: Message, router: str) -> None:
        self.messages.append(message)
        self.letters.append(SendToRouter(message, router))

    def call_store(self, call: Any) -> None:
        self.rig.call(self, call)

    def duplicate_page(self, order: DuplicatePage) -> None:
        self.device.duplicate(order)

    def same_contents(self, order: ComparePages) -> bool:
        return self.device.pages[order.page] == self.device.pages[order.scratch]

    def attach(self) -> None:
        self.inbox.clear()
        self.connection = next(self.rig.ids)
        self.rig.attach(self)
        self.handle(StoreUp(self.rig.slots, PAGE_BYTES))

    def lose_store(self) -> None:
        self.inbox.clear()
        self.connection = 0
        self.handle(StoreLost())

    def hear(self) -> None:
        """Take everything that the store has said."""
        for reply in self.replies():
            self.handle(reply)

    def copy(self) -> None:
        for copy in self.state.take_copies():
            at_once(self.copy_pages([copy]))
            self.handle(copied([copy]))

    def step(self) -> bool:
        self.prepare()
        if plan := self.schedule():
            self.handle(at_once(self.run_step(plan)))
        self.state.validate()
        return bool(plan)

    def turn(self) -> bool:
        """Make a whole turn as the worker's loop does, and tell whether there was a step."""
        self.stepped = False
        at_once(self.make_turn())
        self.state.validate()
        return self.stepped

    def replies(self) -> Iterator[Message]:
        while self.inbox:
            yield self.inbox.popleft()

    events = replies

    def copy_pages(self, copies: Sequence[Copy]) -> Body:
        self.device.copy(copies, self.node.arena)
        yield from ()

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepDone | StepOutOfMemory | None]:
        self.stepped = True
        yield from ()
        done = self._done(plan)
        if sum(len(chunk.tokens) for chunk in plan.values()) > self.most_tokens:
            return StepOutOfMemory(plan, "CUDA out of memory")  # it may have written its pages
        return done

    def _done(self, plan: ScheduledBatch) -> StepDone:
        chunks = list(zip(self.tokens_of(plan), plan.values(), strict=True))
        rows = [self.device.run_rows(tokens, chunk) for tokens, chunk in chunks]
        weights = {n: self.device.weights(*each) for n, each in enumerate(chunks) if each[1].observed}
        verified = {n: each[:-1] for n, each in enumerate(rows)}
        return StepDone(plan, [each[-1] for each in rows], verified=verified, weights=weights)

    def tokens_of(self, plan: ScheduledBatch) -> list[Sequence[int]]:
        """Return what is known of each sequence of a step."""
        held = self.state._requests if self.role == "prefill" else self.state._sequences
        return [(self.state._recomputation if name == NAME else held[name.request]).tokens for name in plan]

    def heartbeat(self) -> None:
        if self.connection:
            self.rig.call(self, LeaseHeartbeat(self.state.leases))


class RigStore(HeldStore):
    """One node's store. It checks a slot for another store when its disk's threads go on."""

    def __init__(self, rig: Rig, name: str) -> None:
        super().__init__(rig, rig.wires, name, FakeDisk())
        self.rig = rig
        self.incarnations: set[str] = set()  # dead ones, too: what they said may still arrive
        self.restart()

    def restart(self) -> None:
        """A new process, with an empty arena, on the same disk."""
        rig = self.rig
        config = StoreConfig(
            host_cache_bytes=ArenaBytes(rig.slots * PAGE_BYTES), lease_ms=int(rig.lease * 1_000), writer_share=0.5,
            load_share=rig.load_share,
        )  # fmt: skip
        self.letters: list[TellRouter] = []  # to routers
        self.marks: dict[tuple[int, int], float] = {}  # how far workers of rings are, by name and place
        self.start(f"store-{self.name}-{next(rig.ids)}", config, rig.admit_after, PageMemory(PAGE))
        self.incarnations.add(self.incarnation)

    def source(self, pages: int) -> PageSource:
        return PageSource(self.incarnation, "inproc", pages)

    def reply(self, connection: int, reply: StoreReply) -> None:
        if (worker := self.rig.workers.get(connection)) is not None:
            worker.inbox.append(reply)

    def tell_router(self, message: FromStore, router: str) -> None:
        self.letters.append(TellRouter(message, router))

    def leave_ring(self, left: LeaveRing) -> None:
        self.marks[left.name, left.place] = inf

    def order_transport(self, order: PeerOrder) -> None:
        if isinstance(order, VerifySlot):
            self.agenda.hold(("disk", self.incarnation, "checks"), self._verify, order)
        else:
            super().order_transport(order)

    def _verify(self, order: VerifySlot, ok: bool = True) -> None:
        self.handle(SlotVerified(order.number, ok))

    # --- what a test lets happen ------------------------------------------------------------------------------------

    def deliver(self, damage: bool = False) -> None:
        """One parcel of each of its wires arrives; with `damage` its first page is not what was sent."""
        for lane in self.wires.lanes_from(*self.incarnations):
            self.agenda.go(*lane, mishap="damaged" if damage else "")

    def lose(self) -> None:
        """A connection breaks: what is on its way is lost."""
        for lane in self.wires.lanes_from(self.incarnation):
            self.wires.lose(lane)

    def work(self, ok: bool = True) -> None:
        """The threads carry out one order, or (`ok` False) fail to."""
        self.agenda.go("disk", self.incarnation, ok=ok)


class Rig(HeldAgenda):
    """Stores, and the workers around them. Without further words there is one store, and it keeps nothing on disk."""

    worker_class: type[RigWorker] = RigWorker
    grammars: Any = None
    groups = NO_GROUPS  # of the model's layers

    def __init__(
        self, slots: int, hold: float = 30.0, nodes: Sequence[str] = ("n0",), admit_after: int = 1_000,
        load_share: float = 0.25,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ids = itertools.count(1)
        self.slots, self.lease, self.admit_after, self.load_share = slots, hold, admit_after, load_share
        self.workers: dict[int, RigWorker] = {}
        self.wires = Wires(self, self._transport, lambda _: [-1] * PAGE)
        self.stores = {name: RigStore(self, name) for name in nodes}

    def _transport(self, incarnation: str) -> SimulatedTransport | None:
        of = (store.transport for store in self.stores.values() if store.incarnation == incarnation)
        return next(of, None)

    @property
    def store(self) -> StoreState:
        """The state of the first node's store."""
        return next(iter(self.stores.values())).state

    def restart_store(self, node: str = "n0") -> None:
        """What was on its way to it is lost; its disk stays."""
        for connection, worker in list(self.workers.items()):
            if worker.node.name == node:
                worker.lose_store()
                del self.workers[connection]
        self.stores[node].restart()

    def worker(
        self, role: WorkerRole, num_pages: int, config: DecodeConfig | PrefillConfig, node: str = "n0",
        window: int | None = None, recompute_share: float = 0.0,
    ) -> RigWorker:  # fmt: skip
        worker = self.worker_class(self, role, num_pages, config, self.stores[node], window, recompute_share)
        worker.attach()
        return worker

    def attach(self, worker: RigWorker) -> None:
        self.workers[worker.connection] = worker
        worker.node.handle(Connected(worker.connection, worker.pid))
        self.call(worker, Attach(worker.peer, NAMESPACE, PAGE_BYTES))
        assert isinstance(worker.inbox.popleft(), Attached)

    def call(self, worker: RigWorker, call: Any) -> None:
        if worker.connection:
            worker.node.handle(CallReceived(worker.connection, call))

    def kill(self, worker: RigWorker) -> None:
        self.workers.pop(worker.connection, None)
        worker.node.handle(Disconnected(worker.connection))
        worker.node.handle(WriterDied(worker.pid))
        worker.connection = 0

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            worker.heartbeat()
        for store in self.stores.values():
            store.handle(Tick())

    def waits(self) -> Iterator[WaitEdge]:
        """Yield what each store and worker waits for."""
        for store in self.stores.values():
            yield from store.state.waits()
        for worker in self.workers.values():
            stores = [] if isinstance(worker.state, DecodeScheduler) else [worker.node.incarnation]
            yield from worker.state.waits(worker.peer.incarnation, *stores)

    def settle(self, limit: int = 2_000) -> None:
        """Run workers, wires and threads in turns until none has work left."""
        for _ in range(limit):
            going_on = [worker.turn() or worker.inbox or worker.state.busy for worker in list(self.workers.values())]
            if not (self.turn() or any(going_on)):
                return
        raise AssertionError("the workers never came to rest")

    def end(self, requests: Iterable[str]) -> None:
        """Cancel these requests. Afterwards no process holds anything for one."""
        for worker in self.workers.values():
            for request in requests:
                worker.handle(Cancel(request, 1))
        for _ in range(5):
            self.settle()
            self.tick(2.0)
        self.settle()
        for worker in self.workers.values():
            assert worker.state.blocks.available == worker.num_pages
            assert worker.state.leases == ()
            assert worker.state.stats().pages_differing == 0
        for store in self.stores.values():
            stats = store.state.stats(0.0)
            assert (stats.reserved, stats.held, stats.leases, stats.waits, stats.unlisted) == (0, 0, 0, 0, 0)
            assert (stats.loads.loading, stats.loads.fetches) == (0, 0)
            assert (stats.serving.fetches, stats.serving.sending) == (0, 0)
            assert store.state._tiers.idle


class RigMachine(RuleBasedStateMachine):
    """Anything that may happen to a rig. Every token is that of the reference model, and nothing is left over."""

    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, tuple[list[int], int]] = {}  # prompt, and number of tokens

    def output(self, request: str) -> list[int]:
        return reference(*self.requests[request])

    @invariant()
    def every_token_is_the_reference(self) -> None:
        for worker in self.rig.workers.values():
            for message in worker.messages:
                for delta in message.deltas if isinstance(message, Tokens) else ():
                    first, output = delta.position - len(self.requests[delta.request][0]), self.output(delta.request)
                    assert list(delta.tokens) == output[first : first + len(delta.tokens)]
                    assert (delta.finish is not None) == (first + len(delta.tokens) == len(output))
            worker.messages = [message for message in worker.messages if not isinstance(message, Tokens)]

    @invariant()
    def no_wait_rests_on_itself(self) -> None:
        assert_no_cycle(self.rig.waits())

    def go_to_the_end(self) -> None:
        """Let every request end, without further faults."""
        raise NotImplementedError

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.go_to_the_end()
            self.rig.end(self.requests)
