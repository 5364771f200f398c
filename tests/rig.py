"""Worker states, a real store state and devices whose pages remember what was computed into them; no sockets, no clock.

What lies at a position of a page is a digest of every token up to there, as K and V depend on all of them. A step that
finds any other digest below its chunk has read a wrong, stale or half-copied page, and says so.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.config import DecodeConfig, PrefillConfig
from baton.membership import Say
from baton.messages import Attach, Attached, Holding, Message, Namespace, Peer, Role
from decode_worker.state import DecodeState
from engine.batch import Chunk, Sampled
from engine.steps import StepDone
from kvstore.commands import Connected, Disconnected, Drop, Heard, Send, Tick, WriterGone
from kvstore.state import StoreState
from kvstore.transfer import Call, CopiedIn, CopiedOut, CopyIn, StoreLost, StoreUp
from prefill_worker.state import PrefillState

PAGE = 4
VOCAB = 50
ROOT = b"r" * 16
NAMESPACE = Namespace(b"m" * 16, 1, "float32", PAGE, 1)


def digests(tokens: Sequence[int]) -> list[int]:
    """What K and V stand for at each position."""
    value, found = 0, []
    for token in tokens:
        value = hash((value, token))
        found.append(value)
    return found


def next_token(tokens: Sequence[int]) -> int:
    """The reference model."""
    return digests(tokens)[-1] % VOCAB


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that a request must get."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device:
    """Page contents and the engine over them."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[int]] = [[0] * PAGE for _ in range(num_pages)]

    def run(self, known: Sequence[int], chunk: Chunk) -> Sampled | None:
        expected = digests(known)
        for position in range(chunk.start):
            found = self.pages[chunk.pages[position // PAGE]][position % PAGE]
            assert found == expected[position], f"a wrong page was read at position {position}"
        assert list(chunk.tokens) == list(known[chunk.start : chunk.end])
        for position in range(chunk.start, chunk.end):
            self.pages[chunk.pages[position // PAGE]][position % PAGE] = expected[position]
        return Sampled(expected[chunk.end - 1] % VOCAB) if chunk.sample else None


class RigWorker:
    """One worker: its state, its device, what the store has told it, what it has said to the router."""

    def __init__(self, rig: Rig, role: Role, num_pages: int, config: DecodeConfig | PrefillConfig) -> None:
        self.rig = rig
        self.num_pages = num_pages
        self.device = Device(num_pages)
        self.state: Any = (
            DecodeState(config, PAGE, num_pages)
            if isinstance(config, DecodeConfig)
            else PrefillState(config, PAGE, num_pages)
        )
        self.pid = next(rig.ids)
        self.connection = 0
        self.peer = Peer(role, f"{role}-{self.pid}", "n0", f"{role}-{self.pid}", self.pid)
        self.inbox: deque[Message] = deque()  # from the store
        self.said: list[Message] = []

    def handle(self, event: Any) -> None:
        for command in self.state.handle(event, self.rig.now):
            match command:
                case Say(message=message):
                    self.said.append(message)
                case Call(call=call):
                    self.rig.call(self, call)
        self.state.validate()

    def attach(self) -> None:
        self.inbox.clear()
        self.connection = next(self.rig.ids)
        self.rig.attach(self)
        self.handle(StoreUp(self.rig.slots))

    def lose_store(self) -> None:
        self.inbox.clear()
        self.connection = 0
        self.handle(StoreLost())

    def hear(self) -> None:
        """Take everything that the store has said."""
        while self.inbox:
            self.handle(self.inbox.popleft())

    def copy(self) -> None:
        for copy in self.state.take_copies():
            if isinstance(copy, CopyIn):
                self.device.pages[copy.page] = list(self.rig.arena.get(copy.slot, [0] * PAGE))
                self.handle(CopiedIn(copy.ticket, (copy.index,)))
            else:
                self.rig.arena[copy.slot] = list(self.device.pages[copy.page])
                self.handle(CopiedOut(copy.ticket, copy.index, 0))

    def step(self) -> bool:
        """Plan and run a step; whether there was one."""
        if isinstance(self.state, PrefillState):
            plan = self.state.plan(self.rig.now)
            for name, chunk in plan.items():
                self.device.run(self.state._jobs[name.request].tokens, chunk)
            if plan:
                self.handle(StepDone(plan, [None] * len(plan)))
        else:
            for command in self.state.prepare():
                match command:
                    case Say(message=message):
                        self.said.append(message)
                    case Call(call=call):
                        self.rig.call(self, call)
            plan = self.state.plan()
            sampled = [self.device.run(self.state._sequences[n.request].tokens, c) for n, c in plan.items()]
            if plan:
                self.handle(StepDone(plan, sampled))
        self.state.validate()
        return bool(plan)

    def turn(self) -> bool:
        self.hear()
        self.copy()
        self.hear()
        return self.step()

    def heartbeat(self) -> None:
        if self.connection:
            self.rig.call(self, Holding(self.state.tickets))


class Rig:
    """The store and its arena, and the workers around it."""

    def __init__(self, slots: int, hold: float = 30.0) -> None:
        self.now = 0.0
        self.ids = itertools.count(1)
        self.slots, self.hold = slots, hold
        self.workers: dict[int, RigWorker] = {}
        self.restart_store()

    def restart_store(self) -> None:
        for worker in self.workers.values():
            worker.lose_store()
        self.workers = {}
        me = Peer("store", "store-0", "n0", f"store-{next(self.ids)}", 0)
        self.store = StoreState(me, self.slots * 64, self.hold, 0.5, 0.25)
        self.arena: dict[int, list[int]] = {}

    def worker(self, role: Role, num_pages: int, config: DecodeConfig | PrefillConfig) -> RigWorker:
        worker = RigWorker(self, role, num_pages, config)
        worker.attach()
        return worker

    def attach(self, worker: RigWorker) -> None:
        self.workers[worker.connection] = worker
        self.store.handle(Connected(worker.connection, worker.pid), self.now)
        self.call(worker, Attach(worker.peer, NAMESPACE, 64))
        assert isinstance(worker.inbox.popleft(), Attached)

    def call(self, worker: RigWorker, call: Any) -> None:
        if worker.connection:
            self._do(self.store.handle(Heard(worker.connection, call), self.now))

    def kill(self, worker: RigWorker) -> None:
        self.workers.pop(worker.connection, None)
        self._do(self.store.handle(Disconnected(worker.connection), self.now))
        self._do(self.store.handle(WriterGone(worker.pid), self.now))
        worker.connection = 0

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            worker.heartbeat()
        self._do(self.store.handle(Tick(), self.now))

    def settle(self, limit: int = 2_000) -> None:
        """Let every worker take turns until nobody has anything to do."""
        for _ in range(limit):
            going_on = [worker.turn() or worker.inbox or worker.state.busy for worker in list(self.workers.values())]
            if not any(going_on):
                return
        raise AssertionError("the workers never came to rest")

    def _do(self, commands: Any) -> None:
        self.store.validate()
        for command in commands:
            match command:
                case Send(connection=connection, reply=reply):
                    if (worker := self.workers.get(connection)) is not None:
                        worker.inbox.append(reply)
                case Drop(connection=connection):
                    raise AssertionError(f"the store dropped a well-behaved worker {self.workers.get(connection)}")
