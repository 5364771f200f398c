"""Window pages: which of them a prefix needs, in a device's cache and in the arena."""

from __future__ import annotations

import pytest

from kvstore.arena.host_page_pool import HostPage, HostPagePool, SlotReservation
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.keys import START
from kvstore.window_groups import NO_GROUPS, WindowGroups
from tests.support.workers_and_stores import PAGE

GROUPS = WindowGroups(2, 2 * PAGE, PAGE)
KEYS = [bytes([page]) * 16 for page in range(1, 9)]


def cached(groups: WindowGroups, pages: int, spared: int = 99) -> DeviceBlockManager:
    """A pool in which the first `pages` of `KEYS` are cached, and the window pages of all but number `spared`."""
    blocks = DeviceBlockManager(40)
    allocation = groups.allocate(blocks, [], pages)
    assert allocation is not None
    for page, key in enumerate(KEYS[:pages]):
        blocks.cache_block(key, KEYS[page - 1] if page else START, allocation.pages[page])
        for entry, own in enumerate(groups.keys([key]), page * groups.count):
            if page != spared:
                blocks.cache_block(own, key, allocation.window_pages[entry], apart=True)
    blocks.free([*allocation.pages, *allocation.window_pages])
    blocks.validate()
    return blocks


@pytest.mark.parametrize(("computed", "first"), [(0, 0), (7, 0), (8, 0), (10, 0), (11, 1), (15, 2), (16, 2), (19, 3)])
def test_the_first_page_that_the_next_token_looks_at(computed: int, first: int) -> None:
    assert GROUPS.first_page(computed) == first


def test_a_state_is_a_window_of_two_positions_and_no_chunk_goes_beyond_its_page() -> None:
    states = WindowGroups(2, 2, PAGE, states=True)
    assert [states.first_page(each * PAGE + 1) for each in range(3)] == [0, 1, 2]
    assert states.first_page(3 * PAGE) == 2
    assert states.match(cached(states, 6, 5), KEYS) == 5
    assert [states.longest_chunk(start, 9) for start in (0, 1, PAGE - 1, PAGE)] == [PAGE, PAGE - 1, 1, PAGE]
    assert GROUPS.longest_chunk(1, 9) == 9


def test_keys_differ_between_groups_and_pages() -> None:
    keys = [*KEYS, *GROUPS.keys(KEYS)]
    assert len(set(keys)) == 3 * len(KEYS)
    assert NO_GROUPS.keys(KEYS) == []


@pytest.mark.parametrize(("spared", "usable"), [(99, 6), (0, 6), (3, 6), (4, 4), (5, 5)])
def test_a_missing_window_page_is_a_miss_only_in_the_window(spared: int, usable: int) -> None:
    """Behind six pages a token looks at the fifth and the sixth."""
    assert GROUPS.match(cached(GROUPS, 6, spared), KEYS) == usable


def test_a_prefix_is_lent_with_the_window_pages_behind_it() -> None:
    blocks = cached(GROUPS, 6)
    before = blocks.available
    lent = GROUPS.allocate(blocks, KEYS[:6], 8)
    assert lent is not None
    assert (lent.cached, lent.first) == (6, 4)
    assert (len(lent.pages), len(lent.window_pages)) == (8, 8)
    assert blocks.available == before - 16
    of_cache = [blocks.find(key) for key in GROUPS.keys(KEYS[4:6])]
    assert lent.window_pages[:4] == [page.page for page in of_cache if page is not None]
    blocks.free([*lent.pages, *lent.window_pages])
    blocks.validate()


def test_pages_to_fetch_need_no_window_pages_before_the_window() -> None:
    lent = GROUPS.allocate(DeviceBlockManager(12), KEYS, 8, coming=8)
    assert lent is not None
    assert (lent.cached, lent.first, len(lent.window_pages)) == (0, 6, 4)


def test_all_or_nothing() -> None:
    blocks = DeviceBlockManager(23)
    assert GROUPS.allocate(blocks, KEYS, 8) is None
    assert blocks.available == 23
    blocks.validate()


def test_events_and_snapshots_tell_of_main_pages_alone() -> None:
    blocks = cached(GROUPS, 6)
    assert [page.key for page in blocks.pages()] == KEYS[:6]
    events = len(blocks.drain_events())
    blocks.clear()
    assert events == len(cached(NO_GROUPS, 6).drain_events())
    assert sum(len(change.keys) for change in blocks.drain_events()) == 6


def sealed(pool: HostPagePool, keys: list[bytes]) -> list[HostPage]:
    reserved = pool.reserve_apart("writer", keys)
    assert not isinstance(reserved, str)
    pages = [pool.seal(each, 0, True) for each in reserved if isinstance(each, SlotReservation)]
    return [page for page in pages if page is not None]


def test_pages_apart_are_reserved_at_once_and_evicted_one_by_one() -> None:
    pool = HostPagePool(4)
    pages = sealed(pool, KEYS[:3])
    assert pool.reserve_apart("writer", KEYS[:5]) == "full", "three are held"
    for page in pages:
        pool.unhold(page)
    (new, known) = sealed(pool, [KEYS[3]])[0], pool.reserve_apart("other", KEYS[1:3])
    assert known == pages[1:]
    assert sealed(pool, [KEYS[4]])
    assert pool.find(KEYS[0]) is None
    assert all(pool.find(page.key) is page for page in (new, *pages[1:]))
    assert not pool.drain_events()
    assert not list(pool.pages())
    pool.validate()
