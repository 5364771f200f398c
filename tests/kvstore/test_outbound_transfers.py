"""What a store does for others, call by call."""

from baton import peer_protocol as peers
from kvstore.arena.host_page_pool import HostPagePool, SlotReservation
from kvstore.server.inbound_transfers import InboundResult
from kvstore.server.leases import PageWaiters
from kvstore.server.outbound_transfers import OutboundTransfers
from kvstore.transport.interface import AnswerPeer, SendPages, VerifySlot
from tests.kvstore.chains import key, keys


class Bench:
    """A server over an arena; what it would read from the disk is noted."""

    def __init__(self) -> None:
        self.pages = HostPagePool(8)
        self.waiting = PageWaiters()
        self.on_disk: dict[bytes, bytes] = {}
        self.brought: list[bytes] = []
        self.fetching: set[bytes] = set()  # keys that come from other stores
        self.server = OutboundTransfers(
            self.pages, self.waiting, 100, 3.0, self._bring, self.on_disk.get,
            lambda page: InboundResult(unmade=self.pages.drop(page)), self.fetching.__contains__, lambda key: False,
        )  # fmt: skip

    def _bring(self, links: object, now: float) -> InboundResult:
        assert isinstance(links, list)
        self.brought += [name for name, _ in links]
        return InboundResult()

    def write(self, word: str, checksum: int = 0) -> None:
        slots = self.pages.reserve("worker", b"", keys(word))
        assert isinstance(slots, list)
        for index, each in enumerate(slots):
            if not isinstance(each, SlotReservation):
                self.pages.unhold(each)
                continue
            page = self.pages.seal(each, checksum or index, hold=True)
            for waiter, place in self.waiting.page_arrived(page.key):
                self.server.arrived(waiter, place, page)
            self.pages.unhold(page)

    def ask(self, request: peers.PageRequest, now: float = 0.0) -> list[object]:
        outcome = self.server.peer_requested("peer", request, now)
        self.pages.validate()
        self.waiting.validate(self.server.fetches)
        return list(outcome.orders)


def want(fetch: int, word: str, credit: int, wait: bool = False, page_bytes: int = 100) -> peers.FetchPages:
    return peers.FetchPages(fetch, page_bytes, b"".join(keys(word)), wait, credit)


def test_what_is_here_is_sent_as_far_as_there_is_credit_and_held_until_served() -> None:
    bench = Bench()
    bench.write("abc")
    (serve,) = bench.ask(want(1, "abc", 2))
    assert isinstance(serve, SendPages)
    assert (serve.fetch, serve.pages) == (1, (peers.SentPage(0, 0), peers.SentPage(1, 1)))
    assert bench.pages.held == 2
    bench.server.served(serve.number)
    assert bench.pages.held == 0
    (rest,) = bench.ask(peers.FetchCredit(1, 3))
    assert isinstance(rest, SendPages)
    assert rest.pages == (peers.SentPage(2, 2),)
    assert bench.ask(peers.FetchCredit(1, 3)) == []
    assert bench.ask(peers.FetchHeartbeat(4, (1,))) == [AnswerPeer("peer", peers.FetchStatus(4, ((1, 3),)))]


def test_what_is_neither_here_nor_below_is_gone_and_said_so_until_it_is_heard() -> None:
    bench = Bench()
    bench.write("a")
    serve, gone = bench.ask(want(1, "abc", 3))
    assert isinstance(serve, SendPages), "first what is here"
    assert gone == AnswerPeer("peer", peers.FetchUnavailable(1, 1))
    assert bench.ask(peers.FetchCredit(1, 3)) == []
    assert bench.ask(peers.FetchHeartbeat(1, (1,))) == [gone, AnswerPeer("peer", peers.FetchStatus(1, ((1, 1),)))]
    assert bench.ask(peers.FetchHeartbeat(2, ())) == [AnswerPeer("peer", peers.FetchStatus(2, ()))]


def test_what_is_only_being_made_is_sent_when_it_is_sealed() -> None:
    bench = Bench()
    assert bench.ask(want(1, "ab", 2, wait=True)) == []
    bench.write("ab")
    assert bench.server.stats().sending == 2
    assert len(bench.waiting) == 0


def test_what_is_on_the_disk_is_brought() -> None:
    bench = Bench()
    bench.on_disk[key("ab")] = key("a")
    bench.write("a")
    (serve,) = bench.ask(want(1, "ab", 2))
    assert isinstance(serve, SendPages)
    assert bench.brought == [key("ab")]
    bench.write("ab")
    assert bench.server.stats().sending == 2


def test_a_want_that_makes_no_sense_is_refused() -> None:
    cut_short = peers.FetchPages(1, 100, key("a") + b"b", True, 2)
    for odd in (
        want(1, "", 0),
        want(1, "ab", 2, page_bytes=50),
        peers.FetchPages(1, 100, key("a") * 2, True, 2),
        cut_short,
    ):
        assert Bench().ask(odd) == [AnswerPeer("peer", peers.FetchUnavailable(1, 0))]


def test_a_want_of_the_same_number_replaces_the_first() -> None:
    bench = Bench()
    bench.ask(want(1, "ab", 2, wait=True))
    bench.ask(want(1, "cd", 1, wait=True))
    assert len(bench.waiting) == 1
    assert bench.waiting.awaited(key("c"))


def test_a_doubt_about_a_page_made_anew_is_about_the_new_one() -> None:
    bench = Bench()
    bench.write("a", checksum=7)
    (serve,) = bench.ask(want(1, "a", 1))
    assert isinstance(serve, SendPages)
    bench.server.served(serve.number)
    page = bench.pages.find(key("a"))
    assert page is not None
    bench.pages.drop(page)
    assert bench.ask(peers.ChecksumMismatch(1, 0)) == [AnswerPeer("peer", peers.FetchUnavailable(1, 0))]
    bench.write("a", checksum=8)
    (check,) = bench.ask(peers.ChecksumMismatch(1, 0))
    assert isinstance(check, VerifySlot)
    (again,) = bench.server.checked(check.number, intact=True).orders
    assert isinstance(again, SendPages)
    assert again.pages == (peers.SentPage(0, 8),)


def test_a_silent_peer_is_forgotten_not_its_transfers() -> None:
    bench = Bench()
    bench.write("a")
    (serve,) = bench.ask(want(1, "ab", 2, wait=True))
    assert isinstance(serve, SendPages)
    bench.server.tick(2.0, paused=0.0)
    assert bench.server.stats().fetches == 1
    bench.server.tick(3.5, paused=3.0)
    assert bench.server.stats().fetches == 1, "we were asleep"
    bench.server.tick(7.0, paused=0.0)
    stats = bench.server.stats()
    assert (stats.peers, stats.fetches, stats.sending, len(bench.waiting)) == (0, 0, 1, 0)
    bench.server.served(serve.number)
    assert bench.server.idle


def test_unwanted_and_unlisted_fetches_are_forgotten() -> None:
    bench = Bench()
    for number in (1, 2, 3):
        bench.ask(want(number, "ab", 1, wait=True))
    bench.ask(peers.CancelFetch(1))
    bench.ask(peers.FetchHeartbeat(1, (3,)))
    assert [fetch.number for fetch in bench.server.fetches] == [3]
