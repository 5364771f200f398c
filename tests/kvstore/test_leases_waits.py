"""Stores that wait for each other's pages, and producers that go: no wait may rest on itself."""

from collections.abc import Sequence

from baton.messages import PageSource
from baton.peer_protocol import FetchUnavailable
from kvstore.server.leases import Lease
from kvstore.transport.interface import AnswerPeer
from tests.kvstore.chains import key, keys
from tests.kvstore.test_outbound_transfers import Bench, want
from tests.kvstore.world import Node, Worker, World

CHAIN = "abx"  # none of its pages is a partial one


def two_nodes(admit_after: int = 1) -> tuple[World, Node, Node]:
    world = World(2, admit_after, 50)
    for node in world.nodes:
        for worker in node.workers:
            world.attach(worker)
    a, b = world.nodes
    return world, a, b


def put_on_disk_only(world: World, node: Node, word: str = CHAIN) -> None:
    """Write a chain, let it go to the disk, and fill the arena with other pages."""
    for each in (word, "mno", "pqrs"):
        world.write(node.workers[1], each, hold=False)
        world.flow()
    assert node.disk.has(key(word))
    assert not in_arena(node, word)


def in_arena(node: Node, word: str = CHAIN) -> bool:
    return all(node.state._tiers.pages.find(name) is not None for name in keys(word))


def source(node: Node, pages: int = 5) -> tuple[PageSource, ...]:
    return (PageSource(node.incarnation, "inproc", pages),)


def arrived(worker: Worker, number: int) -> Sequence[int]:
    return sorted(worker.leases[number].arrived)


def waits(node: Node) -> int:
    return len(node.state._tiers.waiting)


def test_two_stores_that_both_want_what_one_of_them_has_on_its_disk() -> None:
    """The decode worker's store is to get the prompt from the prefill worker's, which gets its beginning from there."""
    world, a, b = two_nodes()
    put_on_disk_only(world, b)
    decode, prefill = b.workers[0], a.workers[0]
    handed = world.acquire(decode, CHAIN, 0, True, source(a))
    world.travel(decode)
    load = world.acquire(prefill, CHAIN, 0, False, source(b))
    world.travel(prefill)
    world.promote(prefill, load, 3)
    world.flow()  # no time passes: no deadline ends a wait
    assert arrived(decode, handed) == arrived(prefill, load) == [0, 1, 2]
    assert in_arena(a)
    assert in_arena(b)
    assert waits(a) == waits(b) == 0
    assert a.state.stats(world.now).loads.remote_pages == 3
    assert b.state.stats(world.now).loads.remote_pages == 0
    world.everybody_goes()


def test_both_orders_of_a_hand_off_and_a_load_end_with_the_pages_on_both_nodes() -> None:
    for prefill_first in (False, True):
        world, a, b = two_nodes()
        put_on_disk_only(world, b)
        decode, prefill = b.workers[0], a.workers[0]
        load = world.acquire(prefill, CHAIN, 0, False, source(b))
        world.travel(prefill)
        if prefill_first:
            world.promote(prefill, load, 3)
            world.travel(prefill)
        handed = world.acquire(decode, CHAIN, 0, True, source(a))
        world.travel(decode)
        world.promote(prefill, load, 3)
        world.flow()
        assert arrived(decode, handed) == arrived(prefill, load) == [0, 1, 2]
        world.everybody_goes()


def test_a_hand_off_whose_disk_fails_gets_its_pages_from_its_source() -> None:
    world, a, b = two_nodes()
    put_on_disk_only(world, b)
    world.write(a.workers[0], CHAIN, hold=False)
    handed = world.acquire(b.workers[0], CHAIN, 0, True, source(a))
    world.travel(b.workers[0])
    while b.disk_orders:
        b.work_on_some(0, ok=False)
    world.flow()
    assert arrived(b.workers[0], handed) == [0, 1, 2]
    assert b.state.stats(world.now).loads.remote_pages == 3
    world.everybody_goes()


def test_a_store_promises_no_cached_page_that_it_awaits_from_another_store() -> None:
    bench = Bench()
    bench.on_disk[key("a")] = b""
    bench.fetching.add(key("a"))
    assert bench.ask(want(1, "a", 1)) == [AnswerPeer("peer", FetchUnavailable(1, 0))]
    assert bench.brought == []
    bench.fetching.clear()
    assert bench.ask(want(2, "a", 1)) == []
    assert bench.brought == [key("a")]


def test_a_promise_to_another_store_ends_with_its_maker_here() -> None:
    """Both stores bring the page from each other, and each has a worker that makes it. Both workers give up."""
    world, a, b = two_nodes()
    reservations = {node: world.reserve(node.workers[0], "a", 0) for node in (a, b)}
    for node in (a, b):
        world.travel(node.workers[0])
    handed = {node: world.acquire(node.workers[1], "a", 0, True, source(other)) for node, other in ((a, b), (b, a))}
    world.flow()
    for node in (a, b):
        world.forget(node.workers[0], reservations[node])
    world.flow()
    assert waits(a) == waits(b) == 0, "the stores wait for each other, and no worker makes the page"
    assert not any(arrived(node.workers[1], handed[node]) for node in (a, b))
    world.everybody_goes()


def test_a_cached_page_is_not_waited_for_where_its_maker_may_be_the_worker_that_asks() -> None:
    """Each store brings a page from the other, where a prefill worker is to make it. Both prefill workers believe that
    a third store has it. They must not wait for the hand-offs, which wait for them."""
    world, a, b = two_nodes()
    for node, other in ((a, b), (b, a)):
        world.acquire(node.workers[1], "a", 0, True, source(other))
    world.flow()
    for maker in (a.workers[0], b.workers[0]):
        load = world.acquire(maker, "a", 0, False, (PageSource("gone", "inproc", 1),))
        world.travel(maker)
        world.promote(maker, load, 1)
    world.flow()
    assert not cached_waits(a, b)
    world.write(a.workers[0], "a", hold=False)
    world.flow()
    assert waits(a) == waits(b) == 0
    world.everybody_goes()


def test_a_cached_page_is_no_longer_waited_for_once_another_store_waits_here() -> None:
    world, a, b = two_nodes()
    world.acquire(a.workers[1], "a", 0, True, source(b))
    world.flow()
    load = world.acquire(a.workers[0], "a", 0, False, (PageSource("gone", "inproc", 1),))
    world.travel(a.workers[0])
    world.promote(a.workers[0], load, 1)
    world.flow()
    assert cached_waits(a, b), "the hand-off may bring it at any time"
    world.acquire(b.workers[1], "a", 0, True, source(a))
    world.flow()
    assert not cached_waits(a, b)
    world.everybody_goes()


def cached_waits(*nodes: Node) -> list[Lease]:
    return [lease for node in nodes for lease in node.state._leases() if not lease.wait and lease.waits]
