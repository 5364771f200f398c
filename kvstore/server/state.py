"""What a node's store knows and decides: who is attached, what each ticket reserves, holds and waits for.

A worker's process is named by its pid, which the kernel vouches for, and its incarnation. Tickets belong to the
process, not to the connection:

    attached ──Disconnected──▶ away ──attaches again──▶ attached
        │      holds and waits end; │ reservations stay,
        │      it may be writing    │ for it may be writing
        └────────WriterDied─────────┴──▶ everything ends: the kernel has said that the process is gone

So a reserved slot is freed by its writer's Seal or EndLease or by that proof, and never by time. Holds do end by time,
because a reader believes its bytes only after `Released` has said that the hold lasted.

Every wait ends: by PagesReady; by PagesUnavailable, when its maker gives up or dies or the waiting ticket expires; or
by its own Forget. Waiting for a key that nobody reserves yet is allowed: the router knows who is going to.

A ticket lives until its owner forgets it, by EndLease or by leaving it out of its heartbeat (the socket keeps the
order, so an unlisted ticket is one that the owner has done with), until it ends by the death of its process, or, when
nothing is reserved under it, by the end of the connection.

What is not in the arena may lie below: on this node's disk, or in another store. A hand-off (`Acquire` with `wait`) is
always delivered; of a cached prefix the worker is told what lies `LowerTierHits`, and says what to `Promote`.

Pure: events and the time in, commands out. Pages, their slots and tiers are `kvstore.server.tier_manager`'s matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.clock import Tick
from baton.config import StoreConfig
from baton.errors import Incompatible, MalformedMessage, ProtocolError
from baton.messages import (
    KEY_BYTES,
    PROTOCOL_VERSION,
    AttemptHeld,
    LoadReport,
    Medium,
    Namespace,
    PageSegment,
    Peer,
    PinPages,
    ToStore,
    UnpinPages,
)
from baton.store_protocol import (
    Acquire,
    Attach,
    Attached,
    AttachRefused,
    EndLease,
    LeaseHeartbeat,
    LowerTierHits,
    NotReserved,
    PageCorrupt,
    PagesReady,
    PagesUnavailable,
    Promote,
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
from baton.store_protocol import LeasedPage as PageAt
from baton.waits import WaitEdge
from kvstore.arena.host_page_pool import HostPage, HostPagePool
from kvstore.disk.admission_filter import AdmissionFilter
from kvstore.disk.interface import DiskPageIndex
from kvstore.events.changes import CacheChange
from kvstore.keys import namespace_root, split_keys
from kvstore.server.events import (
    CallReceived,
    CloseConnection,
    Connected,
    Disconnected,
    DivideArena,
    RouterMessageReceived,
    SendReply,
    StoreCommand,
    StoreEvent,
    StoreStats,
    TellRouter,
    WriterDied,
)
from kvstore.server.head_of_line import HeadOfLine
from kvstore.server.leases import ClientProcess, Lease
from kvstore.server.tier_manager import TierManager, TierResult

MAX_TICKETS = 16_384
"""Per process: a heartbeat lists them all in one packet."""


@dataclass(slots=True)
class _Counters:
    hits: int = 0
    misses: int = 0
    sealed: int = 0
    duplicates: int = 0
    evictions: int = 0  # of arenas divided otherwise before
    expired: int = 0
    refusals: int = 0


class StoreState:
    """The one owner of the arena's slots, and the only one who says what may be read and written when."""

    def __init__(
        self, me: Peer, settings: StoreConfig, disk: DiskPageIndex, admit_after: int, heartbeat: float, silence: float
    ) -> None:
        """Pages used `admit_after` times are written to the disk. `heartbeat` and `silence` in seconds."""
        self._me = me
        self._settings = settings
        self._hold_seconds = settings.hold_ms / 1_000
        self._admit_after = admit_after
        self._heartbeat, self._silence = heartbeat, silence
        self._next_beat = float("-inf")
        self._namespace: Namespace | None = None
        self._page_bytes = 0
        self._disk = disk
        self._fetch_numbers = itertools.count(1)
        self._tiers = self._new_tiers(0)
        self._strangers: dict[int, int] = {}  # connection that has not attached yet → pid
        self._attached: dict[int, ClientProcess] = {}  # by connection
        self._processes: dict[tuple[int, str], ClientProcess] = {}
        self._line = HeadOfLine(silence)
        self._ended = False  # a ticket has ended since what nobody wants was last given up
        self._count = _Counters()

    def _new_tiers(self, slots: int) -> TierManager:
        admission = AdmissionFilter(self._admit_after, 4 * slots + 1)
        return TierManager(
            self._settings, self._disk, admission, slots, self._page_bytes, self._heartbeat, self._silence,
            self._fetch_numbers,
        )  # fmt: skip

    # --- what happens ---------------------------------------------------------------------------------------------

    def handle(self, event: StoreEvent, now: float) -> list[StoreCommand]:
        """Take one event. What a worker says out of turn costs it its connection, and nobody else anything."""
        commands = self._handle(event, now)
        if self._ended:
            self._ended = False
            commands += self._tell(self._tiers.prune(now))
        return commands

    def _handle(self, event: StoreEvent, now: float) -> list[StoreCommand]:
        match event:
            case Connected(connection=connection, pid=pid):
                self._strangers[connection] = pid
                return []
            case CallReceived(connection=connection, call=call):
                try:
                    return self._hear(connection, call, now)
                except ProtocolError as error:
                    self._count.refusals += 1
                    refusal = SendReply(connection, AttachRefused(error.reason, str(error)))
                    return [refusal, CloseConnection(connection), *self._disconnect(connection)]
            case Disconnected(connection=connection):
                return self._disconnect(connection)
            case WriterDied(pid=pid):
                return self._end_processes([process for process in self._processes.values() if process.pid == pid])
            case Tick(paused=paused):
                return self._tick(now, paused)
            case RouterMessageReceived(message=message, router=router):
                return self._router_said(message, router, now)
            case _:
                return self._tell(self._tiers.handle(event, now))

    def _router_said(self, message: ToStore, router: str, now: float) -> list[StoreCommand]:
        match message:
            case PinPages():
                try:
                    answer, turn = self._tiers.pin(message, router, now)
                except MalformedMessage:
                    return []
                return [TellRouter(answer, router), *self._tell(turn)]
            case UnpinPages(pin=pin):
                self._tiers.pins.unpin(router, pin)
                return []
            case _:
                return []

    def _hear(self, connection: int, call: StoreCall, now: float) -> list[StoreCommand]:
        if isinstance(call, Attach):
            return self._attach(connection, call)
        process = self._attached.get(connection)
        if process is None:
            if connection in self._strangers:
                raise MalformedMessage(f"{type(call).__name__} before Attach")
            return []  # said before it learnt that we have closed the connection
        match call:
            case Reserve():
                return self._reserve(process, call, now)
            case Seal():
                return self._seal(process, call)
            case Acquire():
                return self._acquire(process, call, now)
            case Promote():
                return self._promote(process, call, now)
            case Release():
                return self._reply(process, self._release(process, call))
            case EndLease():
                self._line.leave(process, call.ticket)
                ticket = process.tickets.get(call.ticket)
                return self._end([ticket]) if ticket else []
            case PageCorrupt():
                return self._corrupt(process, call)
            case LeaseHeartbeat():
                return self._reconcile(process, call, now)

    # --- processes ------------------------------------------------------------------------------------------------

    def _attach(self, connection: int, call: Attach) -> list[StoreCommand]:
        pid = self._strangers.get(connection)
        if pid is None:
            raise MalformedMessage("Attach on a connection that is attached already")
        if call.protocol != PROTOCOL_VERSION:
            raise Incompatible(f"protocol {call.protocol} is not this store's {PROTOCOL_VERSION}; update the older one")
        divided = self._divide(call.namespace, call.page_bytes)
        name = (pid, call.peer.incarnation)
        process = self._processes.setdefault(name, ClientProcess(*name))
        commands: list[StoreCommand] = []
        if (old := process.connection) is not None:
            # It has given up a connection whose end we have not seen yet.
            commands = [CloseConnection(old), *self._disconnect(old)]
            self._processes[name] = process
        del self._strangers[connection]
        self._attached[connection] = process
        process.connection = connection
        attached = SendReply(connection, Attached(self._me, self._pages.slots, self._page_bytes))
        return [*divided, *commands, attached]

    def _divide(self, namespace: Namespace, page_bytes: int) -> list[StoreCommand]:
        """Cut the arena into slots for the first who attaches, or anew for another kind of page when nobody is left
        who reads or writes the old ones."""
        if (namespace, page_bytes) == (self._namespace, self._page_bytes):
            return []
        if self._processes or not self._tiers.idle:
            raise Incompatible(
                f"this store serves pages of {self._page_bytes} bytes of {self._namespace}, not of {page_bytes} bytes "
                f"of {namespace}; run one store and its workers per model"
            )
        arena_bytes = self._settings.arena_bytes
        if page_bytes > arena_bytes:
            raise Incompatible(
                f"one page of {page_bytes} bytes exceeds the arena of {arena_bytes}; raise store.arena_bytes"
            )
        self._count.evictions += self._pages.evictions
        self._namespace, self._page_bytes = namespace, page_bytes
        self._tiers = self._new_tiers(arena_bytes // page_bytes)
        self._pages.clear()  # says so to those who knew of other pages
        return [DivideArena(page_bytes), *self._tiers.open_disk(namespace_root(namespace), page_bytes)]

    def _disconnect(self, connection: int) -> list[StoreCommand]:
        self._strangers.pop(connection, None)
        process = self._attached.pop(connection, None)
        if process is None:
            return []
        process.connection = None
        self._line.keep(process, ())
        for ticket in list(process.tickets.values()):
            self._end_lease_parts(ticket)
            if not ticket.reservations:
                del process.tickets[ticket.number]
        if not process.tickets:
            del self._processes[process.pid, process.incarnation]
        return []

    def _end_processes(self, processes: list[ClientProcess]) -> list[StoreCommand]:
        commands: list[StoreCommand] = []
        for process in processes:
            if process.connection is not None:
                commands.append(CloseConnection(process.connection))
                commands += self._disconnect(process.connection)
            commands += self._end(list(process.tickets.values()))
            self._processes.pop((process.pid, process.incarnation), None)
        return commands

    def _reconcile(self, process: ClientProcess, call: LeaseHeartbeat, now: float) -> list[StoreCommand]:
        listed = set(call.tickets)
        self._line.keep(process, listed)
        for ticket in process.tickets.values():
            ticket.expires = now + self._hold_seconds
        return self._end([ticket for number, ticket in process.tickets.items() if number not in listed])

    # --- writing --------------------------------------------------------------------------------------------------

    def _reserve(self, process: ClientProcess, call: Reserve, now: float) -> list[StoreCommand]:
        """A page that is sealed already is held by the ticket from now on, as one that it seals itself may be."""
        if len(call.parent) not in (0, KEY_BYTES):
            raise MalformedMessage(f"a parent key of {len(call.parent)} bytes")
        ticket = self._new_ticket(process, call.ticket, call.keys, now, reserving=True)
        allowed = max(1, int(self._pages.slots * self._settings.writer_share))
        missing = self._pages.missing(ticket.keys)
        if process.reserved + missing > allowed:
            return self._reply(process, NotReserved(call.ticket, "quota"))
        if missing and call.prompt and self._line.bars(process, call.prompt, now):
            return self._reply(process, NotReserved(call.ticket, "behind"))
        ticket.prompt = call.prompt
        result = self._pages.reserve(process, call.parent, ticket.keys, partial=call.partial)
        if isinstance(result, str):
            behind = result == "full" and call.prompt and not self._line.refused(process, call.prompt, now)
            return self._reply(process, NotReserved(call.ticket, "behind" if behind else result))
        self._line.granted(process, call.prompt)
        for index, each in enumerate(result):
            if isinstance(each, HostPage):
                ticket.holds[index] = each
            else:
                ticket.reservations[index] = each
        process.tickets[ticket.number] = ticket
        slots = tuple(None if isinstance(each, HostPage) else each.slot for each in result)
        return self._reply(process, Reserved(call.ticket, slots))

    def _seal(self, process: ClientProcess, call: Seal) -> list[StoreCommand]:
        ticket = process.tickets.get(call.ticket)
        end = call.first + len(call.checksums)
        if ticket is None or not ticket.reserving:
            raise MalformedMessage(f"Seal for ticket {call.ticket}, under which nothing is reserved")
        if not call.checksums or end > len(ticket.keys):
            raise MalformedMessage(f"Seal of pages {call.first} to {end} of a ticket for {len(ticket.keys)}")
        if not ticket.sealed.isdisjoint(range(call.first, end)):
            raise MalformedMessage(f"Seal of pages {call.first} to {end}, of which some are sealed already")
        new: list[HostPage] = []
        detached: list[int] = []
        for index, checksum in enumerate(call.checksums, call.first):
            ticket.sealed.add(index)
            reservation = ticket.reservations.pop(index, None)
            if reservation is None:
                continue  # was sealed when it should have been reserved, and has been held since
            page = self._pages.seal(reservation, checksum, call.hold)
            if page is None:
                detached.append(index)
                continue
            if call.hold:
                ticket.holds[index] = page
            if page.slot != reservation.slot:
                self._count.duplicates += 1
                continue
            self._count.sealed += 1
            new.append(page)
        # A page whose chain has been dropped can't be sealed; nor can those after it, which hang from it.
        count = (detached[0] if detached else end) - call.first
        commands = self._reply(process, Sealed(call.ticket, call.first, count)) if count else []
        if detached:
            commands += self._reply(process, PagesUnavailable(call.ticket, detached[0]))
        return commands + self._tell(self._tiers.sealed(new))

    # --- reading --------------------------------------------------------------------------------------------------

    def _acquire(self, process: ClientProcess, call: Acquire, now: float) -> list[StoreCommand]:
        """Without `wait`, pages after the first that is missing are of no use and not held."""
        if len(call.parent) not in (0, KEY_BYTES):
            raise MalformedMessage(f"a parent key of {len(call.parent)} bytes")
        ticket = self._new_ticket(process, call.ticket, call.keys, now, reserving=False)
        ticket.wait, ticket.parent, ticket.partial = call.wait, call.parent, call.partial
        # Our own pages are found without asking; a fetch from ourselves would wait for itself.
        ticket.sources = tuple(source for source in call.sources if source.store != self._me.incarnation)
        process.tickets[ticket.number] = ticket
        found: list[PageAt] = []
        missing: list[int] = []
        for index, key in enumerate(ticket.keys):
            page = self._pages.find(key)
            if page is None:
                missing.append(index)
                if not call.wait:
                    break
                self._tiers.waiting.add(ticket, index)
            else:
                self._pages.hold(page)
                ticket.holds[index] = page
                found.append(PageAt(index, page.slot, page.checksum))
        self._count.hits += len(found)
        self._count.misses += len(ticket.keys) - len(found)
        commands = self._reply(process, PagesReady(call.ticket, tuple(found))) if found else []
        if call.wait:
            return commands + self._tell(self._tiers.hand_off(ticket, now))
        commands += self._tell(self._tiers.used(ticket.keys[: missing[0]] if missing else ticket.keys))
        ticket.reached = len(found)
        if missing:
            below = self._tiers.below(ticket, missing[0])
            reply = (
                LowerTierHits(call.ticket, missing[0], tuple(below))
                if below
                else PagesUnavailable(call.ticket, missing[0])
            )
            commands += self._reply(process, reply)
        return commands

    def _promote(self, process: ClientProcess, call: Promote, now: float) -> list[StoreCommand]:
        ticket = process.tickets.get(call.ticket)
        if ticket is None:
            return []  # it ended meanwhile, and its owner will learn so
        if ticket.reserving or ticket.wait or call.until > len(ticket.keys):
            raise MalformedMessage(f"Promote of {call.until} pages of ticket {call.ticket} for {len(ticket.keys)}")
        if ticket.waits:
            raise MalformedMessage(f"a second Promote of ticket {call.ticket}")
        return self._tell(self._tiers.promote(ticket, call.until, now))

    def _release(self, process: ClientProcess, call: Release) -> Released:
        """A page that was dropped while it was held, as corrupt or with its chain, does not count as held."""
        ticket = process.tickets.get(call.ticket)
        if ticket is None:
            return Released(call.ticket, call.indices, (False,) * len(call.indices))
        for index in call.indices:
            self._check_index(ticket, index)
        held: list[bool] = []
        for index in call.indices:
            page = ticket.holds.pop(index, None)
            held.append(page is not None and not page.dropped)
            if page is not None:
                self._pages.unhold(page)
        return Released(call.ticket, call.indices, tuple(held))

    def _corrupt(self, process: ClientProcess, call: PageCorrupt) -> list[StoreCommand]:
        """Believed only of a page that the ticket still holds: without a hold the reader may have read another one."""
        ticket = process.tickets.get(call.ticket)
        if ticket is None:
            return []
        self._check_index(ticket, call.index)
        page = ticket.holds.get(call.index)
        return [] if page is None else self._tell(self._tiers.drop(page))

    # --- tickets --------------------------------------------------------------------------------------------------

    def _new_ticket(self, process: ClientProcess, number: int, packed: bytes, now: float, reserving: bool) -> Lease:
        """A ticket that is not registered yet. Raises MalformedMessage."""
        keys = split_keys(packed)
        if not keys or len(set(keys)) != len(keys):
            raise MalformedMessage(f"ticket {number} is for {len(keys)} keys, {len(set(keys))} of them different")
        if number in process.tickets:
            raise MalformedMessage(f"ticket {number} is in use")
        if len(process.tickets) >= MAX_TICKETS:
            raise MalformedMessage(f"more than {MAX_TICKETS} tickets; forget those that are done with")
        return Lease(number, keys, False, process, now + self._hold_seconds, now, reserving)

    def _check_index(self, ticket: Lease, index: int) -> None:
        if not 0 <= index < len(ticket.keys):
            raise MalformedMessage(f"index {index} of ticket {ticket.number}, which is for {len(ticket.keys)} keys")

    def _end_lease_parts(self, ticket: Lease) -> None:
        """End the holds and waits of a ticket; its reservations stay."""
        self._ended |= bool(ticket.waits)
        self._tiers.waiting.remove(ticket)
        for page in ticket.holds.values():
            self._pages.unhold(page)
        ticket.holds.clear()

    def _end(self, tickets: list[Lease]) -> list[StoreCommand]:
        """End tickets with all that is under them, and tell those who wait for what will not be made now."""
        unmade: list[bytes] = []
        for ticket in tickets:
            self._end_lease_parts(ticket)
            for index in sorted(ticket.reservations, reverse=True):
                unmade += [ticket.keys[index], *self._pages.abort(ticket.reservations.pop(index))]
            del ticket.owner.tickets[ticket.number]
        return self._tell(self._tiers.unmade(unmade)) if unmade else []

    def _tick(self, now: float, paused: float) -> list[StoreCommand]:
        if paused:
            self._line.pause(paused)
            for ticket in self._tickets():
                ticket.expires += paused  # nobody could be heard meanwhile
        commands = self._tell(self._tiers.tick(now, paused))
        if now < self._next_beat:
            return commands
        self._next_beat = now + self._heartbeat
        return (
            commands
            + self._expire(now)
            + [
                SendReply(connection, StoreHeartbeat(tuple(process.tickets)))
                for connection, process in self._attached.items()
            ]
        )

    def _expire(self, now: float) -> list[StoreCommand]:
        commands: list[StoreCommand] = []
        for ticket in self._tickets():
            if now < ticket.expires or not (ticket.holds or ticket.waits):
                continue
            self._count.expired += len(ticket.holds)
            if ticket.waits:
                commands += self._reply(ticket.owner, PagesUnavailable(ticket.number, min(ticket.waits)))
            self._end_lease_parts(ticket)
        return commands

    def _tell(self, turn: TierResult) -> list[StoreCommand]:
        """The orders of a turn, and the replies to the tickets that it concerns."""
        commands: list[StoreCommand] = [*turn.orders]
        for ticket, pages in turn.granted.items():
            arrived = tuple(PageAt(index, page.slot, page.checksum) for index, page in pages)
            commands += self._reply(ticket.owner, PagesReady(ticket.number, arrived))
        for ticket, index in turn.refused:
            commands += self._reply(ticket.owner, PagesUnavailable(ticket.number, index))
        return commands

    def _reply(self, process: ClientProcess, reply: StoreReply) -> list[StoreCommand]:
        return [] if process.connection is None else [SendReply(process.connection, reply)]

    def _tickets(self) -> Iterable[Lease]:
        return (ticket for process in self._processes.values() for ticket in process.tickets.values())

    # --- what can be read off -------------------------------------------------------------------------------------

    @property
    def _pages(self) -> HostPagePool:
        return self._tiers.pages

    @property
    def page_size(self) -> int:
        """Tokens per page; 0 while nobody has attached."""
        return self._namespace.page_size if self._namespace else 0

    def needs_proof(self, pid: int) -> bool:
        """Whether the end of process `pid` matters still: something is reserved by it, or it is attached."""
        return any(process.pid == pid for process in self._processes.values())

    def drain_events(self) -> list[tuple[Medium, list[CacheChange]]]:
        """What has become findable on each tier or stopped being so since the last call, in order."""
        changes: list[tuple[Medium, list[CacheChange]]] = [
            ("CPU", self._pages.drain_events()),
            ("DISK", self._disk.drain_events()),
        ]
        return [each for each in changes if each[1]]

    def waits(self) -> Iterator[WaitEdge]:
        """Yield the edges of the wait-for graph that this store knows; for tests."""
        store = self._me.incarnation
        tickets = list(self._tickets())
        yield from self._tiers.waits(store, tickets)
        having = {(t.owner.incarnation, t.prompt) for t in tickets if t.prompt and (t.holds or t.reservations)}
        waiting = set(having)
        if (head := self._line.waiting) is not None:
            place = (head[0].incarnation, head[1])
            yield ("line", store), ("slots", *place)
            waiting.add(place)
        yield from ((("slots", *one), ("place", *other)) for one in waiting for other in having if other != one)

    def snapshot(self) -> list[PageSegment]:
        """Every page that can be found, parents first, on each tier."""
        return self._tiers.snapshot()

    def load(self) -> LoadReport:
        """For the heartbeat: a slot counts as free when a page could be written to it now."""
        free = self._pages.free + self._pages.evictable
        return LoadReport(pages_free=free, pages_total=self._pages.slots, tiers=self._tiers.speeds)

    def pins(self, router: str = "") -> tuple[AttemptHeld, ...]:
        """For the heartbeat to a router: what it has pinned."""
        return self._tiers.pins.listed(router)

    def stats(self, now: float) -> StoreStats:
        pages, count = self._pages, self._count
        away = (process for process in self._processes.values() if process.connection is None)
        return StoreStats(
            slots=pages.slots,
            page_bytes=self._page_bytes,
            free=pages.free,
            evictable=pages.evictable,
            sealed=pages.sealed,
            reserved=pages.reserved,
            unproven=sum(process.reserved for process in away),
            held=pages.held,
            unlisted=pages.unlisted,
            connections=len(self._attached),
            tickets=sum(1 for _ in self._tickets()),
            waits=len(self._tiers.waiting),
            oldest_hold=max((now - ticket.since for ticket in self._tickets() if ticket.holds), default=0.0),
            pins=len(self._tiers.pins),
            pinned_bytes=self._tiers.pins.bytes,
            hits=count.hits,
            misses=count.misses,
            sealed_total=count.sealed,
            duplicates=count.duplicates,
            evictions=count.evictions + pages.evictions,
            expired=count.expired,
            corrupt=self._tiers.corrupt,
            refusals=count.refusals,
            loads=self._tiers.loads.stats(),
            serving=self._tiers.server.stats(),
            disk=self._disk.stats(),
        )

    def validate(self) -> None:
        """Check every invariant; for tests."""
        tickets = list(self._tickets())
        self._tiers.validate(tickets)
        for ticket in tickets:
            assert ticket.owner.tickets[ticket.number] is ticket
            assert ticket.owner.connection is not None or not (ticket.holds or ticket.waits), "away, yet holding"
            assert all(reservation.writer is ticket.owner for reservation in ticket.reservations.values())
        assert all(self._processes[p.pid, p.incarnation] is p for p in self._attached.values())
        assert all(p.connection is not None or p.reserved for p in self._processes.values())
