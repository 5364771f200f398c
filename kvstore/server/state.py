"""The store's knowledge and decisions: attached processes, and what each lease reserves, holds and waits for.

A worker's process is named by its pid, which the kernel vouches for, and its incarnation. Leases belong to the
process, not to the connection:

    attached ──Disconnected──▶ away ──attaches again──▶ attached
        │      holds and waits end; │ reservations stay,
        │      it may be writing    │ for it may be writing
        └────────WriterDied─────────┴──▶ everything ends: the kernel has said that the process is gone

So a reserved slot is freed by its writer's Seal or EndLease or by that proof, and never by time. Holds do end by time,
because a reader believes its bytes only after `Released` has said that the hold lasted.

Every wait ends: by PagesReady; by PagesUnavailable, when the page's writer gives up or dies or the waiting lease
expires; or by its own EndLease. Waiting for a key without a reservation is allowed: the router knows which worker is
going to write it.

A lease lives until its owner ends it, by EndLease or by leaving it out of its heartbeat. (The socket keeps the order,
so the owner is done with an unlisted lease.) It also ends with the death of its process, or, when nothing is reserved
under it, with the connection.

What is not in the arena may lie below: on this node's disk, or in another store. A hand-off (`Acquire` with `wait`) is
always delivered; of a cached prefix the worker is told what lies `LowerTierHits`, and says what to `Promote`.

Pure: events and the time in, commands out. Pages, their slots and tiers are `kvstore.server.tier_manager`'s matter.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

from baton import messages as msg
from baton import store_protocol as protocol
from baton.clock import Tick
from baton.config import StoreConfig
from baton.errors import Incompatible, MalformedMessage, ProtocolError
from baton.waits import WaitEdge
from kvstore.arena.host_page_pool import HostPage, HostPagePool
from kvstore.arena.shared_slots import MARK_BYTES, LeaveRing, name_in_marks
from kvstore.disk.admission_filter import AdmissionFilter
from kvstore.disk.index import DiskIndex
from kvstore.events.changes import CacheChange
from kvstore.keys import namespace_root, split_keys
from kvstore.server import events
from kvstore.server.head_of_line import HeadOfLine
from kvstore.server.leases import ClientProcess, Lease, SharedSlots
from kvstore.server.tier_manager import TierManager, TierResult

MAX_LEASES = 16_384
"""Per process: a heartbeat lists them all in one packet."""


class StoreState:
    """The one owner of the arena's slots, which decides which process may read and write them, and when."""

    def __init__(
        self, me: msg.Peer, settings: StoreConfig, disk: DiskIndex, admit_after: int, heartbeat: float, silence: float
    ) -> None:
        """Pages used `admit_after` times are written to the disk. `heartbeat` and `silence` in seconds."""
        self._me = me
        self._settings = settings
        self._hold_seconds = settings.lease_ms / 1_000
        self._admit_after = admit_after
        self._heartbeat, self._silence = heartbeat, silence
        self._next_beat = float("-inf")
        self._namespace: msg.Namespace | None = None
        self._page_bytes = 0
        self._disk = disk
        self._fetch_numbers = itertools.count(1)
        self._tiers = self._new_tiers(0)
        self._strangers: dict[int, int] = {}  # connection that has not attached yet → pid
        self._attached: dict[int, ClientProcess] = {}  # by connection
        self._processes: dict[tuple[int, str], ClientProcess] = {}
        self._shared: dict[bytes, SharedSlots] = {}  # by name
        self._line = HeadOfLine(silence)
        self._ended = False  # a lease has ended since unwanted transfers were last given up
        self._count = events.StoreCounters()  # evictions: of arenas divided otherwise before

    def _new_tiers(self, slots: int) -> TierManager:
        admission = AdmissionFilter(self._admit_after, 4 * slots + 1)
        return TierManager(
            self._settings, self._disk, admission, slots, self._page_bytes, self._heartbeat, self._silence,
            self._fetch_numbers,
        )  # fmt: skip

    # --- what happens ---------------------------------------------------------------------------------------------

    def handle(self, event: events.StoreEvent, now: float) -> list[events.StoreCommand]:
        """Take one event. A worker that breaks the protocol loses its connection, and no other one is affected."""
        commands = self._handle(event, now)
        if self._ended:
            self._ended = False
            commands += self._tell(self._tiers.prune(now))
        return commands

    def _handle(self, event: events.StoreEvent, now: float) -> list[events.StoreCommand]:
        match event:
            case events.Connected(connection=connection, pid=pid):
                self._strangers[connection] = pid
                return []
            case events.CallReceived(connection=connection, call=call):
                try:
                    return self._hear(connection, call, now)
                except ProtocolError as error:
                    self._count.refusals += 1
                    refusal = events.SendReply(connection, protocol.AttachRefused(error.reason, str(error)))
                    return [refusal, events.CloseConnection(connection), *self._disconnect(connection)]
            case events.Disconnected(connection=connection):
                return self._disconnect(connection)
            case events.WriterDied(pid=pid):
                return self._end_processes([process for process in self._processes.values() if process.pid == pid])
            case Tick(paused=paused):
                return self._tick(now, paused)
            case events.RouterMessageReceived(message=message, router=router):
                return self._router_message(message, router, now)
            case _:
                return self._tell(self._tiers.handle(event, now))

    def _router_message(self, message: msg.ToStore, router: str, now: float) -> list[events.StoreCommand]:
        match message:
            case msg.PinPages():
                try:
                    answer, turn = self._tiers.pin(message, router, now)
                except MalformedMessage:
                    return []
                return [events.TellRouter(answer, router), *self._tell(turn)]
            case msg.UnpinPages(pin=pin):
                self._tiers.pins.unpin(router, pin)
                return []
            case _:
                return []

    def _hear(self, connection: int, call: protocol.StoreCall, now: float) -> list[events.StoreCommand]:
        if isinstance(call, protocol.Attach):
            return self._attach(connection, call)
        process = self._attached.get(connection)
        if process is None:
            if connection in self._strangers:
                raise MalformedMessage(f"{type(call).__name__} before Attach")
            return []  # said before it learnt that we have closed the connection
        match call:
            case protocol.Reserve():
                return self._reserve(process, call, now)
            case protocol.ShareSlots():
                return self._share(process, call, now)
            case protocol.Seal():
                return self._seal(process, call)
            case protocol.Acquire():
                return self._acquire(process, call, now)
            case protocol.Promote():
                return self._promote(process, call, now)
            case protocol.Release():
                return self._reply(process, self._release(process, call))
            case protocol.EndLease():
                self._line.leave(process, call.lease)
                lease = process.leases.get(call.lease)
                return self._end([lease]) if lease else []
            case protocol.PageCorrupt():
                return self._corrupt(process, call)
            case protocol.LeaseHeartbeat():
                return self._reconcile(process, call, now)

    # --- processes ------------------------------------------------------------------------------------------------

    def _attach(self, connection: int, call: protocol.Attach) -> list[events.StoreCommand]:
        pid = self._strangers.get(connection)
        if pid is None:
            raise MalformedMessage("Attach on a connection that is attached already")
        if call.protocol != msg.PROTOCOL_VERSION:
            own = msg.PROTOCOL_VERSION
            raise Incompatible(f"protocol {call.protocol} is not this store's {own}; update the older one")
        divided = self._divide(call.namespace, call.page_bytes)
        name = (pid, call.peer.incarnation)
        process = self._processes.setdefault(name, ClientProcess(*name))
        commands: list[events.StoreCommand] = []
        if (old := process.connection) is not None:
            # It has given up a connection whose end we have not seen yet.
            commands = [events.CloseConnection(old), *self._disconnect(old)]
            self._processes[name] = process
        del self._strangers[connection]
        self._attached[connection] = process
        process.connection = connection
        attached = events.SendReply(connection, protocol.Attached(self._me, self._pages.slots, self._page_bytes))
        return [*divided, *commands, attached]

    def _divide(self, namespace: msg.Namespace, page_bytes: int) -> list[events.StoreCommand]:
        """Cut the arena into slots for the first worker that attaches, or anew for another kind of page when no
        process is left that reads or writes the old ones."""
        if (namespace, page_bytes) == (self._namespace, self._page_bytes):
            return []
        if self._processes or not self._tiers.idle:
            assert self._namespace is not None
            mismatch = (
                msg.difference(namespace, self._namespace) or f"page_bytes is {page_bytes}, not {self._page_bytes}"
            )
            raise Incompatible(f"{mismatch}; run one store and its workers per model")
        host_cache_bytes = self._settings.host_cache_bytes
        if page_bytes % namespace.kv_heads:
            raise MalformedMessage(f"a page of {page_bytes} bytes can't have {namespace.kv_heads} KV heads")
        if page_bytes > host_cache_bytes:
            raise Incompatible(
                f"one page of {page_bytes} bytes exceeds the arena of {host_cache_bytes}; raise store.host_cache_bytes"
            )
        self._count.evictions += self._pages.evictions
        self._namespace, self._page_bytes = namespace, page_bytes
        self._tiers = self._new_tiers(host_cache_bytes // page_bytes)
        self._pages.clear()  # readers of events are told that the other pages are gone
        opened = self._tiers.open_disk(namespace_root(namespace), page_bytes, namespace.kv_heads)
        return [events.DivideArena(page_bytes, namespace.kv_heads), *opened]

    def _disconnect(self, connection: int) -> list[events.StoreCommand]:
        self._strangers.pop(connection, None)
        process = self._attached.pop(connection, None)
        if process is None:
            return []
        process.connection = None
        self._line.keep(process, ())
        for lease in list(process.leases.values()):
            self._end_lease_parts(lease)
            if not lease.reservations and lease.shared is None:
                del process.leases[lease.number]
        if not process.leases:
            del self._processes[process.pid, process.incarnation]
        return []

    def _end_processes(self, processes: list[ClientProcess]) -> list[events.StoreCommand]:
        commands: list[events.StoreCommand] = []
        for process in processes:
            if process.connection is not None:
                commands.append(events.CloseConnection(process.connection))
                commands += self._disconnect(process.connection)
            for lease in process.leases.values():
                if lease.shared is not None and lease.shared.granted:  # others may wait for what it would have written
                    header = lease.shared.reservations[0].slot
                    commands.append(LeaveRing(header, lease.place, name_in_marks(lease.keys[0])))
            commands += self._end(list(process.leases.values()))
            self._processes.pop((process.pid, process.incarnation), None)
        return commands

    def _reconcile(
        self, process: ClientProcess, call: protocol.LeaseHeartbeat, now: float
    ) -> list[events.StoreCommand]:
        listed = set(call.leases)
        self._line.keep(process, listed)
        for lease in process.leases.values():
            lease.expires = now + self._hold_seconds
        return self._end([lease for number, lease in process.leases.items() if number not in listed])

    # --- writing --------------------------------------------------------------------------------------------------

    def _reserve(self, process: ClientProcess, call: protocol.Reserve, now: float) -> list[events.StoreCommand]:
        """A page that is sealed already is held by the lease from now on, as one that it seals itself may be."""
        if len(call.parent) not in (0, msg.KEY_BYTES):
            raise MalformedMessage(f"a parent key of {len(call.parent)} bytes")
        lease = self._new_lease(process, call.lease, call.keys, now, reserving=True)
        allowed = max(1, int(self._pages.slots * self._settings.writer_share))
        missing = self._pages.missing(lease.keys)
        if process.reserved + missing > allowed:
            return self._reply(process, protocol.NotReserved(call.lease, "quota"))
        if missing and call.prompt and self._line.bars(process, call.prompt, now):
            return self._reply(process, protocol.NotReserved(call.lease, "behind"))
        lease.prompt = call.prompt
        if call.apart:
            result = self._pages.reserve_apart(process, lease.keys)
        else:
            result = self._pages.reserve(process, call.parent, lease.keys, partial=call.partial)
        if isinstance(result, str):
            behind = result == "full" and call.prompt and not self._line.refused(process, call.prompt, now)
            return self._reply(process, protocol.NotReserved(call.lease, "behind" if behind else result))
        self._line.granted(process, call.prompt)
        for index, each in enumerate(result):
            if isinstance(each, HostPage):
                lease.holds[index] = each
            else:
                lease.reservations[index] = each
        process.leases[lease.number] = lease
        slots = tuple(None if isinstance(each, HostPage) else each.slot for each in result)
        return self._reply(process, protocol.Reserved(call.lease, slots))

    def _share(self, process: ClientProcess, call: protocol.ShareSlots, now: float) -> list[events.StoreCommand]:
        """Others have no use of slots for which a process is missing, so all hear of them at once."""
        lease = self._new_lease(process, call.lease, call.name, now, reserving=False)
        shared, slots = self._shared.get(call.name), call.slots
        if shared is not None and (len(shared.reservations), shared.members) != (slots, call.members):
            raise MalformedMessage(
                f"{slots} slots for {call.members}, of which others share {len(shared.reservations)}"
            )
        if call.place >= call.members or call.members * MARK_BYTES > self._page_bytes:
            raise MalformedMessage(
                f"place {call.place} of {call.members}, whose marks are to be in a slot of {self._page_bytes} bytes"
            )
        if shared is not None and shared.granted:
            return self._reply(process, protocol.NotReserved(call.lease, "full"))
        if process.reserved + slots > max(1, int(self._pages.slots * self._settings.writer_share)):
            return self._reply(process, protocol.NotReserved(call.lease, "quota"))
        if shared is None:
            if (reservations := self._pages.reserve_loose(process, call.name, slots)) is None:
                return self._reply(process, protocol.NotReserved(call.lease, "full"))
            shared = self._shared[call.name] = SharedSlots(reservations, call.members)
        shared.leases.append(lease)
        process.leases[lease.number], lease.shared, lease.place = lease, shared, call.place
        if len(shared.leases) < shared.members:
            return []
        shared.granted = True
        granted = tuple(reservation.slot for reservation in shared.reservations)
        return [r for each in shared.leases for r in self._reply(each.owner, protocol.Reserved(each.number, granted))]

    def _leave_shared(self, lease: Lease, shared: SharedSlots) -> None:
        shared.leases.remove(lease)
        if not shared.leases:
            del self._shared[lease.keys[0]]
            for reservation in shared.reservations:
                self._pages.release(reservation)

    def _seal(self, process: ClientProcess, call: protocol.Seal) -> list[events.StoreCommand]:
        lease = process.leases.get(call.lease)
        end = call.first + len(call.checksums)
        if lease is None or not lease.reserving:
            raise MalformedMessage(f"Seal for lease {call.lease}, under which nothing is reserved")
        if not call.checksums or end > len(lease.keys):
            raise MalformedMessage(f"Seal of pages {call.first} to {end} of a lease for {len(lease.keys)}")
        if not lease.sealed.isdisjoint(range(call.first, end)):
            raise MalformedMessage(f"Seal of pages {call.first} to {end}, of which some are sealed already")
        new: list[HostPage] = []
        detached: list[int] = []
        for index, checksum in enumerate(call.checksums, call.first):
            lease.sealed.add(index)
            reservation = lease.reservations.pop(index, None)
            if reservation is None:
                continue  # was sealed when it should have been reserved, and has been held since
            page = self._pages.seal(reservation, checksum, call.hold)
            if page is None:
                detached.append(index)
                continue
            if call.hold:
                lease.holds[index] = page
            if page.slot != reservation.slot:
                self._count.duplicates += 1
                continue
            new.append(page)
        # A page whose chain has been dropped can't be sealed; nor can those after it, which hang from it.
        count = (detached[0] if detached else end) - call.first
        commands = self._reply(process, protocol.Sealed(call.lease, call.first, count)) if count else []
        if detached:
            commands += self._reply(process, protocol.PagesUnavailable(call.lease, detached[0]))
        return commands + self._tell(self._tiers.sealed(new))

    # --- reading --------------------------------------------------------------------------------------------------

    def _acquire(self, process: ClientProcess, call: protocol.Acquire, now: float) -> list[events.StoreCommand]:
        """Without `wait`, pages after the first that is missing are of no use and not held."""
        if len(call.parent) not in (0, msg.KEY_BYTES):
            raise MalformedMessage(f"a parent key of {len(call.parent)} bytes")
        lease = self._new_lease(process, call.lease, call.keys, now, reserving=False)
        lease.wait, lease.parent, lease.partial, lease.apart = call.wait, call.parent, call.partial, call.apart
        # Our own pages are found without asking; a fetch from ourselves would wait for itself.
        lease.sources = tuple(source for source in call.sources if source.store != self._me.incarnation)
        process.leases[lease.number] = lease
        hits: list[protocol.LeasedPage] = []
        missing: list[int] = []
        for index, key in enumerate(lease.keys):
            page = self._pages.find(key)
            if page is None:
                missing.append(index)
                if not call.wait:
                    break
                self._tiers.waiting.add_waiter(lease, index)
            else:
                self._pages.hold(page)
                lease.holds[index] = page
                hits.append(protocol.LeasedPage(index, page.slot, page.checksum))
        self._count.hits += len(hits)
        self._count.misses += len(lease.keys) - len(hits)
        commands = self._reply(process, protocol.PagesReady(call.lease, tuple(hits))) if hits else []
        if call.wait:
            return commands + self._tell(self._tiers.hand_off(lease, now))
        commands += self._tell(self._tiers.used(lease.keys[: missing[0]] if missing else lease.keys))
        lease.reached = len(hits)
        if missing:
            below = self._tiers.below(lease, missing[0])
            reply = (
                protocol.LowerTierHits(call.lease, missing[0], tuple(below))
                if below
                else protocol.PagesUnavailable(call.lease, missing[0])
            )
            commands += self._reply(process, reply)
        return commands

    def _promote(self, process: ClientProcess, call: protocol.Promote, now: float) -> list[events.StoreCommand]:
        lease = process.leases.get(call.lease)
        if lease is None:
            return []  # it ended meanwhile, and its owner will learn so
        if lease.reserving or lease.wait or call.until > len(lease.keys):
            raise MalformedMessage(f"Promote of {call.until} pages of lease {call.lease} for {len(lease.keys)}")
        if lease.waits:
            raise MalformedMessage(f"a second Promote of lease {call.lease}")
        return self._tell(self._tiers.promote(lease, call.until, now))

    def _release(self, process: ClientProcess, call: protocol.Release) -> protocol.Released:
        """A page that was dropped while it was held, as corrupt or with its chain, does not count as held."""
        lease = process.leases.get(call.lease)
        if lease is None:
            return protocol.Released(call.lease, call.indices, (False,) * len(call.indices))
        for index in call.indices:
            self._check_index(lease, index)
        held: list[bool] = []
        for index in call.indices:
            page = lease.holds.pop(index, None)
            held.append(page is not None and not page.dropped)
            if page is not None:
                self._pages.unhold(page)
        return protocol.Released(call.lease, call.indices, tuple(held))

    def _corrupt(self, process: ClientProcess, call: protocol.PageCorrupt) -> list[events.StoreCommand]:
        """Believed only of a page that the lease still holds: without a hold the reader may have read another one."""
        lease = process.leases.get(call.lease)
        if lease is None:
            return []
        self._check_index(lease, call.index)
        page = lease.holds.get(call.index)
        return [] if page is None else self._tell(self._tiers.drop(page))

    # --- leases --------------------------------------------------------------------------------------------------

    def _new_lease(self, process: ClientProcess, number: int, packed: bytes, now: float, reserving: bool) -> Lease:
        """A lease that is not registered yet. Raises MalformedMessage."""
        keys = split_keys(packed)
        if not keys or len(set(keys)) != len(keys):
            raise MalformedMessage(f"lease {number} is for {len(keys)} keys, {len(set(keys))} of them different")
        if number in process.leases:
            raise MalformedMessage(f"lease {number} is in use")
        if len(process.leases) >= MAX_LEASES:
            raise MalformedMessage(f"more than {MAX_LEASES} leases; forget those that are done with")
        return Lease(number, keys, False, process, now + self._hold_seconds, now, reserving)

    def _check_index(self, lease: Lease, index: int) -> None:
        if not 0 <= index < len(lease.keys):
            raise MalformedMessage(f"index {index} of lease {lease.number}, which is for {len(lease.keys)} keys")

    def _end_lease_parts(self, lease: Lease) -> None:
        """End the holds and waits of a lease; its reservations stay."""
        self._ended |= bool(lease.waits)
        self._tiers.waiting.remove_waiter(lease)
        for page in lease.holds.values():
            self._pages.unhold(page)
        lease.holds.clear()

    def _end(self, leases: list[Lease]) -> list[events.StoreCommand]:
        """End leases with all that is under them, and answer the waiters for pages that will not be written now."""
        unmade: list[bytes] = []
        for lease in leases:
            self._end_lease_parts(lease)
            for index in sorted(lease.reservations, reverse=True):
                unmade += [lease.keys[index], *self._pages.abort(lease.reservations.pop(index))]
            if lease.shared is not None:
                self._leave_shared(lease, lease.shared)
            del lease.owner.leases[lease.number]
        return self._tell(self._tiers.unmade(unmade)) if unmade else []

    def _tick(self, now: float, paused: float) -> list[events.StoreCommand]:
        if paused:
            self._line.pause(paused)
            for lease in self._leases():
                lease.expires += paused  # no heartbeat could be read meanwhile
        commands = self._tell(self._tiers.tick(now, paused))
        if now < self._next_beat:
            return commands
        self._next_beat = now + self._heartbeat
        return (
            commands
            + self._expire(now)
            + [
                events.SendReply(connection, protocol.StoreHeartbeat(tuple(process.leases)))
                for connection, process in self._attached.items()
            ]
        )

    def _expire(self, now: float) -> list[events.StoreCommand]:
        commands: list[events.StoreCommand] = []
        for lease in self._leases():
            if now < lease.expires or not (lease.holds or lease.waits):
                continue
            self._count.expired += len(lease.holds)
            if lease.waits:
                commands += self._reply(lease.owner, protocol.PagesUnavailable(lease.number, min(lease.waits)))
            self._end_lease_parts(lease)
        return commands

    def _tell(self, turn: TierResult) -> list[events.StoreCommand]:
        """The orders of a turn, and the replies to the leases that it concerns."""
        commands: list[events.StoreCommand] = [*turn.orders]
        for lease, pages in turn.granted.items():
            arrived = tuple(protocol.LeasedPage(index, page.slot, page.checksum) for index, page in pages)
            commands += self._reply(lease.owner, protocol.PagesReady(lease.number, arrived))
        for lease, index in turn.refused:
            commands += self._reply(lease.owner, protocol.PagesUnavailable(lease.number, index))
        return commands

    def _reply(self, process: ClientProcess, reply: protocol.StoreReply) -> list[events.StoreCommand]:
        return [] if process.connection is None else [events.SendReply(process.connection, reply)]

    def _leases(self) -> Iterable[Lease]:
        return (lease for process in self._processes.values() for lease in process.leases.values())

    # --- what can be read off -------------------------------------------------------------------------------------

    @property
    def _pages(self) -> HostPagePool:
        return self._tiers.pages

    @property
    def page_size(self) -> int:
        """Tokens per page; 0 before the first worker has attached."""
        return self._namespace.page_size if self._namespace else 0

    def needs_proof(self, pid: int) -> bool:
        """Whether the end of process `pid` matters still: something is reserved by it, or it is attached."""
        return any(process.pid == pid for process in self._processes.values())

    def drain_events(self) -> list[tuple[msg.Medium, list[CacheChange]]]:
        """What has become findable on each tier or stopped being so since the last call, in order."""
        changes: list[tuple[msg.Medium, list[CacheChange]]] = [
            ("CPU", self._pages.drain_events()),
            ("DISK", self._disk.drain_events()),
        ]
        return [each for each in changes if each[1]]

    def waits(self) -> Iterator[WaitEdge]:
        """Yield the edges of the wait-for graph that this store knows; for tests."""
        store = self._me.incarnation
        leases = list(self._leases())
        yield from self._tiers.waits(store, leases)
        having = {(t.owner.incarnation, t.prompt) for t in leases if t.prompt and (t.holds or t.reservations)}
        waiting = set(having)
        if (head := self._line.waiting) is not None:
            place = (head[0].incarnation, head[1])
            yield ("line", store), ("slots", *place)
            waiting.add(place)
        yield from ((("slots", *one), ("place", *other)) for one in waiting for other in having if other != one)

    def snapshot(self) -> list[msg.PageSegment]:
        """Every page that can be found, parents first, on each tier."""
        return self._tiers.snapshot()

    def load(self) -> msg.LoadReport:
        """For the heartbeat: a slot counts as free when a page could be written to it now."""
        free = self._pages.free + self._pages.evictable
        return msg.LoadReport(pages_free=free, pages_total=self._pages.slots, tiers=self._tiers.speeds)

    def pins(self, router: str = "") -> tuple[msg.AttemptHeld, ...]:
        """For the heartbeat to a router: what it has pinned."""
        return self._tiers.pins.listed(router)

    def stats(self, now: float) -> events.StoreStats:
        pages = self._pages
        away = (process for process in self._processes.values() if process.connection is None)
        return events.StoreStats(
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
            leases=sum(1 for _ in self._leases()),
            waits=len(self._tiers.waiting),
            oldest_hold=max((now - lease.since for lease in self._leases() if lease.holds), default=0.0),
            pins=len(self._tiers.pins),
            pinned_bytes=self._tiers.pins.bytes,
            corrupt=self._tiers.corrupt,
            loads=self._tiers.loads.stats(),
            serving=self._tiers.server.stats(),
            disk=self._disk.stats(),
            **asdict(replace(self._count, evictions=self._count.evictions + pages.evictions)),
        )

    def validate(self) -> None:
        leases = list(self._leases())
        self._tiers.validate(leases)
        for lease in leases:
            assert lease.owner.leases[lease.number] is lease
            assert lease.owner.connection is not None or not (lease.holds or lease.waits), "away, yet holding"
            assert all(reservation.writer is lease.owner for reservation in lease.reservations.values())
        sharing = {id(lease): lease for each in self._shared.values() for lease in each.leases}
        assert sharing == {id(lease): lease for lease in leases if lease.shared}
        assert all(self._processes[p.pid, p.incarnation] is p for p in self._attached.values())
        assert all(p.connection is not None or p.reserved for p in self._processes.values())
