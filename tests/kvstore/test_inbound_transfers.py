"""What a store brings in, call by call: credits, losses, sources that fail, slots that are freed in time."""

import itertools

import pytest

from baton import peer_protocol as peers
from baton.messages import PageSource
from kvstore.arena.host_page_pool import HostPagePool, SlotReservation
from kvstore.disk.orders import DiskPage, ReadEnded
from kvstore.server.inbound_transfers import InboundResult, InboundTransfers, links
from kvstore.transport.interface import AskPeer, ExpectPages, PagesLanded, RetractFetch
from tests.kvstore.chains import key, keys
from tests.support.fake_disk import FakeDisk, Finished, Read, Write

NEAR, FAR = PageSource("near", "inproc", 9), PageSource("far", "inproc", 9)


class Bench:
    """Loads over an arena and a disk, two pages of a fetch on their way at once."""

    def __init__(self, slots: int = 8, share: float = 1.0) -> None:
        self.pages = HostPagePool(slots)
        self.disk = FakeDisk()
        self.loads = InboundTransfers(self.pages, self.disk, 100, share, 0.25, 3.0, itertools.count(1))
        self.loads._window = 2
        self.now = 0.0

    def fetch(self, word: str, *sources: PageSource, wait: bool = False) -> InboundResult:
        return self.loads.fetch(sources, links(keys(word), b""), wait, self.now)

    def land(self, fetch: int, *indices: int, damaged: tuple[int, ...] = ()) -> InboundResult:
        outcome = self.loads.landed(PagesLanded(fetch, tuple((index, index) for index in indices), damaged), self.now)
        for page in outcome.landed:
            self.pages.unhold(page)
        self.loads.validate()
        self.pages.validate()
        return outcome

    def beat(self) -> InboundResult:
        self.now += 0.3
        return self.loads.tick(self.now, 0.0)

    def hear(self, store: str, reply: peers.FetchUnavailable | peers.FetchStatus) -> InboundResult:
        outcome = self.loads.peer_replied(store, reply, self.now)
        self.loads.validate()
        return outcome

    def store(self, word: str) -> None:
        """Put a chain on the disk."""
        for name, above in links(keys(word), b""):
            page = DiskPage(name, above, 0, 7)
            self.disk.write([page])
            self.disk.handle(Finished(0, Write(0, page)))

    def seal(self, word: str) -> None:
        """Have a local worker seal a chain here."""
        slots = self.pages.reserve("worker", b"", keys(word))
        assert isinstance(slots, list)
        for each in slots:
            if isinstance(each, SlotReservation):
                self.pages.seal(each, 1, hold=False)
            else:
                self.pages.unhold(each)

    def read(self, word: str) -> list[Read]:
        outcome = self.loads.read_disk(links(keys(word), b""), self.now)
        return [order for order in outcome.orders if isinstance(order, Read)]

    def have_read(self, order: Read, ok: bool = True) -> InboundResult:
        outcome = self.loads.read_ended(ReadEnded(order.key, order.slot, 7, ok), self.now)
        for page in outcome.landed:
            self.pages.unhold(page)
        self.loads.validate()
        return outcome


def requests(outcome: InboundResult, store: str = "near") -> list[peers.PageRequest]:
    return [order.request for order in outcome.orders if isinstance(order, AskPeer) and order.source.store == store]


def expected(outcome: InboundResult) -> list[int]:
    """Indices that may land from now on."""
    return [index for order in outcome.orders if isinstance(order, ExpectPages) for index, _ in order.slots]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_pages_are_wanted_as_there_is_room_and_each_once(bench: Bench) -> None:
    began = bench.fetch("abcd", NEAR)
    assert expected(began) == [0, 1]
    assert requests(began) == [peers.FetchPages(1, 100, b"".join(keys("abcd")), False, 2)]
    assert bench.fetch("abcd", FAR).orders == []
    half = bench.land(1, 0, 1)
    assert (expected(half), requests(half)) == ([2, 3], [peers.FetchCredit(1, 4)])
    over = bench.land(1, 2, 3)
    assert [page.key for page in over.landed] == keys("abcd")[2:]
    assert over.orders == [RetractFetch(1), AskPeer(NEAR, peers.CancelFetch(1))]
    bench.loads.retracted(1, bench.now)
    assert bench.loads.idle


def test_the_next_source_is_asked_for_what_has_not_come(bench: Bench) -> None:
    bench.fetch("abc", NEAR, FAR)
    bench.land(1, 0)
    again = bench.hear("near", peers.FetchUnavailable(1, 1))
    assert requests(again) == [peers.CancelFetch(1)]
    assert requests(again, "far") == [peers.FetchPages(2, 100, b"".join(keys("abc")[1:]), False, 2)]
    assert bench.hear("near", peers.FetchUnavailable(1, 1)).orders == [], "it was said before"
    assert bench.hear("near", peers.FetchUnavailable(2, 0)).orders == [], "that one was not asked"
    assert bench.hear("far", peers.FetchUnavailable(2, 0)).failed == keys("abc")[1:]


def test_each_source_sends_the_pages_it_has(bench: Bench) -> None:
    bench.fetch("abc", NEAR, FAR)
    again = bench.hear("near", peers.FetchUnavailable(1, 1))
    assert requests(again) == []
    assert requests(again, "far") == [peers.FetchPages(2, 100, b"".join(keys("abc")[1:]), False, 2)]
    assert bench.hear("near", peers.FetchUnavailable(1, 1)).orders == [], "it was said before"
    assert [page.key for page in bench.land(1, 0).landed] == [key("a")]
    assert [page.key for page in bench.land(2, 0, 1).landed] == keys("abc")[1:]
    for fetch in (1, 2):
        bench.loads.retracted(fetch, bench.now)
    assert bench.loads.idle
    assert bench.pages.free == 5


def test_pages_that_the_only_source_lacks_fail_and_those_before_them_come(bench: Bench) -> None:
    bench.fetch("abc", NEAR)
    assert bench.hear("near", peers.FetchUnavailable(1, 2)).failed == [key("abc")]
    assert bench.hear("near", peers.FetchUnavailable(1, 1)).failed == [key("ab")]
    assert [page.key for page in bench.land(1, 0).landed] == [key("a")]
    bench.loads.retracted(1, bench.now)
    assert bench.pages.free == 7


def test_a_hand_off_that_no_source_has_is_gone_not_failed(bench: Bench) -> None:
    bench.fetch("ab", NEAR, wait=True)
    outcome = bench.hear("near", peers.FetchUnavailable(1, 0))
    assert (outcome.gone, outcome.failed) == (keys("ab"), [])


def test_a_hand_off_shows_that_a_link_is_fast_and_never_that_it_is_slow(bench: Bench) -> None:
    bench.loads._page_bytes = 10**9
    before = bench.loads.remote_speed.speed
    bench.fetch("abcdef", NEAR, wait=True)
    for index, seconds in enumerate((5.0, 5.0, 0.01)):
        bench.now += seconds  # while the prompt is computed; then a page comes from some buffer
        bench.land(1, index)
    assert bench.loads.remote_speed.speed == before
    bench.now += 0.09
    bench.land(1, 3)
    assert bench.loads.remote_speed.speed.bytes_per_second == pytest.approx(before.bytes_per_second + 0.2 * 19e9)
    assert not bench.loads.remote_speed.speed.measured, "the first load says more"


def test_a_page_computed_here_hides_no_loss(bench: Bench) -> None:
    bench.fetch("abcd", NEAR)
    bench.seal("abc")
    bench.land(1, 0, 1)  # of the next two pages one is here already
    assert bench.loads._fetches[1].slots.keys() == {3}
    assert bench.hear("near", peers.FetchStatus(0, ((1, 3),))).orders == [], (
        "one of the three has come in vain, perhaps"
    )
    assert isinstance(requests(bench.hear("near", peers.FetchStatus(1, ((1, 3),))))[-1], peers.FetchPages), (
        "it will not come any more"
    )


def test_a_fetch_ends_when_the_rest_is_made_here() -> None:
    bench = Bench(slots=4)
    held = bench.pages.reserve("worker", b"", [key("x"), key("xx")])
    bench.fetch("abcd", NEAR, wait=True)
    bench.land(1, 0, 1)
    assert bench.loads._fetches[1].credit == 2, "no slot is left"
    assert isinstance(held, list)
    for each in reversed(held):
        assert isinstance(each, SlotReservation)
        bench.pages.abort(each)
    bench.seal("abcd")
    assert RetractFetch(1) in bench.beat().orders


def test_two_sources_at_one_store_are_one_store(bench: Bench) -> None:
    bench.fetch("ab", NEAR)
    bench.fetch("cd", PageSource("near", "inproc", 2))
    assert [request for request in requests(bench.beat()) if isinstance(request, peers.FetchHeartbeat)] == [
        peers.FetchHeartbeat(1, (1, 2))
    ]


def test_a_page_that_comes_damaged_four_times_is_asked_of_another(bench: Bench) -> None:
    bench.fetch("a", NEAR, FAR)
    for _ in range(3):
        assert requests(bench.land(1, damaged=(0,))) == [peers.ChecksumMismatch(1, 0)]
    last = bench.land(1, damaged=(0,))
    assert (requests(last), bench.loads.stats().damaged) == ([peers.CancelFetch(1)], 4)
    assert isinstance(requests(last, "far")[0], peers.FetchPages)


def test_a_doubt_that_is_not_answered_is_not_waited_for(bench: Bench) -> None:
    bench.fetch("a", NEAR)
    bench.land(1, damaged=(0,))
    assert not [request for request in requests(bench.beat()) if isinstance(request, peers.FetchPages)]
    bench.hear("near", peers.FetchStatus(1, ((1, 1),)))
    assert not [request for request in requests(bench.beat()) if isinstance(request, peers.FetchPages)]
    assert [request.fetch for request in requests(bench.beat()) if isinstance(request, peers.FetchPages)] == [2]


def test_reads_beyond_the_share_come_after_the_others() -> None:
    bench = Bench(slots=8, share=0.25)
    bench.store("abcd")
    first = bench.read("abcd")
    assert [order.key for order in first] == keys("abcd")[:2]
    orders = [order for each in first for order in bench.have_read(each).orders]
    assert [order.key for order in orders if isinstance(order, Read)] == keys("abcd")[2:]


def test_what_hangs_from_a_failed_read_is_told_of_apart(bench: Bench) -> None:
    bench.store("ab")
    parent = bench.pages.reserve("worker", b"", [key("a")])
    (order,) = bench.read("a")
    child = bench.pages.reserve("worker", key("a"), [key("ax")])
    assert isinstance(parent, list)
    assert isinstance(child, list)
    assert isinstance(parent[0], SlotReservation)
    bench.pages.abort(parent[0])
    outcome = bench.have_read(order, ok=False)
    assert (outcome.failed, outcome.unmade) == ([key("a")], [key("ax")])
