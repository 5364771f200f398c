"""Moving pages between a device and its store, word by word: lookups, fetches and writes."""

import itertools

import pytest

from baton import store_protocol as protocol
from baton.messages import PageSource
from kvstore.client import transfer
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.load_or_recompute import DEFAULT_SPEEDS

DISK, REMOTE = DEFAULT_SPEEDS["disk"], DEFAULT_SPEEDS["remote"]


def chain(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1, count + 1)]


def lookup(count: int, *sources: PageSource) -> transfer.PrefixLookup:
    return transfer.PrefixLookup(itertools.count(1), chain(count), sources)


def fetch(count: int, wait: bool = False, parent: bytes = b"") -> transfer.PageFetch:
    return transfer.PageFetch(itertools.count(1), chain(count), range(100, 100 + count), wait, parent)


def here(lease: int, first: int, last: int) -> protocol.PagesReady:
    return protocol.PagesReady(lease, tuple(protocol.LeasedPage(index, index, 7) for index in range(first, last)))


# --- lookups ----------------------------------------------------------------------------------------------------------


def test_a_long_chain_takes_several_leases_each_with_its_parent_and_its_part_of_the_sources() -> None:
    keys = chain(2_500)
    calls = lookup(2_500, PageSource("s", "e", 1_500), PageSource("t", "e", 500)).start()
    assert [(call.lease, call.parent, call.sources) for call in calls if isinstance(call, protocol.Acquire)] == [
        (1, b"", (PageSource("s", "e", 1_500), PageSource("t", "e", 500))),
        (2, keys[1_023], (PageSource("s", "e", 476),)),
        (3, keys[2_047], ()),
    ]


def test_what_the_arena_has_is_found_and_nothing_else_is_asked_for() -> None:
    looking = lookup(3)
    looking.handle(here(1, 0, 3))
    assert looking.undecided
    assert looking.runs == []
    assert looking.decide(0) == []
    assert looking.hits == 3


def test_what_lies_below_is_decided_about_once_all_is_known() -> None:
    looking = lookup(2_000)
    looking.handle(here(1, 0, 1_000))
    looking.handle(protocol.LowerTierHits(1, 1_000, (protocol.TierPages(DISK, 24),)))
    assert not looking.undecided
    looking.handle(protocol.LowerTierHits(2, 0, (protocol.TierPages(DISK, 6), protocol.TierPages(REMOTE, 70))))
    assert looking.undecided
    assert (looking.here, looking.runs) == (
        1_000,
        [protocol.TierPages(DISK, 24), protocol.TierPages(DISK, 6), protocol.TierPages(REMOTE, 70)],
    )
    assert looking.decide(30) == [protocol.Promote(1, 1_024), protocol.Promote(2, 6)]
    assert looking.hits is None
    looking.handle(here(1, 1_000, 1_024))
    looking.handle(protocol.PagesUnavailable(2, 4))
    assert looking.hits is None
    looking.handle(here(2, 0, 4))
    assert looking.hits == 1_028


def test_a_gap_ends_what_can_be_loaded() -> None:
    looking = lookup(3_000)
    looking.handle(protocol.LowerTierHits(1, 0, (protocol.TierPages(DISK, 10),)))
    looking.handle(protocol.LowerTierHits(2, 0, (protocol.TierPages(DISK, 1_024),)))
    looking.handle(protocol.PagesUnavailable(3, 0))
    assert looking.runs == [protocol.TierPages(DISK, 10)]
    assert looking.decide(10) == [protocol.Promote(1, 10)]


def test_nothing_is_promoted_of_leases_that_are_here_already() -> None:
    looking = lookup(1_500)
    looking.handle(here(1, 0, 1_024))
    looking.handle(here(2, 0, 100))
    looking.handle(protocol.LowerTierHits(2, 100, (protocol.TierPages(DISK, 376),)))
    assert looking.decide(376) == [protocol.Promote(2, 476)]


# --- fetches ----------------------------------------------------------------------------------------------------------


def test_a_page_counts_when_the_hold_has_lasted() -> None:
    fetching = fetch(3, wait=True)
    assert fetching.handle(here(1, 0, 2)) == [transfer.CopyIn(1, 0, 0, 100, 7), transfer.CopyIn(1, 1, 1, 101, 7)]
    assert fetching.handle(transfer.CopiedIn(1, (0, 1))) == [protocol.Release(1, (0, 1))]
    assert fetching.covered == 0
    fetching.handle(protocol.Released(1, (0, 1), (True, True)))
    assert (fetching.covered, fetching.ended) == (2, False)
    fetching.handle(protocol.PagesUnavailable(1, 2))
    assert (fetching.ended, fetching.complete) == (True, False)


def test_a_hold_that_had_expired_ends_the_fetch_there() -> None:
    fetching = fetch(3, wait=True)
    fetching.handle(here(1, 0, 3))
    fetching.handle(protocol.Released(1, (0, 1, 2), (True, False, True)))
    assert (fetching.covered, fetching.ended) == (1, True)


def test_a_corrupt_page_is_reported_before_it_is_released() -> None:
    fetching = fetch(2)
    fetching.handle(here(1, 0, 2))
    assert fetching.handle(transfer.CopiedIn(1, (0, 1), corrupt=(1,))) == [
        protocol.PageCorrupt(1, 1),
        protocol.Release(1, (0, 1)),
    ]
    fetching.handle(protocol.Released(1, (0, 1), (True, False)))
    assert (fetching.covered, fetching.ended, fetching.undecided) == (1, True, False)


def test_a_hand_off_has_nothing_to_decide() -> None:
    fetching = fetch(2, wait=True, parent=b"p" * 16)
    (call,) = fetching.start()
    assert isinstance(call, protocol.Acquire)
    assert (call.wait, call.parent) == (True, b"p" * 16)
    assert not fetching.undecided


def test_a_cached_fetch_ends_where_its_decision_says() -> None:
    fetching = fetch(4)
    fetching.handle(here(1, 0, 1))
    fetching.handle(protocol.LowerTierHits(1, 1, (protocol.TierPages(DISK, 3),)))
    fetching.decide(1)
    fetching.handle(protocol.Released(1, (0,), (True,)))
    assert not fetching.ended
    fetching.handle(here(1, 1, 2))
    fetching.handle(protocol.Released(1, (1,), (True,)))
    assert (fetching.covered, fetching.ended) == (2, True)


def test_keys_and_device_pages_go_together() -> None:
    with pytest.raises(ValueError, match="2 keys for 1 device pages"):
        transfer.PageFetch(itertools.count(1), chain(2), [0], wait=False)


# --- writes --------------------------------------------------------------------------------------------------------


def test_pages_are_written_once_they_are_ready_and_slots_are_known() -> None:
    write = transfer.StorePages(1, b"", chain(3), hold=True)
    assert write.offer(0, 50) == []
    assert write.handle(protocol.Reserved(1, (4, None, 6))) == [transfer.CopyOut(1, 0, 50, 4)]
    assert write.offer(1, 51) == [], "it is there already"
    assert write.offer(2, 52) == [transfer.CopyOut(1, 2, 52, 6)]
    assert write.handle(transfer.CopiedOut(1, 0, (9,))) == [protocol.Seal(1, 0, (9,), True)]
    write.handle(protocol.Sealed(1, 0, 1))
    assert not write.done
    write.handle(protocol.Sealed(1, 2, 1))
    assert (write.done, write.pages_written) == (True, 2)


def test_why_it_was_refused_is_kept() -> None:
    write = transfer.StorePages(1, b"", chain(1), hold=False)
    write.handle(protocol.NotReserved(1, "full"))
    assert write.refused == "full"


def test_a_copy_into_a_page_in_limbo_waits_and_others_go_before_it() -> None:
    blocks = DeviceBlockManager(3)
    pages = blocks.allocate(3)
    assert pages is not None
    queue = transfer.CopyQueue(blocks)
    epoch = blocks.begin()
    blocks.free(pages[:1])
    delayed, ready, out = (
        transfer.CopyIn(1, 0, 5, pages[0], 0),
        transfer.CopyIn(2, 0, 6, pages[1], 0),
        transfer.CopyOut(3, 0, pages[0], 7),
    )
    queue.add_copies([delayed, ready, out])
    assert queue.take_copies(8) == [ready, out]
    assert not queue
    blocks.end(epoch)
    assert queue
    assert queue.take_copies(8) == [delayed]


def test_a_lease_ends_after_its_copies() -> None:
    queue = transfer.CopyQueue(DeviceBlockManager(3))
    queue.add_copies([transfer.CopyOut(1, index, index, index) for index in range(3)])
    assert len(queue.take_copies(2)) == 2
    assert queue.end_lease(1) == []
    assert queue.ending == (1,)
    assert queue.take_copies(2) == [], "what was not handed out is dropped"
    assert queue.copies_ended(transfer.CopiedOut(1, 0, (0,))) == []
    assert queue.copies_ended(transfer.CopiedOut(1, 1, (0,))) == [transfer.CallStore(protocol.EndLease(1))]
    assert (queue.ending, queue.under_way) == ((), 0)
    assert queue.end_lease(2) == [transfer.CallStore(protocol.EndLease(2))]
