"""Real stores that fetch from each other over TCP, and real workers of theirs: pages cross as they are sealed.

If the connection or the other store fails, no worker reads a wrong byte or waits for ever, and no lease stays held.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton import store_protocol as protocol
from baton.messages import Hello, PageSource, Peer
from baton.wire import Listener
from kvstore.checksum import page_checksum
from tests.kvstore.process_fixtures import NODE, PAGE, PATIENCE, StoreProcess, TestClient
from tests.kvstore.relay import Relay
from tests.support.eventually import eventually
from tests.support.metrics_page import page, parsed, total

pytestmark = pytest.mark.slow

SLOTS = 64
PAGES = 40  # of a chain: more than may be on their way at once
LEASE = 1


class Chain:
    """Pages with random bytes, under keys of their own."""

    def __init__(self, seed: int, count: int = PAGES) -> None:
        rng = random.Random(seed)
        self.keys = [hashlib.blake2b(f"{seed} {index}".encode(), digest_size=16).digest() for index in range(count)]
        self.pages = [rng.randbytes(PAGE) for _ in range(count)]

    @property
    def packed(self) -> bytes:
        return b"".join(self.keys)


class RunningStore:
    """A store's process, and what it told the router of itself."""

    def __init__(self, process: StoreProcess, hello: Hello) -> None:
        self.process = process
        self.name = hello.peer.incarnation
        self.endpoint = hello.data
        self._metrics = hello.metrics

    def source(self, pages: int = PAGES, endpoint: str = "") -> PageSource:
        """What a router tells of this store."""
        return PageSource(self.name, endpoint or self.endpoint, pages)

    def figure(self, name: str, **labels: str) -> float:
        return total(parsed(page(self._metrics)), name, **labels)

    def counts(self, number: float, name: str, **labels: str) -> None:
        """Wait until a figure is that number."""
        eventually(lambda: self.figure(name, **labels) == number, f"{number} of {name}")

    def at_rest(self) -> bool:
        """Every slot is free or can be."""
        here = parsed(page(self._metrics))
        states = [total(here, "kv_pages", tier="host", state=state) for state in ("reserved", "held", "loading")]
        return not any(states) and not total(here, "kv_pages", tier="remote", state="sending")


class Writer:
    """A worker that reserves a whole chain and seals it bit by bit."""

    def __init__(self, store: RunningStore, chain: Chain) -> None:
        self.client = TestClient(store.process.cluster)
        self.client.connect()
        self._chain = chain
        self._slots = self.client.ask(protocol.Reserve(LEASE, b"", chain.packed), protocol.Reserved).slots
        self._sealed = 0

    def seal(self, count: int) -> None:
        """The next `count` pages."""
        sums: list[int] = []
        for index in range(self._sealed, self._sealed + count):
            if (slot := self._slots[index]) is not None:  # else it is there already
                self.client.store.slot(slot)[:] = self._chain.pages[index]
            sums.append(page_checksum(self._chain.pages[index], 1))
        self.client.ask(protocol.Seal(LEASE, self._sealed, tuple(sums)), protocol.Sealed)
        self._sealed += count

    def give_up(self) -> None:
        self.client.store.call(protocol.EndLease(LEASE))

    def close(self) -> None:
        self.client.store.close()


class Reader:
    """A worker that acquires a chain, and lets go of each page once it has read it. What it has `read` counts."""

    def __init__(self, store: RunningStore, chain: Chain, *sources: PageSource, wait: bool = True) -> None:
        self.client = TestClient(store.process.cluster)
        self.client.connect()
        self._chain = chain
        self._copies: dict[int, bytes] = {}
        self.read: set[int] = set()
        self.end = len(chain.keys)  # the first page that is not coming
        self.below: protocol.LowerTierHits | None = None
        self._arguments = (chain.packed, wait, b"", sources)
        self._lease = 0
        self._acquire()

    def promote(self, until: int) -> None:
        self.client.store.call(protocol.Promote(self._lease, until))

    def until(self, condition: Callable[[], object], what: str, *others: Reader) -> None:
        """Run until the condition holds. `others` run as well: the store takes a silent worker for stopped."""

        def turned() -> object:
            for reader in (self, *others):
                reader.turn()
            return condition()

        eventually(turned, what)

    def until_read(self, count: int) -> None:
        def all_read() -> bool:
            assert self.end >= count, f"told that page {self.end} is not coming, with {len(self.read)} read"
            return self.read >= set(range(count))

        self.until(all_read, f"{count} pages read")

    def close(self) -> None:
        self.client.store.call(protocol.EndLease(self._lease))
        self.client.store.close()

    def _acquire(self) -> None:
        self._lease += 1
        self.client.leases = {self._lease}  # the store forgets what is not listed
        self.client.store.call(protocol.Acquire(self._lease, *self._arguments))

    def turn(self) -> None:
        for reply in self.client.turn():
            if getattr(reply, "lease", self._lease) != self._lease:
                continue
            match reply:
                case protocol.PagesReady(pages=pages):
                    for each in pages:
                        self._copies[each.index] = bytes(self.client.store.slot(each.slot))
                    self.client.store.call(protocol.Release(self._lease, tuple(each.index for each in pages)))
                case protocol.Released(indices=indices, held=held):
                    counted = {index for index, counts in zip(indices, held, strict=True) if counts}
                    for index in counted:
                        assert self._copies[index] == self._chain.pages[index], f"page {index} has wrong bytes"
                    self.read |= counted
                    if not all(held):  # one came before its parent, which was lost: both are brought anew
                        self._acquire()
                case protocol.PagesUnavailable(index=index):
                    self.end = min(self.end, index)
                case protocol.LowerTierHits():
                    self.below = reply
                case _:
                    pass


class Lab:
    """Three stores, and what is done with them until the end of a test."""

    def __init__(self, stores: Sequence[RunningStore], cleanup: ExitStack) -> None:
        self.here, self.there, self.third = stores
        self._cleanup = cleanup

    def write(self, store: RunningStore, chain: Chain, sealed: int = 0) -> Writer:
        writer = Writer(store, chain)
        self._cleanup.callback(writer.close)
        if sealed:
            writer.seal(sealed)
        return writer

    def read(self, store: RunningStore, chain: Chain, *sources: PageSource, wait: bool = True) -> Reader:
        reader = Reader(store, chain, *sources, wait=wait)
        self._cleanup.callback(reader.close)
        return reader

    def relay(self, store: RunningStore) -> Relay:
        relay = Relay(store.endpoint)
        self._cleanup.callback(relay.close)
        return relay


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with ExitStack() as cleanup:
        stores = asyncio.run(asyncio.wait_for(_started(3, tmp_path, cleanup), PATIENCE))
        yield Lab(stores, cleanup)


async def _started(count: int, folder: Path, cleanup: ExitStack) -> list[RunningStore]:
    router = Listener("tcp://127.0.0.1:0", Peer("router", "router", NODE, "router-1", os.getpid()))
    try:
        # Workers say their heartbeats only while they are waited for: what is done between may take a while.
        limits = {"lease_ms": 120_000, "silence_ms": 3_000}
        processes = [StoreProcess(folder, SLOTS, router.endpoint, **limits) for _ in range(count)]
        for process in processes:
            cleanup.callback(process.kill)
        hellos: dict[int, Hello] = {}
        while len(hellos) < count:
            message = (await router.receive()).message
            if isinstance(message, Hello):
                hellos[message.peer.pid] = message
        return [RunningStore(process, hellos[process.process.pid]) for process in processes]
    finally:
        router.close()


def all_at_rest(*stores: RunningStore) -> None:
    for store in stores:
        eventually(store.at_rest, "nothing reserved, held or on its way")


# --- hand-offs --------------------------------------------------------------------------------------------------------


def test_pages_cross_as_they_are_sealed(lab: Lab) -> None:
    here, there = lab.here, lab.there
    chain = Chain(1)
    writer = lab.write(there, chain)
    reader = lab.read(here, chain, there.source())
    for count in (1, 2, 7, 30):
        writer.seal(count)
        reader.until_read(len(reader.read) + count)
    here.counts(PAGES, "tier_loads_total", tier="remote")
    there.counts(PAGES, "pages_sent_total")
    here.counts(1, "peer_links")
    reader.close()
    all_at_rest(here, there)
    # It is cached here now: the next reader needs no other store.
    second = lab.read(here, chain, wait=False)
    second.until_read(PAGES)
    second.close()


@pytest.mark.parametrize("again", [1, 5])
def test_a_connection_that_is_cut_is_resumed(lab: Lab, again: int) -> None:
    here, there = lab.here, lab.there
    chain = Chain(3)
    relay = lab.relay(there)
    writer = lab.write(there, chain)
    reader = lab.read(here, chain, there.source(endpoint=relay.endpoint))
    for cut in range(again):
        writer.seal(4)
        if cut % 2:  # while nothing is on its way, and while something may be
            reader.until_read(len(reader.read) + 4)
        relay.cut()
    writer.seal(PAGES - 4 * again)
    reader.until_read(PAGES)
    reader.close()
    all_at_rest(here, there)


def test_a_store_that_dies_is_told_of_and_another_source_is_asked(lab: Lab) -> None:
    here, there, third = lab.here, lab.there, lab.third
    chain, other = Chain(5, 12), Chain(6)
    lab.write(there, chain, 10)
    lab.write(there, other, 10)
    lab.write(third, other, PAGES)
    alone = lab.read(here, chain, there.source())
    spare = lab.read(here, other, there.source(), third.source())
    alone.until(lambda: len(alone.read) == len(spare.read) == 10, "what there is of both", spare)
    there.process.kill()
    alone.until(lambda: alone.end == 10, "told that the rest is not coming", spare)
    spare.until_read(PAGES)
    alone.close()
    spare.close()
    all_at_rest(here, third)


# --- cached prefixes --------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_brought_as_far_as_its_reader_asks(lab: Lab) -> None:
    here, there = lab.here, lab.there
    chain = Chain(11)
    lab.write(there, chain, PAGES)
    reader = lab.read(here, chain, there.source(), wait=False)
    reader.until(lambda: reader.below, "told of what lies below")
    assert reader.below.first == 0
    assert [(run.speed.tier, run.pages) for run in reader.below.runs] == [("remote", PAGES)]
    reader.promote(12)
    reader.until_read(12)
    here.counts(12, "tier_loads_total", tier="remote")
    reader.close()
    all_at_rest(here, there)


# --- flipped bits -----------------------------------------------------------------------------------------------------


def test_a_bit_flipped_in_the_sending_arena_is_found_and_its_page_dropped_there(lab: Lab) -> None:
    here, there = lab.here, lab.there
    chain = Chain(14)
    lab.write(there, chain, PAGES)
    flip_in_arena(there.process, chain.pages[7])
    reader = lab.read(here, chain, there.source(), wait=False)
    reader.until(lambda: reader.below, "told of what lies below")
    reader.promote(PAGES)
    reader.until(lambda: reader.end == 7 and reader.read >= set(range(7)), "the pages before it, and no more")
    eventually(lambda: there.figure("checksum_failures_total", tier="host") == 1, "counted where it lies")
    eventually(lambda: here.figure("checksum_failures_total", tier="remote") >= 1, "counted where it was read")
    reader.close()
    all_at_rest(here, there)
    # Any worker may compute the pages again.
    lab.write(there, chain, PAGES)
    again = lab.read(here, chain, there.source())
    again.until_read(PAGES)
    again.close()


def flip_in_arena(process: StoreProcess, page: Sequence[int]) -> None:
    """Flip one bit of the page with these bytes, in the memory of the store."""
    descriptors = Path(f"/proc/{process.process.pid}/fd").iterdir()
    arena = next(fd for fd in descriptors if "memfd:" in str(fd.readlink()))
    with arena.open("r+b") as memory:
        at = memory.read().index(bytes(page)) + PAGE // 2
        memory.seek(at)
        memory.write(bytes([page[PAGE // 2] ^ 1]))
