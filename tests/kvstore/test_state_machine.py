"""StoreState under everything that workers can do to it, with a shadow of the arena's bytes.

Workers here are as bad as real ones: they stop, wake and scribble, lose connections with calls under way, come back,
die, and let holds expire. A worker may write to a slot from the moment the store reserves it until it has said Seal or
Forget itself; what may be written is never readable and never anybody else's. What is read counts once `Released` says
so; then it is what the key names.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import Tick
from baton.messages import Peer
from baton.store_protocol import (
    Acquire,
    Attach,
    Attached,
    AttachRefused,
    EndLease,
    LeaseHeartbeat,
    NotReserved,
    PageCorrupt,
    PagesReady,
    PagesUnavailable,
    Release,
    Released,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    StoreCall,
    StoreHeartbeat,
    StoreReply,
)
from kvstore.server.events import (
    CallReceived,
    CloseConnection,
    Connected,
    Disconnected,
    SendReply,
    StoreCommand,
    StoreEvent,
    WriterDied,
)
from kvstore.server.state import StoreState
from tests.kvstore.chains import key, keys, parent, partial
from tests.kvstore.store_fixtures import NAMESPACE, STORE, store_config
from tests.support.fake_disk import FakeDisk
from tests.support.thorough import automaton

SLOTS = 8
SHARE = 0.6
CHAINS = st.text(alphabet="abc", min_size=1, max_size=5)
WORKERS = st.integers(0, 2)
PICK = st.integers(0, 10)
START = st.sampled_from([0, 0, 0, 1, 2])
OFTEN = st.sampled_from([True, True, True, False])


@dataclass
class Lease:
    """A worker's view of a lease."""

    word: str
    start: int = 0  # the pages from here on are the lease's
    reserving: bool = False
    writable: dict[int, int] = field(default_factory=dict)  # index → slot that it may write to
    arrived: dict[int, int] = field(default_factory=dict)
    read: dict[int, str] = field(default_factory=dict)  # index → what it saw

    def content(self, index: int) -> str:
        return self.word[: self.start + index + 1]


@dataclass
class Worker:
    """A worker's process. Calls wait in `calls` until the store hears them, replies in `replies`."""

    pid: int
    incarnation: str
    alive: bool = True
    connection: int | None = None
    calls: deque[StoreCall] = field(default_factory=deque)
    replies: deque[StoreReply] = field(default_factory=deque)
    leases: dict[int, Lease] = field(default_factory=dict)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = StoreState(STORE, store_config(SLOTS, 1.0, SHARE), FakeDisk(), 1_000, 0.25, 3.0)
        self.now = 0.0
        self.workers = [Worker(100 + number, f"w{number}") for number in range(3)]
        self.dead: list[Worker] = []  # whose death the kernel has not told of yet
        self.orphans: list[int] = []  # connections whose end the store has not seen yet
        self.memory = ["?"] * SLOTS
        self.connections = 0
        self.numbers = 0
        self.misbehaved: set[int] = set()
        self.told: dict[bytes, bytes] = {}

    # --- the world --------------------------------------------------------------------------------------------------

    def handle(self, event: StoreEvent) -> list[StoreCommand]:
        wanted = self.waited()
        making = {name for name in wanted if self.made(name)}
        commands = self.state.handle(event, self.now)
        self.state.validate()
        lost = {name for name in making if not self.made(name)}
        assert not lost & self.waited(), "somebody waits for what nobody makes any more"
        by_connection = {worker.connection: worker for worker in self.workers if worker.connection is not None}
        for command in commands:
            worker = by_connection.get(getattr(command, "connection", None))
            match command:
                case SendReply(connection=connection, reply=reply):
                    if isinstance(reply, AttachRefused):
                        assert connection in self.misbehaved
                    if worker is not None:
                        self.note(worker, reply)
                        worker.replies.append(reply)
                case CloseConnection():
                    if worker is not None:
                        worker.connection = None
                        worker.calls.clear()
        for change in [c for medium, changes in self.state.drain_events() for c in changes if medium == "CPU"]:
            match change:
                case _ if hasattr(change, "parent"):
                    above = change.parent
                    for name in change.keys:
                        assert name not in self.told
                        assert above == b"" or above in self.told, "a child is told of before its parent"
                        self.told[name] = above
                        above = name
                case _ if hasattr(change, "keys"):
                    for name in change.keys:
                        del self.told[name]
                        assert name not in self.told.values(), "a parent is told gone before its child"
                case _:
                    self.told.clear()
        return commands

    def note(self, worker: Worker, reply: StoreReply) -> None:
        """From the moment the store says Reserved the worker may be writing, read or unread."""
        if isinstance(reply, Reserved) and reply.lease in worker.leases:
            lease = worker.leases[reply.lease]
            lease.writable = {index: slot for index, slot in enumerate(reply.slots) if slot is not None}

    def waited(self) -> set[bytes]:
        return set(self.state._tiers.waiting._waiting)

    def made(self, name: bytes) -> bool:
        node = self.state._pages._tree.find(name)
        return node is not None

    def say(self, worker: Worker, call: StoreCall) -> None:
        if worker.connection is not None:
            worker.calls.append(call)

    def lease(self, worker: Worker, pick: int) -> int | None:
        numbers = list(worker.leases)
        return numbers[pick % len(numbers)] if numbers else None

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    # --- what workers do --------------------------------------------------------------------------------------------

    @initialize()
    def all_are_there(self) -> None:
        for number in range(len(self.workers)):
            self.attach(number)

    def attach(self, number: int) -> None:
        """Also while the old connection is still open, as far as the store knows."""
        worker = self.workers[number]
        if worker.connection is not None:
            self.orphans.append(worker.connection)
        self.connections += 1
        worker.connection = self.connections
        worker.calls.clear()
        worker.replies.clear()
        self.handle(Connected(self.connections, worker.pid))
        peer = Peer("prefill", "w", "node", worker.incarnation, worker.pid)
        worker.calls.append(Attach(peer, NAMESPACE, 100))
        # What it read under an older connection no longer counts, but what it wrote may go on.
        for lease in worker.leases.values():
            lease.arrived.clear()
            lease.read.clear()
        worker.calls.append(LeaseHeartbeat(tuple(n for n, lease in worker.leases.items() if lease.writable)))
        worker.leases = {n: lease for n, lease in worker.leases.items() if lease.writable}
        self.travel(worker, prompt=True)

    def travel(self, worker: Worker, prompt: bool) -> None:
        """Usually what is said is heard and answered at once; sometimes it waits for `hear` and `learn`."""
        if prompt:
            self.deliver(worker, 10)
            self.learn(worker, 10)

    @rule(number=WORKERS, word=CHAINS, start=START, prompt=OFTEN)
    def reserve(self, number: int, word: str, start: int, prompt: bool) -> None:
        worker = self.workers[number]
        if worker.connection is None:
            self.attach(number)
        start = start % len(word)
        lease = self.new_number()
        worker.leases[lease] = Lease(word, start, reserving=True)
        self.say(worker, Reserve(lease, parent(word, start), b"".join(keys(word, start)), partial(word)))
        self.travel(worker, prompt)

    @rule(number=WORKERS, pick=PICK, first=START, count=st.integers(1, 5), hold=st.booleans(), prompt=OFTEN)
    def seal(self, number: int, pick: int, first: int, count: int, hold: bool, prompt: bool) -> None:
        worker = self.workers[number]
        writing = [n for n, lease in worker.leases.items() if lease.writable]
        if not writing or worker.connection is None:
            return
        chosen = writing[pick % len(writing)]
        lease = worker.leases[chosen]
        indices = sorted(lease.writable)
        first = indices[first % len(indices)]
        run = [index for index in range(first, first + count) if index in lease.writable]
        run = run[: next((place for place, index in enumerate(run) if index != first + place), len(run))]
        for index in run:
            self.memory[lease.writable.pop(index)] = lease.content(index)
        self.say(worker, Seal(chosen, first, tuple(first + place for place in range(len(run))), hold))
        self.travel(worker, prompt)

    @rule(number=WORKERS, word=CHAINS, hold=st.booleans())
    def write(self, number: int, word: str, hold: bool) -> None:
        """What a good worker does: reserve a chain, seal all of it, and be done with it."""
        worker = self.workers[number]
        self.reserve(number, word, 0, prompt=True)
        lease = worker.leases.get(self.numbers)
        if lease is None:
            return
        while lease.writable:
            self.seal(number, [n for n, t in worker.leases.items() if t.writable].index(self.numbers), 0, 5, hold, True)
        del worker.leases[self.numbers]
        self.say(worker, EndLease(self.numbers))
        self.travel(worker, prompt=True)

    @rule(number=WORKERS, pick=PICK)
    def scribble(self, number: int, pick: int) -> None:
        """A writer half-way through, perhaps one that was stopped, or whose connection has gone."""
        worker = self.workers[number]
        slots = [slot for lease in worker.leases.values() for slot in lease.writable.values()]
        if slots:
            self.memory[slots[pick % len(slots)]] = "rubbish"

    @rule(number=WORKERS, word=CHAINS, wait=st.booleans(), prompt=OFTEN)
    def acquire(self, number: int, word: str, wait: bool, prompt: bool) -> None:
        """Often of a chain that is there."""
        worker = self.workers[number]
        if self.told and not wait:
            word = sorted(self.told)[len(word) % len(self.told)].lstrip(b".").decode()
        if worker.connection is None:
            self.attach(number)
        lease = self.new_number()
        worker.leases[lease] = Lease(word)
        self.say(worker, Acquire(lease, b"".join(keys(word)), wait, partial=partial(word)))
        self.travel(worker, prompt)

    @rule(number=WORKERS, pick=PICK, prompt=OFTEN)
    def read(self, number: int, pick: int, prompt: bool) -> None:
        """Copy what has arrived; whether it counts is told later."""
        worker = self.workers[number]
        reading = [n for n, lease in worker.leases.items() if lease.arrived]
        if not reading:
            return
        chosen = reading[pick % len(reading)]
        lease = worker.leases[chosen]
        arrived = tuple(lease.arrived)
        for index in arrived:
            lease.read[index] = self.memory[lease.arrived.pop(index)]
        if pick >= 8:
            self.say(worker, PageCorrupt(chosen, arrived[0]))
        self.say(worker, Release(chosen, arrived))
        self.travel(worker, prompt)

    @rule(number=WORKERS, pick=PICK)
    def forget(self, number: int, pick: int) -> None:
        worker = self.workers[number]
        chosen = self.lease(worker, pick)
        if chosen is not None and worker.connection is not None:
            del worker.leases[chosen]
            self.say(worker, EndLease(chosen))

    @rule(number=WORKERS, dropped=st.sets(PICK, max_size=2))
    def beat(self, number: int, dropped: set[int]) -> None:
        worker = self.workers[number]
        if worker.connection is None:
            return
        gone = {self.lease(worker, pick) for pick in dropped}
        worker.leases = {n: lease for n, lease in worker.leases.items() if n not in gone}
        self.say(worker, LeaseHeartbeat(tuple(worker.leases)))

    def misbehave(self, worker: Worker, pick: int, kind: int) -> None:
        """Calls that cost the caller its connection, or nothing; never anybody else anything."""
        if worker.connection is None:
            return
        self.misbehaved.add(worker.connection)
        lease = self.lease(worker, pick) or 0
        mine = worker.leases.get(lease, Lease("a"))
        calls: list[StoreCall] = [
            Reserve(lease, b"", bytes(17)),
            Reserve(self.new_number(), b"short", key("a")),
            Reserve(self.new_number(), b"", key("ab")),
            Reserve(lease, parent(mine.word, mine.start), b"".join(keys(mine.word, mine.start))),  # perhaps in use
            Seal(lease, 3, (1, 2, 3)),
            Acquire(lease, key("a") * 2),
            Release(lease, (-1,)),
            Seal(lease, 0, ()),
        ]
        self.say(worker, calls[kind % len(calls)])
        self.travel(worker, prompt=True)

    # --- what happens to them ---------------------------------------------------------------------------------------

    @rule(number=WORKERS, mishap=st.sampled_from(["attach", "lose", "lose", "die", "misbehave"]), kind=PICK, pick=PICK)
    def mishap(self, number: int, mishap: str, kind: int, pick: int) -> None:
        worker = self.workers[number]
        match mishap:
            case "attach":
                self.attach(number)
            case "lose":
                self.lose_connection(worker)
            case "die":
                self.die(number)
            case _:
                self.misbehave(worker, pick, kind)

    @rule(number=WORKERS, calls=st.integers(0, 4), replies=st.integers(0, 4))
    def some_travel(self, number: int, calls: int, replies: int) -> None:
        self.deliver(self.workers[number], calls)
        self.learn(self.workers[number], replies)

    def deliver(self, worker: Worker, count: int) -> None:
        for _ in range(count):
            if worker.connection is not None and worker.calls:
                self.handle(CallReceived(worker.connection, worker.calls.popleft()))

    def learn(self, worker: Worker, count: int) -> None:
        for _ in range(min(count, len(worker.replies))):
            reply = worker.replies.popleft()
            lease = worker.leases.get(getattr(reply, "lease", -1))
            if lease is None:
                continue
            match reply:
                case PagesReady(pages=pages):
                    lease.arrived.update({page.index: page.slot for page in pages})
                case Released(indices=indices, held=held):
                    for index, counts in zip(indices, held, strict=True):
                        seen = lease.read.pop(index, None)
                        assert not counts or seen == lease.content(index), "read what no key names"
                case (
                    Attached()
                    | Reserved()
                    | NotReserved()
                    | Sealed()
                    | PagesUnavailable()
                    | StoreHeartbeat()
                    | AttachRefused()
                ):
                    pass

    def lose_connection(self, worker: Worker) -> None:
        if worker.connection is not None:
            self.orphans.append(worker.connection)
            worker.connection = None
            worker.calls.clear()

    def die(self, number: int) -> None:
        worker = self.workers[number]
        if worker.connection is not None:
            self.orphans.append(worker.connection)
        self.dead.append(worker)
        self.workers[number] = Worker(worker.pid + 10, f"{worker.incarnation}'")

    @precondition(lambda self: self.orphans)
    @rule(pick=PICK)
    def store_sees_disconnect(self, pick: int) -> None:
        self.handle(Disconnected(self.orphans.pop(pick % len(self.orphans))))

    @precondition(lambda self: self.dead)
    @rule()
    def kernel_tells_of_death(self) -> None:
        worker = self.dead.pop(0)
        self.handle(WriterDied(worker.pid))
        assert not self.state.needs_proof(worker.pid)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.1]), paused=st.booleans())
    def time_passes(self, seconds: float, paused: bool) -> None:
        self.now += seconds
        self.handle(Tick(seconds if paused else 0.0))

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def what_may_be_written_is_nobody_elses(self) -> None:
        writable = [s for w in self.workers for lease in w.leases.values() for s in lease.writable.values()]
        assert len(writable) == len(set(writable)), "two writers of one slot"
        pages = self.state._pages
        assert not set(writable) & set(pages._free), "a slot is free while its writer may write"
        sealed = [node.value.page for node in pages._tree.preorder() if node.value.page is not None]
        assert not {page.slot for page in sealed} & set(writable), "readable while its writer may write"
        for page in sealed:
            assert key(self.memory[page.slot]) == page.key, "a page does not hold what its key names"

    @invariant()
    def numbers_add_up(self) -> None:
        stats = self.state.stats(self.now)
        assert stats.free + stats.sealed + stats.reserved + stats.unlisted == stats.slots
        assert stats.evictable <= stats.sealed
        assert stats.slots in (0, SLOTS)
        snapshot = {
            run.keys[at : at + 16]: (run.keys[at - 16 : at] if at else run.parent)
            for run in self.state.snapshot()
            for at in range(0, len(run.keys), 16)
        }
        assert snapshot == self.told
        for process in self.state._processes.values():
            assert process.reserved <= int(SLOTS * SHARE)

    def teardown(self) -> None:
        """When all workers have died, every slot is free or holds a page, and no lease is left."""
        for number in range(len(self.workers)):
            self.die(number)
        while self.dead:
            self.kernel_tells_of_death()
        while self.orphans:
            self.store_sees_disconnect(0)
        stats = self.state.stats(self.now)
        assert stats.free + stats.sealed == stats.slots
        assert stats.evictable == stats.sealed
        assert stats.leases == stats.waits == stats.held == stats.connections == stats.unproven == 0


StoreMachine.TestCase.settings = automaton(count=300, steps=60)
TestStore = StoreMachine.TestCase
