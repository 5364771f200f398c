"""The owner of each slot of the arena.

    FREE ──reserve──▶ RESERVED(writer) ──seal──▶ SEALED ──hold──▶ held ──unhold──▶ SEALED ──evicted──▶ FREE
                          │ abort                   │ dropped               │ dropped, last unhold
                          └──────────▶ FREE         └──────▶ FREE           └──────▶ FREE

A key is in the tree while its page is sealed or a writer reserves it. Several writers may reserve one key, and the
first seal wins. Reservations and holds pin their key and everything above it. When a key loses its page, or its last
reservation without ever being sealed, its whole subtree goes with it. So no page is ever here without its prefix:

- sealed pages can no longer be found, at once; a slot that is held is free after the last hold;
- reservations below stay with their writers, which may still be writing, but are *detached*: sealing one only frees its
  slot.

A page that the store itself brings in from a lower tier may be *loose*: the page before it is not here, because the
worker has that one on its device. A loose page is never in the tree, so never an orphan, and lives as long as its
holds.

A *partial* page is the end of a prompt on its way to a decode worker, and hardly of use elsewhere. It is not published,
and it goes with its last hold.

Knows nothing of connections, leases or time: `kvstore.server.state` decides when, this what follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

from kvstore.arena.eviction import LeafFirstLru
from kvstore.arena.radix_tree import RadixNode, RadixTree
from kvstore.events.changes import CacheChange, ChangeLog
from kvstore.keys import START

NOWHERE = b"-"
"""Stands for a parent that is never here: what is claimed after it is loose."""


class HostPage:
    """A sealed page. `node` is none when it is loose or has been `dropped`: then it lives only as long as its holds."""

    __slots__ = ("checksum", "dropped", "holds", "key", "node", "slot")

    def __init__(self, key: bytes, slot: int, checksum: int, node: RadixNode[HostPageEntry] | None) -> None:
        self.key = key
        self.slot = slot
        self.checksum = checksum
        self.holds = 0
        self.dropped = False
        self.node: RadixNode[HostPageEntry] | None = node

    @property
    def partial(self) -> bool:
        """It goes with its last hold."""
        return self.node is not None and self.node.value.partial

    @property
    def apart(self) -> bool:
        """No page follows it."""
        return self.node is not None and self.node.value.apart


class SlotReservation:
    """A slot that `writer` may be writing to. `node` is none when it is detached or loose."""

    __slots__ = ("key", "node", "slot", "writer")

    def __init__(self, key: bytes, slot: int, writer: Hashable, node: RadixNode[HostPageEntry] | None) -> None:
        self.key = key
        self.slot = slot
        self.writer = writer
        self.node: RadixNode[HostPageEntry] | None = node


class HostPageEntry:
    """What a key in the tree stands for. `whole`: its page and all before it are sealed, so others were told of it."""

    __slots__ = ("apart", "page", "partial", "reservations", "whole")

    def __init__(self, partial: bool, apart: bool = False) -> None:
        self.page: HostPage | None = None
        self.partial = partial
        self.apart = apart
        self.reservations: list[SlotReservation] = []
        self.whole = False


class HostPagePool:
    """The owner of all slots of one arena."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.evictions = 0
        self.reserved = 0  # slots, detached reservations included
        self.unlisted = 0  # slots of pages that can't be found, dropped or loose, and are still held
        self.held = 0  # slots with at least one hold, dropped ones included
        self._free = list(range(slots - 1, -1, -1))
        self._tree: RadixTree[HostPageEntry] = RadixTree()
        self._lru: LeafFirstLru[HostPageEntry] = LeafFirstLru()
        self._changes = ChangeLog()

    @property
    def free(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Sealed pages that could make room now."""
        return len(self._lru)

    @property
    def sealed(self) -> int:
        """Pages that can be found."""
        return self.slots - len(self._free) - self.reserved - self.unlisted

    def find(self, key: bytes) -> HostPage | None:
        node = self._tree.find(key)
        return None if node is None else node.value.page

    def missing(self, keys: Sequence[bytes]) -> int:
        """For how many of `keys` a reservation would need a slot."""
        return sum(self.find(key) is None for key in keys)

    def reserve(
        self, writer: Hashable, parent: bytes, keys: Sequence[bytes], *, partial: bool = False
    ) -> list[HostPage | SlotReservation] | Literal["orphan", "full"]:
        """All or nothing: for each of `keys` its sealed page, now held once more, or a slot reserved for `writer`.
        `partial`: the last one is of a partial page.

        "orphan": `parent` is neither sealed nor reserved by the same writer, or one of `keys` is here after another
        parent, which no honest chain of keys brings about. "full": not enough slots are free or evictable."""
        above: RadixNode[HostPageEntry] | None = None
        if parent != START:
            above = self._tree.find(parent)
            if above is None or not _may_follow(above.value, writer):
                return "orphan"
        known = self._tree.match(keys, above)
        if any(key in self._tree for key in keys[len(known) :]):
            return "orphan"
        need = sum(node.value.page is None for node in known) + len(keys) - len(known)
        deepest = known[-1] if known else above
        if need > len(self._free) + len(self._lru) - (self._lru.exempted_by(deepest) if deepest else 0):
            return "full"
        if deepest is not None:
            self._lru.pin(deepest)  # lest making room takes what this chain stands on
        while len(self._free) < need:
            self._evict()
        result: list[HostPage | SlotReservation] = []
        last = above
        for place, key in enumerate(keys):
            if place < len(known):
                last = known[place]
                self._lru.pin(last)
            else:
                last = self._tree.add_node(key, last, HostPageEntry(partial and place == len(keys) - 1))
                self._lru.insert(last)
            result.append(self._take_slot(last, writer))
        if deepest is not None:
            self._lru.unpin(deepest)
        return result

    def reserve_apart(
        self, writer: Hashable, keys: Sequence[bytes]
    ) -> list[HostPage | SlotReservation] | Literal["full"]:
        """The same for keys of which none follows another one. Nothing is ever below them, and others are not told."""
        known = [node for key in keys if (node := self._tree.find(key)) is not None]
        need = len(keys) - sum(node.value.page is not None for node in known)
        for node in known:
            self._lru.pin(node)
        if need > len(self._free) + len(self._lru):
            for node in known:
                self._lru.unpin(node)
            return "full"
        while len(self._free) < need:
            self._evict()
        result: list[HostPage | SlotReservation] = []
        for key in keys:
            if (node := self._tree.find(key)) is None:
                node = self._tree.add_node(key, None, HostPageEntry(False, apart=True))
                self._lru.insert(node)
            result.append(self._take_slot(node, writer))
        return result

    def reserve_loose(self, writer: Hashable, name: bytes, count: int) -> list[SlotReservation] | None:
        """Slots that never become pages, all or nothing; `release` frees each. None: not enough are free or
        evictable."""
        if count > len(self._free) + len(self._lru):
            return None
        while len(self._free) < count:
            self._evict()
        self.reserved += count
        return [SlotReservation(name, self._free.pop(), writer, None) for _ in range(count)]

    def reserve_one(self, writer: Hashable, parent: bytes, key: bytes) -> SlotReservation | None:
        """A slot for a page that is not here, below `parent` if that is sealed or claimed by the same writer, else
        loose. None when no slot is free or evictable."""
        result = self.reserve(writer, parent, [key])
        if isinstance(result, list):
            (reservation,) = result
            assert isinstance(reservation, SlotReservation), "claimed a page that is here"
            return reservation
        loose = None if result == "full" else self.reserve_loose(writer, key, 1)
        return loose[0] if loose else None

    def seal_brought(self, reservation: SlotReservation, checksum: int) -> HostPage:
        """What was claimed has come. Returns the page, held once for the caller: the one that its key has now, or a
        loose one."""
        if reservation.node is not None:
            page = self.seal(reservation, checksum, hold=True)
            assert page is not None
            return page
        self._end(reservation)
        page = HostPage(reservation.key, reservation.slot, checksum, None)
        page.holds = 1
        self.held += 1
        self.unlisted += 1
        return page

    def seal(self, reservation: SlotReservation, checksum: int, hold: bool) -> HostPage | None:
        """The writer is done. Returns the page that its key has now (another writer's, if that was first), held once
        more with `hold`; none when the reservation is detached. In both those cases the slot is free again."""
        node = self._end(reservation)
        if node is None:
            self._free.append(reservation.slot)
            return None
        if (page := node.value.page) is not None:
            self._free.append(reservation.slot)
        else:
            page = node.value.page = HostPage(reservation.key, reservation.slot, checksum, node)
            self._list(node)
        if hold:
            self.hold(page)
        self._lru.unpin(node)
        return page

    def abort(self, reservation: SlotReservation) -> list[bytes]:
        """End a reservation: its writer gives up, or is gone. Return the keys without a writer because of it."""
        unmade = self.detach(reservation)
        self.release(reservation)
        return unmade

    def detach(self, reservation: SlotReservation) -> list[bytes]:
        """The first half of `abort`: nothing will come of it, but its writer may still write to the slot."""
        node, reservation.node = reservation.node, None
        if node is None:
            return []
        node.value.reservations.remove(reservation)
        if node.value.page is None and not node.value.reservations:
            return self._drop(node)
        self._lru.unpin(node)
        return []

    def release(self, reservation: SlotReservation) -> None:
        """The second half: its writer writes no more, and the slot is free."""
        assert reservation.node is None
        self.reserved -= 1
        self._free.append(reservation.slot)

    def being_written(self, key: bytes) -> bool:
        """Whether a writer has reserved a slot for this key, which is not sealed."""
        node = self._tree.find(key)
        return node is not None and node.value.page is None

    def writers(self, key: bytes) -> list[Hashable]:
        """Return the writers of the slots that are reserved for this key."""
        node = self._tree.find(key)
        return [] if node is None else [reservation.writer for reservation in node.value.reservations]

    def chain(self, page: HostPage) -> list[HostPage]:
        """This page and those before it, first one first, as far as they are sealed; empty if one is not."""
        chain: list[HostPage] = []
        node = page.node
        while node is not None:
            if (here := node.value.page) is None:
                return []
            chain.append(here)
            node = node.parent
        return chain[::-1]

    def hold(self, page: HostPage) -> None:
        """Keep a page that was just found, or is held, from being evicted, until as many calls of `unhold`."""
        assert page.node is not None or page.holds
        if page.node is not None:
            self._lru.pin(page.node)
        page.holds += 1
        self.held += page.holds == 1

    def unhold(self, page: HostPage) -> None:
        """Undo one `hold`, or the one that `reserve` or `seal` took."""
        assert page.holds > 0
        page.holds -= 1
        self.held -= page.holds == 0
        if page.node is not None:
            self._lru.unpin(page.node)
            if page.partial and not page.node.pins and not page.node.children:
                self._drop(page.node)
        elif not page.holds:
            self.unlisted -= 1
            self._free.append(page.slot)

    def drop(self, page: HostPage) -> list[bytes]:
        """Drop a bad page and its subtree. Return the keys without a writer because of it."""
        page.dropped = True
        return [] if page.node is None else self._drop(page.node)

    def clear(self) -> None:
        """Drop every page. Nothing may be reserved or held."""
        assert not self.reserved
        assert not self.held
        while len(self._lru):
            self._evict()
        self._changes.cleared()

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and parent of every page that others were told of, parents first."""
        return ((node.key, node.parent_key) for node in self._tree.preorder() if node.value.whole)

    def drain_events(self) -> list[CacheChange]:
        """What has become findable or stopped being so since the last call, in order."""
        return self._changes.drain()

    def validate(self) -> None:
        """Check every invariant that this can see; for tests."""
        self._tree.validate()
        self._lru.validate(self._tree)
        used: list[int] = list(self._free)
        for node in self._tree.preorder():
            entry = node.value
            assert entry.page is not None or entry.reservations, "a key without a page or a maker"
            above = node.parent is None or node.parent.value.whole
            assert entry.whole == (entry.page is not None and above and not entry.partial and not entry.apart)
            holds = 0
            if entry.page is not None:
                assert entry.page.node is node
                holds = entry.page.holds
                used.append(entry.page.slot)
            for reservation in entry.reservations:
                assert reservation.node is node
                used.append(reservation.slot)
            assert node.pins == holds + len(entry.reservations)
        assert len(used) == len(set(used)), "one slot, two owners"
        attached = sum(len(node.value.reservations) for node in self._tree.preorder())
        assert len(used) + self.unlisted + self.reserved - attached == self.slots, "a slot is lost"
        assert self.sealed == sum(node.value.page is not None for node in self._tree.preorder())

    def _take_slot(self, node: RadixNode[HostPageEntry], writer: Hashable) -> HostPage | SlotReservation:
        """Turn a pin on `node` into a hold of its page, or into a reservation."""
        if (page := node.value.page) is not None:
            page.holds += 1
            self.held += page.holds == 1
            return page
        reservation = SlotReservation(node.key, self._free.pop(), writer, node)
        node.value.reservations.append(reservation)
        self.reserved += 1
        return reservation

    def _end(self, reservation: SlotReservation) -> RadixNode[HostPageEntry] | None:
        """The slot is no longer reserved; what becomes of it, and of the pin on the node, is the caller's."""
        self.reserved -= 1
        node, reservation.node = reservation.node, None
        if node is not None:
            node.value.reservations.remove(reservation)
        return node

    def _list(self, node: RadixNode[HostPageEntry]) -> None:
        """`node` was sealed: if all before it is, it and the sealed pages that waited below it are whole now."""
        if node.value.partial or node.value.apart or (node.parent is not None and not node.parent.value.whole):
            return
        waiting = [node]
        while waiting:
            here = waiting.pop()
            here.value.whole = True
            self._changes.stored(here.key, here.parent_key)
            below = (child for child in here.children.values() if not child.value.partial)
            waiting.extend(child for child in below if child.value.page is not None)

    def _drop(self, top: RadixNode[HostPageEntry]) -> list[bytes]:
        unmade: list[bytes] = []
        for node in self._tree.subtree(top):
            entry = node.value
            if (page := entry.page) is None:
                unmade.append(node.key)
            else:
                page.node, page.dropped = None, True
                if page.holds:
                    self.unlisted += 1
                else:
                    self._free.append(page.slot)
            if entry.whole:
                self._changes.removed(node.key)
            for reservation in entry.reservations:
                reservation.node = None
            self._lru.forget(node)
            self._tree.remove_node(node)
        return unmade

    def _evict(self) -> None:
        node = self._lru.pop()
        page = node.value.page
        assert page is not None
        assert not page.holds
        page.node = None
        if node.value.whole:
            self._changes.removed(node.key)
        self._tree.remove_node(node)
        self._free.append(page.slot)
        self.evictions += 1


def _may_follow(entry: HostPageEntry, writer: Hashable) -> bool:
    return entry.page is not None or any(reservation.writer == writer for reservation in entry.reservations)
