"""A model of page bytes for a state machine: stores with arenas and disks, wires between them, and workers around them.
Wires, disks and processes fail as they do in real life.

A page's bytes are its word and the name of its writer, so the pages of two writers of one key differ. Its checksum is
of just these bytes. Nothing happens by itself. Each thread of a store (transport, disk), each wire, each worker and
each store's loop does one thing when it is told to, in any legal order, and reads or writes the arena only then. Bytes
that were damaged on purpose begin with `SPOILT`. Any other bytes that differ from their checksum come from a slot that
was reused too early.

Workers stop, wake and scribble, lose connections with calls under way, come back, die, and let leases expire. A worker
may write to a slot from the moment the store reserves it until it has said Seal or EndLease itself. What may be written
is never readable and never another's. What is read counts once `Released` says so. Then it is what the key names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from zlib import crc32

import msgspec
import pytest

from baton import store_protocol as protocol
from baton.clock import Tick
from baton.messages import FromStore, Medium, PageSource, PagesPinned, Peer, PinPages, UnpinPages
from baton.waits import WaitEdge
from kvstore.arena.host_page_pool import HostPage
from kvstore.client.reply_check import ReplyCheck
from kvstore.events.changes import PagesCleared, PagesRemoved, PagesStored
from kvstore.server import events
from kvstore.server.inbound_transfers import STORE, RemoteFetch
from kvstore.server.leases import Lease, PageWaiter
from kvstore.transport.interface import PeerEvent, PeerOrder, SendPages, VerifySlot
from simulator.transport import SimulatedTransport
from tests.kvstore.chains import key, keys, parent, partial
from tests.kvstore.store_fixtures import NAMESPACE, store_config
from tests.support.fake_disk import FakeDisk, Finished, Read, Write
from tests.support.held_agenda import HeldAgenda
from tests.support.held_store import HEARTBEAT, SILENCE, HeldStore
from tests.support.wires import Wires

SLOTS = 6
SHARE = 0.75
HOLD = 1.0
WINDOW = 2  # pages of one fetch on their way, so that credits matter
QUOTA = 400  # bytes that one tenant may pin
WORDS = ("a", "ab", "abc", "abcd", "abcde", "abx", "abxy", "c", "cd", "cde", "g")
OTHER = str.maketrans("abcdegxy", "ABCDEGXY")
"""Pages of another namespace have other keys."""
SPOILT = b"!"

Slots: TypeAlias = set[int]


def word_of(name: bytes) -> str:
    return name.lstrip(b".").decode()


def is_page(content: bytes, name: bytes, checksum: int) -> bool:
    """Whether these bytes are those of that page, as its sealer left them."""
    return crc32(content) == checksum and content.split(b"#")[0].decode() == word_of(name)


class Memory:
    """A store's arena."""

    rubbish = b"rubbish"

    def __init__(self) -> None:
        self.slots = [b"?"] * SLOTS

    def read_slot(self, slot: int, checksum: int) -> bytes:
        """Let a thread read a slot that was promised to it."""
        contents = self.slots[slot]
        good = self.matches(contents, checksum) or self.spoilt(contents)
        assert good, f"a slot was reused while a thread was to read it: {contents!r}"
        return contents

    def write(self, slot: int, contents: bytes) -> None:
        self.slots[slot] = self.rubbish if self.spoilt(contents) else contents

    def matches(self, contents: bytes, checksum: int) -> bool:
        return crc32(contents) == checksum

    def spoilt(self, contents: bytes) -> bool:
        return contents.startswith(SPOILT)


@dataclass
class WorkerLease:
    """A worker's view of a lease."""

    word: str
    start: int  # the pages from here on are the lease's
    writable: dict[int, int] = field(default_factory=dict)  # index → slot that it may write to
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)  # index → slot, checksum
    read: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # index → what it saw, checksum
    below: int | None = None  # the first page that lower tiers have

    def name(self, index: int) -> bytes:
        return key(self.word[: self.start + index + 1])


@dataclass(eq=False)
class Worker:
    """A worker's process. What it says and is told waits in the lanes "calls" and "replies"."""

    node: Node
    pid: int
    connection: int | None = None
    leases: dict[int, WorkerLease] = field(default_factory=dict)
    check: ReplyCheck | None = None  # of its connection, while it behaves

    def say(self, call: protocol.StoreCall) -> None:
        if self.connection is not None:
            self.node.world.hold(("calls", self.pid), self.node.take_event, events.CallReceived(self.connection, call))
            if self.check is not None:
                self.check.called(call)

    def disconnect(self) -> None:
        """Its connection has ended. Calls on their way are lost, replies are still read."""
        self.connection = None
        self.node.world.drop("calls", self.pid)

    @property
    def writable(self) -> list[int]:
        return [slot for lease in self.leases.values() for slot in lease.writable.values()]


class Node(HeldStore):
    """One store with its threads, and the workers of its machine."""

    def __init__(self, world: World, name: str, disk_room: int) -> None:
        super().__init__(world, world.wires, name, FakeDisk(room=disk_room))
        self.world = world
        self.namespace = NAMESPACE
        self.workers = [Worker(self, world.number()) for _ in range(world.workers)]
        self.dead: list[Worker] = []  # whose death the kernel has not told of yet
        self.orphans: list[int] = []  # connections whose end the store has not seen yet
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new process with an empty arena, on the same disk."""
        self.memory = Memory()
        for kind in ("transport", "loop"):
            self.world.drop(kind, self.incarnation)
        config = msgspec.structs.replace(store_config(SLOTS, HOLD, SHARE), load_share=0.5, pin_bytes=QUOTA)
        self.start(f"{self.name}{self.world.number()}", config, self.world.admit_after, self.memory)
        self.bad: dict[int, bytes] = {}  # slot → bytes that a VerifySlot has found to be wrong
        self.mirror: dict[Medium, dict[bytes, bytes]] = {"CPU": {}, "DISK": {}}
        self.refusable: set[int] = set()  # connections that may be refused

    # --- the loop ---------------------------------------------------------------------------------------------------

    def decide(self, event: events.StoreEvent) -> Sequence[events.StoreCommand]:
        unsealed, waited = self.unsealed, self.waits()
        commands = super().decide(event)
        for name in unsealed - self.unsealed:
            stuck = self.waits().get(name, set()) & waited.get(name, set())
            assert not stuck or self.coming(name), "somebody waits for what nobody makes any more"
        return commands

    def take_event(self, event: events.StoreEvent) -> Sequence[events.StoreCommand]:
        commands = super().take_event(event)
        self._follow_events()
        return commands

    def reply(self, connection: int, reply: protocol.StoreReply) -> None:
        assert not isinstance(reply, protocol.AttachRefused) or connection in self.refusable, reply
        if (worker := self._worker(connection)) is not None:
            self._note(worker, reply)
            self.world.hold(("replies", worker.pid), self.world.learn, reply, worker)

    def close_connection(self, connection: int) -> None:
        if (worker := self._worker(connection)) is not None:
            worker.disconnect()

    def tell_router(self, message: FromStore, router: str) -> None:
        pass

    def divide_arena(self) -> None:
        assert not self.touched, "the arena is cut anew under somebody's hands"
        self.state._tiers.loads._window = WINDOW

    def order_transport(self, order: PeerOrder) -> None:
        self.world.hold(("transport", self.incarnation), self._carry_out_late, order)

    def hear_thread(self, event: PeerEvent | Finished) -> None:
        self.world.hold(("loop", self.incarnation), self.take_event, event)

    def _worker(self, connection: int) -> Worker | None:
        return next((worker for worker in self.workers if worker.connection == connection), None)

    def _note(self, worker: Worker, reply: protocol.StoreReply) -> None:
        """From the moment the store says Reserved the worker may be writing, read or unread."""
        if isinstance(reply, protocol.Reserved) and (lease := worker.leases.get(reply.lease)) is not None:
            lease.writable = {index: slot for index, slot in enumerate(reply.slots) if slot is not None}

    def _follow_events(self) -> None:
        """What other machines believe to be here, from KV events alone."""
        for medium, changes in self.state.drain_events():
            mirror = self.mirror[medium]
            for change in changes:
                match change:
                    case PagesStored(parent=above, keys=names):
                        for name in names:
                            assert name not in mirror
                            assert above == b"" or above in mirror, f"{medium}: a child is told of before its parent"
                            mirror[name] = above
                            above = name
                    case PagesRemoved(keys=names):
                        for name in names:
                            del mirror[name]
                            assert name not in mirror.values(), f"{medium}: a parent is told gone before its child"
                    case PagesCleared():
                        self.mirror = {"CPU": {}, "DISK": {}}
                        mirror = self.mirror[medium]

    # --- threads ----------------------------------------------------------------------------------------------------

    def _carry_out_late(self, order: PeerOrder) -> None:
        """The transport takes an order."""
        if isinstance(order, VerifySlot) and self.memory.spoilt(self.memory.slots[order.slot]):
            self.bad[order.slot] = self.memory.slots[order.slot]
        self.transport.carry_out(order)
        self.transport.flush()

    def work_on_some(self, pick: int, ok: bool = True) -> None:
        """The disk's threads carry out one order, any of them, or fail to."""
        self.world.go("disk", self.incarnation, pick=pick, ok=ok)

    def scribble_below(self, pick: int) -> None:
        """A thread is half-way through writing a page that it brings in."""
        slots = sorted(self.written)
        if slots:
            self.memory.slots[slots[pick % len(slots)]] = b"half a page"

    # --- what may happen to it --------------------------------------------------------------------------------------

    def restart(self) -> None:
        for worker in self.workers:
            worker.disconnect()
            worker.leases.clear()
        self.dead.clear()
        self.orphans.clear()
        self.begin_anew()

    def spoil(self, pick: int) -> None:
        """A bit flips in a page of the arena."""
        slots = [page.slot for page in self.pages]
        if slots:
            self._spoil(self.memory.slots, slots[pick % len(slots)])

    def spoil_disk(self, pick: int) -> None:
        """Some pages of the disk go bad, or all."""
        for name in list(self.files)[:: pick + 1]:
            self._spoil(self.files, name)

    def evict_from_disk(self, pick: int) -> None:
        """The disk needs room."""
        self.disk.evict(pick)
        self._follow_events()

    def _spoil(self, contents: list[bytes] | dict[bytes, bytes], place: int | bytes) -> None:
        content = contents[place]
        if not content.startswith(SPOILT):
            contents[place] = SPOILT + content

    # --- what can be read off ---------------------------------------------------------------------------------------

    @property
    def pages(self) -> list[HostPage]:
        """Return every sealed page: those that a lookup finds, and those that a lease still holds."""
        tiers = self.state._tiers
        in_tree = [n.value.page for n in tiers.pages._tree.preorder() if n.value.page is not None]
        held = [page for lease in self.state._leases() for page in lease.holds.values()]
        everything = (*in_tree, *held, *tiers.server.held, *tiers.pins.held, *tiers._demoting.values())
        return list({id(page): page for page in everything}.values())

    @property
    def disk_orders(self) -> list[Write | Read]:
        """Return what the disk's threads have not done."""
        return self.world.waiting("disk", self.incarnation)

    @property
    def written(self) -> Slots:
        """Slots that threads may write to."""
        reading = [order.slot for order in self.disk_orders if isinstance(order, Read)]
        slots = reading + [slot for slots in self.transport.expected.values() for slot in slots.values()]
        assert len(slots) == len(set(slots)), "two pages are brought into one slot"
        return set(slots)

    @property
    def being_read(self) -> Slots:
        slots = {order.page.slot for order in self.disk_orders if isinstance(order, Write)}
        slots |= {slot for slots in self.transport.sending.values() for slot in slots}
        for order in self.world.waiting("transport", self.incarnation):
            match order:
                case SendPages(slots=serving):
                    slots |= set(serving)
                case VerifySlot(slot=slot):
                    slots.add(slot)
                case _:
                    pass
        return slots

    @property
    def touched(self) -> Slots:
        return self.written | self.being_read | {slot for worker in self.workers for slot in worker.writable}

    @property
    def unsealed(self) -> set[bytes]:
        """Return the keys that a worker has reserved and no worker has sealed."""
        tree = self.state._tiers.pages._tree
        return {
            node.key
            for node in tree.preorder()
            if node.value.page is None and any(r.writer != STORE for r in node.value.reservations)
        }

    def coming(self, name: bytes) -> bool:
        """Whether the page is here, is being written, or is being loaded."""
        tiers = self.state._tiers
        return tiers.pages.find(name) is not None or tiers.pages.being_written(name) or tiers.loads.coming(name)

    def waits(self) -> dict[bytes, set[PageWaiter]]:
        return {name: set(waiting) for name, waiting in self.state._tiers.waiting._waiting.items()}

    # --- what always holds ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_slots()
        self._check_bytes()
        self._check_waits()
        self._check_numbers()

    def _check_slots(self) -> None:
        pages, written, being_read = self.state._tiers.pages, self.written, self.being_read
        free, sealed = set(pages._free), {page.slot for page in self.pages}
        writable = [slot for worker in self.workers for slot in worker.writable]
        assert len(writable) == len(set(writable)), "two writers of one slot"
        may_write = {*writable, *written}
        assert len(may_write) == len(writable) + len(written), "a worker and a thread write to one slot"
        assert not may_write & free, "a slot is free while somebody may write to it"
        assert not may_write & sealed, "readable while somebody may write to it"
        assert not being_read & may_write, "written to while a thread reads it"
        assert not being_read & free, "a slot is free while a thread reads it"
        held = {page.slot for page in self.pages if page.holds}
        assert being_read <= held, "nobody holds what a thread reads"
        reserved = {reservation.slot for reservation in self.state._tiers.loads.reservations}
        assert written <= reserved, "a slot that a thread writes to is not reserved"

    def _check_bytes(self) -> None:
        for page in self.pages:
            content = self.memory.slots[page.slot]
            good = content.startswith(SPOILT) or is_page(content, page.key, page.checksum)
            assert good, f"{word_of(page.key)} holds {content!r}"
        for name, (_, checksum) in self.disk._pages.items():
            content = self.files[name]
            assert content.startswith(SPOILT) or is_page(content, name, checksum), "the disk holds another page"

    def _check_waits(self) -> None:
        """Every wait has a live producer. A hand-off without sources waits for a producer that only the router
        knows."""
        tiers = self.state._tiers
        for name, waiters in self.waits().items():
            has_producer = tiers.pages.being_written(name) or tiers.loads.coming(name)
            for waiter in waiters:
                has_sources = isinstance(waiter, Lease) and any(
                    source.pages > index for source in waiter.sources for index in waiter.waits
                    if waiter.keys[index] == name
                )  # fmt: skip
                assert has_producer or (waiter.wait and not has_sources), f"nobody makes {word_of(name)}"

    def _check_numbers(self) -> None:
        stats = self.state.stats(self.world.now)
        assert stats.free + stats.sealed + stats.reserved + stats.unlisted == stats.slots
        assert stats.slots in (0, SLOTS)
        assert stats.evictable <= stats.sealed
        assert stats.pinned_bytes <= QUOTA * 2
        snapshot: dict[Medium, dict[bytes, bytes]] = {"CPU": {}, "DISK": {}}
        for run in self.state.snapshot():
            for at in range(0, len(run.keys), 16):
                above = run.keys[at - 16 : at] if at else run.parent
                snapshot[run.medium][run.keys[at : at + 16]] = above
        assert snapshot == self.mirror, f"{snapshot} is here, {self.mirror} was told"
        for process in self.state._processes.values():
            assert process.reserved <= int(SLOTS * SHARE)

    def check_quiet(self) -> None:
        """Nothing is on its way and nothing was lost lately: whatever still goes on waits for a page to be made."""
        tiers = self.state._tiers
        assert not tiers.loads._reading, "a read from disk never ended"
        assert not tiers._demoting, "a write to disk never ended"
        assert not tiers.loads._retired, "slots of an ended fetch are never freed"
        assert tiers.server.idle, "a page is sent for ever"
        slots = [page.slot for page in self.pages if not page.dropped]
        assert all(self.memory.slots[slot] is not self.bad.get(slot) for slot in slots), "a bad page is listed"
        for fetch in tiers.loads._fetches.values():
            self._check_quiet_fetch(fetch)

    def _check_quiet_fetch(self, fetch: RemoteFetch) -> None:
        server = self.world.node(fetch.source.store)
        if server is None:
            heard = self.state._tiers.loads._heard[fetch.source.store]
            assert self.world.now - heard <= SILENCE + HEARTBEAT, "a fetch waits for a store that is gone"
            return
        tiers = server.state._tiers
        serving = tiers.server._peers.get(self.incarnation, {}).get(fetch.number)
        assert serving is not None, "a fetch waits for a store that knows nothing of it"
        if serving.gone is None:
            assert serving.credit == fetch.credit, "a credit was lost for good"
        assert fetch.slots.keys() <= serving.waits, "a fetch waits for what will not be sent"
        assert fetch.slots or fetch.credit < len(fetch.keys), "a fetch that has all it wants goes on"

    def check_left(self) -> None:
        """Check that workers that have just died hold nothing: a page is held for another store, the disk, or a pin."""
        stats, tiers = self.state.stats(self.world.now), self.state._tiers
        assert stats.leases == stats.connections == stats.unproven == 0
        held = [*tiers.server.held, *tiers.pins.held, *tiers._demoting.values()]
        assert stats.held == len({id(page) for page in held})

    def check_empty(self) -> None:
        """Check that nothing is held: every worker and peer has gone."""
        stats, tiers = self.state.stats(self.world.now), self.state._tiers
        assert stats.free + stats.sealed == stats.slots
        assert stats.evictable == stats.sealed
        assert stats.leases == stats.waits == stats.held == stats.connections == stats.unproven == stats.pins == 0
        assert tiers.idle
        assert not tiers.loads._fetches
        assert not tiers.server._peers
        assert not any(self.transport.expected.values()), "the transport still expects pages"
        assert not self.transport.sending


class World(HeldAgenda):
    """The machines, the wires between them, and time."""

    def __init__(self, nodes: int, admit_after: int, disk_room: int, workers: int = 2) -> None:
        super().__init__()
        self.admit_after, self.workers = admit_after, workers
        self.numbers = 0
        self.wires = Wires(self, self._transport, lambda contents: SPOILT + contents)
        self.nodes = [Node(self, "ABC"[place], disk_room) for place in range(nodes)]

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def node(self, incarnation: str) -> Node | None:
        return next((node for node in self.nodes if node.incarnation == incarnation), None)

    # --- wires ------------------------------------------------------------------------------------------------------

    def _transport(self, incarnation: str) -> SimulatedTransport | None:
        return node.transport if (node := self.node(incarnation)) is not None else None

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(self, worker: Worker, refusable: bool = False) -> None:
        """Also while the old connection is still open, as far as the store knows."""
        node = worker.node
        if worker.connection is not None:
            node.orphans.append(worker.connection)
        worker.disconnect()
        self.drop("replies", worker.pid)
        worker.connection = self.number()
        worker.check = ReplyCheck(SLOTS)
        if refusable:
            node.refusable.add(worker.connection)
        node.take_event(events.Connected(worker.connection, worker.pid))
        peer = Peer("prefill", "w", "node", f"w{worker.pid}", worker.pid)
        worker.say(protocol.Attach(peer, node.namespace, 100))
        # What it read under an older connection no longer counts, but what it wrote may go on.
        worker.leases = {n: lease for n, lease in worker.leases.items() if lease.writable}
        for lease in worker.leases.values():
            lease.arrived.clear()
            lease.read.clear()
        worker.say(protocol.LeaseHeartbeat(tuple(worker.leases)))
        self.travel(worker)

    def travel(self, worker: Worker) -> None:
        """What a worker says is heard, and the worker hears what the store says."""
        self.flow("calls", worker.pid)
        self.flow("replies", worker.pid)

    def learn(self, reply: protocol.StoreReply, worker: Worker) -> None:
        """A worker hears what the store has said."""
        if worker.check is not None and not isinstance(reply, protocol.Attached | protocol.AttachRefused):
            worker.check.heard(reply)
        lease = worker.leases.get(getattr(reply, "lease", -1))
        if lease is None:
            return
        match reply:
            case protocol.PagesReady(pages=pages):
                for page in pages:
                    assert page.index not in lease.arrived, "a page arrives twice"
                    lease.arrived[page.index] = (page.slot, page.checksum)
            case protocol.LowerTierHits(first=first):
                lease.below = first
            case protocol.Released(indices=indices, held=held):
                for index, counts in zip(indices, held, strict=True):
                    content, checksum = lease.read.pop(index, (SPOILT, 0))
                    if counts:
                        assert is_page(content, lease.name(index), checksum), f"read what no key names: {content!r}"
            case _:
                pass

    def _word(self, worker: Worker, word: str) -> str:
        return word if worker.node.namespace == NAMESPACE else word.translate(OTHER)

    def _lease(self, worker: Worker, word: str, start: int) -> tuple[int, WorkerLease]:
        if worker.connection is None:
            self.attach(worker)
        number = self.number()
        word = self._word(worker, word)
        worker.leases[number] = lease = WorkerLease(word, start % len(word))
        return number, lease

    def reserve(self, worker: Worker, word: str, start: int) -> int:
        number, lease = self._lease(worker, word, start)
        above = parent(lease.word, lease.start)
        worker.say(protocol.Reserve(number, above, b"".join(keys(lease.word, lease.start)), partial(lease.word)))
        return number

    def seal(self, worker: Worker, number: int, skip: int, count: int, hold: bool) -> None:
        """Write some pages, from the `skip`-th one that is to be written on, and say so."""
        lease = worker.leases.get(number)
        if lease is None or not lease.writable or worker.connection is None:
            return
        indices = sorted(lease.writable)
        first = indices[skip % len(indices)]
        checksums: list[int] = []
        while first + len(checksums) in lease.writable and len(checksums) < count:
            index = first + len(checksums)
            content = f"{word_of(lease.name(index))}#{self.number()}".encode()
            worker.node.memory.slots[lease.writable.pop(index)] = content
            checksums.append(crc32(content))
        worker.say(protocol.Seal(number, first, tuple(checksums), hold))

    def write(self, worker: Worker, word: str, hold: bool) -> None:
        """What a good worker does: reserve a chain, seal all of it, and be done with it."""
        number = self.reserve(worker, word, 0)
        self.travel(worker)
        while number in worker.leases and worker.leases[number].writable:
            self.seal(worker, number, 0, 5, hold)
            self.travel(worker)
        if not hold:
            self.forget(worker, number)

    def elsewhere(self, node: Node) -> list[str]:
        """Words whose pages lie on that node's disk or in another store, and not in its arena."""
        of_kind = [other for other in self.nodes if other.namespace == node.namespace]
        names = {name for other in of_kind for name in other.mirror["CPU"]} | set(node.mirror["DISK"])
        return sorted(word_of(name).lower() for name in names - set(node.mirror["CPU"]))

    def acquire(self, worker: Worker, word: str, start: int, wait: bool, sources: tuple[PageSource, ...]) -> int:
        number, lease = self._lease(worker, word, start)
        names = b"".join(keys(lease.word, lease.start))
        above = parent(lease.word, lease.start)
        worker.say(protocol.Acquire(number, names, wait, above, sources, partial(lease.word)))
        return number

    def promote(self, worker: Worker, number: int, pages: int) -> None:
        """Of some pages that lower tiers have; a good worker does so once."""
        lease = worker.leases.get(number)
        if lease is not None and lease.below is not None:
            until = min(lease.below + pages, len(lease.word) - lease.start)
            lease.below = None
            worker.say(protocol.Promote(number, until))

    def read(self, worker: Worker, number: int, accuse: bool) -> None:
        """Copy what has arrived; whether it counts is told later. What is spoilt is always noticed."""
        lease = worker.leases.get(number)
        if lease is None or not lease.arrived:
            return
        indices = tuple(lease.arrived)
        for index, (slot, checksum) in lease.arrived.items():
            content = worker.node.memory.slots[slot]
            lease.read[index] = (content, checksum)
            if content.startswith(SPOILT) or accuse:
                accuse = False
                worker.say(protocol.PageCorrupt(number, index))
        lease.arrived.clear()
        worker.say(protocol.Release(number, indices))

    def forget(self, worker: Worker, number: int) -> None:
        if worker.leases.pop(number, None) is not None:
            worker.say(protocol.EndLease(number))

    def beat(self, worker: Worker, dropped: int | None = None) -> None:
        if worker.connection is not None:
            worker.leases.pop(-1 if dropped is None else dropped, None)
            worker.say(protocol.LeaseHeartbeat(tuple(worker.leases)))

    def misbehave(self, worker: Worker, number: int, kind: int) -> None:
        """Calls that cost the caller its connection, or nothing; never anybody else anything."""
        if worker.connection is None:
            return
        worker.node.refusable.add(worker.connection)
        worker.check = None
        lease = worker.leases[number]
        in_use = protocol.Acquire(
            number, b"".join(keys(lease.word, lease.start)), False, parent(lease.word, lease.start)
        )
        calls: list[protocol.StoreCall] = [
            protocol.Promote(number, 2), protocol.Promote(number, 99), protocol.Promote(0, 1), in_use,
            protocol.Seal(number, 3, (1, 2, 3)), protocol.Release(number, (-1,)),
            protocol.Reserve(self.number(), b"", key("ab")),
            protocol.Acquire(self.number(), key("a") * 2), protocol.Acquire(self.number(), key("ab"), False, b"short"),
            protocol.Reserve(self.number(), b"", bytes(17)), protocol.Reserve(self.number(), b"short", key("a")),
            protocol.Seal(number, 0, ()),
            protocol.Reserve(number, parent(lease.word, lease.start), b"".join(keys(lease.word, lease.start))),
        ]  # fmt: skip
        worker.say(calls[kind % len(calls)])

    def scribble(self, worker: Worker, pick: int) -> None:
        """A writer half-way through, perhaps one that was stopped, or whose connection has gone; and a thread."""
        if worker.writable:
            worker.node.memory.slots[worker.writable[pick % len(worker.writable)]] = b"rubbish"
        worker.node.scribble_below(pick)

    def lose_connection(self, worker: Worker) -> None:
        if worker.connection is not None:
            worker.node.orphans.append(worker.connection)
            worker.disconnect()

    def die(self, worker: Worker) -> Worker:
        node = worker.node
        self.lose_connection(worker)
        self.drop("replies", worker.pid)
        node.dead.append(worker)
        node.workers[node.workers.index(worker)] = new = Worker(node, self.number())
        return new

    def tell_of_death(self, node: Node) -> None:
        """The kernel tells a store of a worker's death."""
        if node.dead:
            pid = node.dead.pop(0).pid
            node.take_event(events.WriterDied(pid))
            assert not node.state.needs_proof(pid)

    def close_orphan(self, node: Node, pick: int = 0) -> None:
        """A store sees the end of a connection."""
        if node.orphans:
            node.take_event(events.Disconnected(node.orphans.pop(pick % len(node.orphans))))

    def _all_die(self, node: Node) -> None:
        for worker in list(node.workers):
            self.die(worker)
        while node.dead or node.orphans:
            self.tell_of_death(node)
            self.close_orphan(node)

    def move_in(self, node: Node, other: bool) -> None:
        """All workers of a node die, and the next ones have perhaps another model."""
        self._all_die(node)
        before = node.namespace
        if other:
            model = bytes(16) if before != NAMESPACE else bytes([1] * 16)
            node.namespace = msgspec.structs.replace(NAMESPACE, model=model)
        for worker in node.workers:
            idle = node.state._tiers.idle
            self.attach(worker, refusable=not idle)
            if worker.connection is None:
                node.namespace = before

    # --- operators --------------------------------------------------------------------------------------------------

    def pin(self, node: Node, name: str, tenant: str, word: str, ttl_ms: int) -> None:
        commands = node.take_event(events.RouterMessageReceived(PinPages(name, tenant, b"".join(keys(word)), ttl_ms)))
        (answer,) = (command.message for command in commands if isinstance(command, events.TellRouter))
        assert isinstance(answer, PagesPinned)
        if not answer.reason:
            pinned = [node.state._tiers.pages.find(name) for name in keys(word)]
            assert all(page is not None and page.holds for page in pinned), "a pin does not hold"

    def unpin(self, node: Node, name: str) -> None:
        node.take_event(events.RouterMessageReceived(UnpinPages(name)))

    # --- time -------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float, paused: bool = False, asleep: int = -1) -> None:
        self.now += seconds
        for place, node in enumerate(self.nodes):
            if place != asleep:
                node.take_event(Tick(seconds if paused else 0.0))

    def hear(self) -> None:
        """Every loop hears its threads, and they carry out what it says; but nothing arrives from wires or disks."""
        while self.loaded("loop") or self.loaded("transport"):
            self.flow("loop")
            self.flow("transport")

    def settle(self) -> None:
        """All goes well for a while."""
        self._beats()
        for _ in range(3):  # a page that was written twice may be found lost in the first of them
            lost = self.lost
            self._beats()
            if lost == self.lost:
                break
        else:
            pytest.fail("pages are wanted anew, again and again, that no process has lost")
        for node in self.nodes:
            node.check_quiet()

    def _beats(self) -> None:
        for _ in range(3):
            for node in self.nodes:
                for worker in node.workers:
                    self.beat(worker)
            self.flow()
            self.pass_time(HEARTBEAT)
        self.flow()

    @property
    def lost(self) -> list[int]:
        return [node.state.stats(self.now).loads.lost for node in self.nodes]

    def everybody_goes(self) -> None:
        for node in self.nodes:
            self._all_die(node)
            node.check_left()
        for _ in range(8):
            self.flow()
            self.pass_time(SILENCE / 2)
        self.flow()
        for node in self.nodes:
            node.check()
            node.check_empty()

    def leases(self, worker: Worker, pick: int, what: str) -> Iterator[int]:
        """The number of a lease of which `what` is not empty, if there is one."""
        numbers = [n for n, lease in worker.leases.items() if not what or getattr(lease, what) not in (None, {})]
        if numbers:
            yield numbers[pick % len(numbers)]

    def waits(self) -> Iterator[WaitEdge]:
        """Yield what each store waits for. Its workers do what they like."""
        for node in self.nodes:
            yield from node.state.waits()
