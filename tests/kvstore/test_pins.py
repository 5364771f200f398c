"""Pins: all pages or none, shared ones counted once, until their time is over."""

import pytest

from baton.messages import AttemptHeld, PagesPinned, PinPages
from kvstore.arena.host_page_pool import HostPage, HostPagePool, SlotReservation
from kvstore.server.pins import PinnedPrefixes
from tests.kvstore.chains import key, keys

SLOTS, PAGE_BYTES, QUOTA = 10, 100, 600


class Table:
    def __init__(self) -> None:
        self.pages = HostPagePool(SLOTS)
        self.pins = PinnedPrefixes(self.pages, PAGE_BYTES, QUOTA)

    def write(self, names: str) -> None:
        claimed = self.pages.reserve("w", b"", keys(names))
        assert isinstance(claimed, list)
        for each in claimed:
            if isinstance(each, SlotReservation):
                self.pages.seal(each, 0, hold=False)
            else:
                self.pages.unhold(each)

    def pin(
        self, name: str, names: str, tenant: str = "", ttl_ms: int = 1_000, now: float = 0.0, router: str = "r1"
    ) -> PagesPinned:
        answer, _ = self.pins.pin(PinPages(name, tenant, b"".join(keys(names)), ttl_ms), router, now)
        self.pages.validate()
        return answer

    def page(self, names: str) -> HostPage:
        page = self.pages.find(key(names))
        assert page is not None
        return page

    def flood(self) -> None:
        """As many pages as there is room for, each alone."""
        while self.pages.evictable or self.pages.free:
            claimed = self.pages.reserve("w", b"", [key(f"flood{self.pages.reserved}")])
            if not isinstance(claimed, list):
                return


@pytest.fixture
def table() -> Table:
    return Table()


def test_what_is_pinned_outlasts_a_flood_until_its_time_is_over(table: Table) -> None:
    table.write("abc")
    table.write("x")
    assert table.pin("p", "abc") == PagesPinned("p", 3)
    table.flood()
    assert table.pages.find(key("x")) is None
    assert all(table.pages.find(each) for each in keys("abc"))
    table.pins.tick(0.999)
    assert (len(table.pins), table.pins.bytes) == (1, 3 * PAGE_BYTES)
    table.pins.tick(1.0)
    assert (len(table.pins), table.pins.bytes, table.pages.held) == (0, 0, 0)
    table.flood()
    assert table.pages.find(key("abc")) is None


def test_all_pages_or_none(table: Table) -> None:
    table.write("ab")
    assert table.pin("p", "abcd") == PagesPinned("p", 2, "missing")
    assert table.pages.held == 0


def test_a_tenants_quota_counts_shared_pages_once(table: Table) -> None:
    table.write("abcd")
    table.write("abxyz")
    assert table.pin("p", "abcd", "one").reason == ""
    assert table.pin("q", "abx", "one").reason == ""  # five pages in all
    assert table.pin("r", "abxy", "one").reason == ""  # six
    assert table.pin("s", "abxyz", "one") == PagesPinned("s", 0, "quota")
    assert table.pin("s", "abxyz", "two").reason == ""
    assert table.pin("q", "abxy", "one").reason == ""  # in place of what had that name
    table.pins.unpin("r1", "p")
    assert table.pin("t", "abxyz", "one").reason == ""


def test_a_pin_of_the_same_name_replaces_the_first(table: Table) -> None:
    table.write("abc")
    table.write("x")
    table.pin("p", "abc")
    table.pin("p", "x", now=0.5)
    assert table.pages.held == 1
    table.pins.tick(1.0)
    assert len(table.pins) == 1
    table.pins.tick(1.5)
    assert len(table.pins) == 0
    table.pins.unpin("r1", "p")  # it has ended already


def test_heartbeats_tell_of_pages_that_were_dropped(table: Table) -> None:
    table.write("abc")
    table.pin("p", "abc")
    assert table.pins.listed("r1") == (AttemptHeld("p", 1, 3),)
    table.pages.drop(table.page("ab"))  # and with it what lies below
    assert table.pins.listed("r1") == (AttemptHeld("p", 1, 1),)
    table.pins.unpin("r1", "p")
    table.pages.validate()
    assert table.pages.unlisted == 0


def test_two_routers_pins_of_the_same_pages_count_once_and_end_one_by_one(table: Table) -> None:
    table.write("abcdef")
    assert table.pin("p", "abcdef") == table.pin("p", "abcdef", router="r2") == PagesPinned("p", 6)
    assert (len(table.pins), table.pins.bytes) == (2, QUOTA)
    table.pins.unpin("r2", "p")
    table.flood()
    assert table.pins.listed("r1") == (AttemptHeld("p", 1, 6),)
    assert table.pins.listed("r2") == ()
