"""DiskIndex against a disk on paper that is slow, full, broken, rotten and restarted, in any order."""

from collections import Counter, deque
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.config import Bytes, DiskConfig
from kvstore.disk.file_names import footprint
from kvstore.disk.index import RETRY_SECONDS, DiskIndex
from kvstore.disk.orders import (
    Deleted,
    DiskEvent,
    DiskPage,
    DiskResult,
    Open,
    OpenFailed,
    PagesRead,
    Read,
    ReadEnded,
    ReadOutcome,
    WriteEnded,
    Written,
)
from kvstore.events.changes import PagesCleared, PagesRemoved, PagesStored
from tests.kvstore.chains import CHAINS, key, keys, parent
from tests.kvstore.disk_fixtures import PaperDisk
from tests.support.thorough import automaton

PAGE = 1_000
FILE = footprint(PAGE)
SETTINGS = DiskConfig(path="disk", max_bytes=Bytes(32 * FILE), queue_pages=12)
NAMESPACE = b"n" * 16
FAULT = st.sampled_from(["", "", "", "full", "broken"])
PICK = st.integers(0, 11)


class DiskMachine(RuleBasedStateMachine):
    """A store, its disk, and a subscriber to its events."""

    @initialize()
    def start(self) -> None:
        self.disk = PaperDisk(PAGE, folders={"aa-5": 8 * FILE, "bb-6": 4 * FILE})
        self.now = 0.0
        self.slots = 0
        self.begin()
        self.work(10)

    def begin(self) -> None:
        self.index = DiskIndex(SETTINGS)
        self.writes: Counter[tuple[bytes, int]] = Counter()
        self.reads: Counter[tuple[bytes, int]] = Counter()
        self.read_orders: dict[int, list[tuple[bytes, int]]] = {}  # by number of the read
        self.rubbish: set[tuple[bytes, int]] = set()  # reads that went wrong
        self.damaged: dict[bytes, bool] = {}
        self.mirror: dict[bytes, bytes] = {}
        self.spoilt = False  # something has just been found so
        self.late: set[tuple[bytes, int]] = set()  # reads of pages that were found so; these may be written anew
        self.events: deque[DiskEvent] = deque()
        self.follow(self.index.open(NAMESPACE, PAGE, 1))

    def follow(self, result: DiskResult) -> None:
        for order in result.orders:
            if isinstance(order, Read):
                self.read_orders[order.number] = [(page.key, slot) for page, slot in order.pages]
            self.disk.submit(order)
        for ended in result.ended:
            match ended:
                case WriteEnded():
                    self.writes[ended.key, ended.slot] -= 1
                    assert self.writes[ended.key, ended.slot] == 0, "a write ended that was not on its way"
                case ReadEnded():
                    self.reads[ended.key, ended.slot] -= 1
                    assert self.reads[ended.key, ended.slot] == 0, "a read ended that was not on its way"
                    assert not ended.ok or ended.checksum == hash(ended.key) % 2**64
                    assert not ended.ok or (ended.key, ended.slot) not in self.rubbish, "the bytes of another page"
        for change in self.index.drain_events():
            match change:
                case PagesStored(above, stored):
                    for each in stored:
                        assert not above or above in self.mirror, "stored without what is before it"
                        assert each not in self.mirror
                        self.mirror[each] = above
                        above = each
                case PagesRemoved(removed):
                    for each in removed:
                        reading = {place for place, count in self.reads.items() if place[0] == each and count}
                        assert self.spoilt or reading <= self.late, "evicted while it is being read"
                        self.late |= reading
                        assert each not in self.mirror.values(), "removed before what is after it"
                        del self.mirror[each]
                case PagesCleared():
                    raise AssertionError("there are other tiers than this one")

    def hear(self, events: list[DiskEvent]) -> None:
        for event in events:
            self.spoilt = False
            if isinstance(event, PagesRead):
                bad = [self.read_orders[event.number][place] for place, outcome in event.outcomes if outcome != "ok"]
                self.spoilt = bool(bad)
                self.rubbish.update(bad)
            self.follow(self.index.handle(event))
        self.spoilt = False

    # --- what the store does ------------------------------------------------------------------------------------------

    @rule(word=CHAINS, start=st.integers(0, 3), damaged=st.sampled_from([0, 0, 0, 0, 1]))
    def write(self, word: str, start: int, damaged: int) -> None:
        start = min(start, len(word) - 1)
        pages: list[DiskPage] = []
        above = parent(word, start)
        for each in keys(word, start):
            self.slots += 1
            pages.append(DiskPage(each, above, self.slots, hash(each) % 2**64))
            self.writes[each, self.slots] += 1
            above = each
        may_write = self.index.wants(pages[0].key)
        assert not (may_write and self.index.has(pages[0].key))
        if damaged:
            self.damaged[pages[-1].key] = True
        self.follow(self.index.write(pages))

    @rule(words=st.lists(CHAINS, min_size=1, max_size=8))
    def fill(self, words: list[str]) -> None:
        """Write much, and let the disk keep up, but not with what it was reading."""
        for word in words:
            self.write(word, 0, 0)
            while self.disk.orders:
                self.hear(self.disk.step(100, "", frozenset(self.damaged)))

    @precondition(lambda self: self.mirror)
    @rule(pick=PICK, twice=st.booleans())
    def read(self, pick: int, twice: bool) -> None:
        here = sorted(self.mirror)
        deepest = here[pick % len(here)]
        chain = [deepest]
        while chain[0] in self.mirror and self.mirror[chain[0]]:
            chain.insert(0, self.mirror[chain[0]])
        assert self.index.prefix(chain) == len(chain)
        assert self.index.prefix(chain[1:], chain[0]) == len(chain) - 1
        for _ in range(1 + twice):
            pairs: list[tuple[bytes, int]] = []
            for each in chain:
                self.slots += 1
                pairs.append((each, self.slots))
                self.reads[each, self.slots] += 1
            self.follow(self.index.read_pages(pairs))

    @rule(word=CHAINS)
    def touch(self, word: str) -> None:
        self.index.touch(keys(word))

    @rule(seconds=st.sampled_from([1.0, RETRY_SECONDS]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.index.tick(self.now))

    # --- what the disk does -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.disk.orders)
    @rule(orders=st.integers(1, 6), pages=st.integers(1, 5), fault=FAULT, pick=PICK)
    def carry_out(self, orders: int, pages: int, fault: str, pick: int) -> None:
        for _ in range(orders):
            if not self.disk.orders:
                return
            self.hear(self.disk.step(pages, fault, frozenset(self.damaged), pick))
            fault = ""

    @rule()
    def work_off(self) -> None:
        self.work(100)

    def work(self, pages: int) -> None:
        """Everything goes well, until there is nothing left to do."""
        while self.disk.orders or self.disk.reads:
            if self.disk.orders:
                self.hear(self.disk.step(pages, ""))
            if self.disk.reads:
                self.hear(self.disk.read(0, pages, None))

    @precondition(lambda self: self.disk.reads)
    @rule(pick=PICK, pages=st.integers(1, 4), failure=st.sampled_from([None] * 7 + ["unreadable", "busy"]))
    def bring(self, pick: int, pages: int, failure: ReadOutcome | None) -> None:
        self.hear(self.disk.read(pick % len(self.disk.reads), pages, failure))

    @precondition(lambda self: self.disk.files)
    @rule(pick=PICK)
    def rot(self, pick: int) -> None:
        files = sorted(self.disk.files.values())
        self.disk.rotten.add(files[pick % len(files)])

    @rule(written=st.integers(0, 7), unlucky=st.sampled_from([False, False, False, False, True]))
    def kill(self, written: int, unlucky: bool) -> None:
        """Kill the store and start another."""
        if not unlucky or self.index.stats().state == "opening":
            return
        before = dict(self.mirror)
        self.disk.kill(written)
        self.begin()
        assert not self.mirror
        assert not self.index.wants(key("a"))
        while self.disk.orders and isinstance(self.disk.orders[0], Open):
            self.hear(self.disk.step(3, ""))
        if self.disk.bytes <= SETTINGS.max_bytes // 2:
            assert before.keys() <= self.mirror.keys(), "something that could be read has not been found again"

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self.index.validate(self.disk.holds)
        assert self.mirror == dict(self.index.pages())
        assert all(self.index.has(each) for each in self.mirror)
        stats = self.index.stats()
        assert stats.pages == len(self.mirror)
        assert stats.writing == self.writes.total()
        assert stats.reading == self.reads.total()
        assert self.disk.bytes <= SETTINGS.max_bytes, "more than is allowed"
        assert self.disk.bytes <= stats.bytes or stats.state == "opening"

    def teardown(self) -> None:
        self.work(100)
        assert not self.writes.total(), "a write has never ended"
        assert not self.reads.total(), "a read has never ended"


DiskMachine.TestCase.settings = automaton(count=400, steps=60)
TestDiskIndex = DiskMachine.TestCase


# --- the invariants notice what is wrong ------------------------------------------------------------------------------


def believes_failed_writes(original: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: DiskIndex, event: Written) -> None:
        original(self, Written(event.epoch, tuple((key, "ok") for key, _ in event.outcomes)))

    return mutant


def believes_corrupt_reads(original: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: DiskIndex, event: PagesRead) -> None:
        outcomes: list[tuple[int, ReadOutcome]] = [(place, "ok") for place, _ in event.outcomes]
        original(self, PagesRead(event.epoch, event.number, tuple(outcomes)))

    return mutant


def forgets_files_that_are_left(original: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: DiskIndex, event: Deleted) -> None:
        original(self, Deleted(event.epoch, (*event.deleted, *event.left)))

    return mutant


def writes_before_the_old_file_is_gone(self: DiskIndex, key: bytes) -> bool:
    return self._accepting and not (key in self._pages or key in self._coming)


def evicts_parents_first(self: DiskIndex) -> None:
    page = next(page for page in self._pages.validate().values())
    self._drop(page)


def writes_without_limit(original: Callable[..., bool]) -> Callable[..., bool]:
    def mutant(self: DiskIndex, *page: object) -> bool:
        limit, self._limit = self._limit, 2**60
        try:
            return original(self, *page)
        finally:
            self._limit = limit

    return mutant


def forgets_to_end(original: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: DiskIndex, event: Written) -> None:
        original(self, event)
        if event.reason:
            self._out.ended.clear()

    return mutant


MUTATIONS = {
    "believes failed writes": ("_written", believes_failed_writes(DiskIndex._written)),
    "believes corrupt reads": ("_pages_read", believes_corrupt_reads(DiskIndex._pages_read)),
    "evicts what is being read": ("_evict", evicts_parents_first),
    "writes without limit": ("_admit", writes_without_limit(DiskIndex._admit)),
    "forgets to end failed writes": ("_written", forgets_to_end(DiskIndex._written)),
    "forgets files that are left": ("_deleted", forgets_files_that_are_left(DiskIndex._deleted)),
    "writes before the old file is gone": ("wants", writes_before_the_old_file_is_gone),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_invariants_catch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskIndex, *MUTATIONS[name])
    if name == "writes without limit":
        small = msgspec.structs.replace(SETTINGS, max_bytes=Bytes(16 * FILE))  # it is soon full
        monkeypatch.setattr("tests.kvstore.test_disk_index.SETTINGS", small)
    caught = settings(
        max_examples=2_000, stateful_step_count=60, deadline=None, phases=[Phase.generate], database=None,
        derandomize=True, print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(DiskMachine, settings=caught)


# --- single cases -----------------------------------------------------------------------------------------------------


def opened(settings: DiskConfig = SETTINGS) -> tuple[DiskIndex, PaperDisk]:
    index, disk = DiskIndex(settings), PaperDisk(PAGE)
    finish(index, disk, index.open(NAMESPACE, PAGE, 1))
    return index, disk


def finish(index: DiskIndex, disk: PaperDisk, result: DiskResult, fault: str = "") -> list[object]:
    """Carry out all orders; what ended."""
    ended = list(result.ended)
    for order in result.orders:
        disk.submit(order)
    while disk.orders or disk.reads:
        events = disk.step(100, fault) if disk.orders else disk.read(0, 100, None)
        for event in events:
            result = index.handle(event)
            ended += result.ended
            for order in result.orders:
                disk.submit(order)
    return ended


def pages(chain: str) -> list[DiskPage]:
    return [DiskPage(each, parent(chain, place), place, hash(each) % 2**64) for place, each in enumerate(keys(chain))]


def test_without_a_path_there_is_no_disk() -> None:
    index = DiskIndex(DiskConfig())
    assert not index.open(NAMESPACE, PAGE, 1).orders
    assert index.stats().state == "off"
    assert not index.wants(key("a"))
    assert index.write(pages("ab")).ended == [WriteEnded(key("a"), 0), WriteEnded(key("ab"), 1)]
    assert not index.tick(1e9).orders


def test_nothing_is_wanted_or_readable_before_the_directory_is_known() -> None:
    index = DiskIndex(SETTINGS)
    index.open(NAMESPACE, PAGE, 1)
    assert index.stats().state == "opening"
    assert not index.wants(key("a"))
    assert index.prefix(keys("abc")) == 0


def test_the_queue_is_bounded() -> None:
    index, _ = opened(DiskConfig(path="disk", max_bytes=SETTINGS.max_bytes, queue_pages=2))
    ended = index.write(pages("abc")).ended
    assert ended == [WriteEnded(key("abc"), 2)]
    assert index.wants(key("b"))  # else no store would offer it, and the count would show no failure
    assert index.write(pages("b")).ended == [WriteEnded(key("b"), 0)]
    assert index.stats().dropped_writes == 2


def test_a_disk_that_fills_up_makes_a_smaller_tier() -> None:
    index, disk = opened()
    for word in ("aaaa", "bbbb", "cccc"):
        finish(index, disk, index.write(pages(word)))
    before = index.stats().bytes
    finish(index, disk, index.write(pages("ab")), fault="full")
    index.tick(0.0)
    finish(index, disk, index.tick(RETRY_SECONDS))
    for word in ("ba", "ca", "acaa", "bcaa"):
        finish(index, disk, index.write(pages(word)))
    stats = index.stats()
    assert stats.state == "on"
    assert stats.evictions > 0
    assert disk.bytes <= stats.bytes <= before


def test_a_directory_that_could_not_be_opened_is_tried_again() -> None:
    index = DiskIndex(SETTINGS)
    (order,) = index.open(NAMESPACE, PAGE, 1).orders
    assert isinstance(order, Open)
    index.handle(OpenFailed(order.epoch, "in use"))
    assert index.stats().state == "failed: in use"
    index.tick(0.0)
    (again,) = index.tick(RETRY_SECONDS).orders
    assert isinstance(again, Open)
    assert again.epoch != order.epoch


def test_too_little_room_is_said_and_not_tried() -> None:
    index = DiskIndex(DiskConfig(path="disk", max_bytes=Bytes(40_000)))
    assert not index.open(NAMESPACE, PAGE, 1).orders
    assert index.stats().state.startswith("failed: disk.max_bytes is 40000")
    index.tick(0.0)
    assert not index.tick(1e9).orders


def test_another_namespace_drops_old_events() -> None:
    index, disk = opened()
    finish(index, disk, index.write(pages("ab")))
    index.drain_events()
    index.open(b"m" * 16, PAGE, 1)
    assert index.drain_events() == [], "whoever opened it anew tells of that"
    assert not index.has(key("a"))
    assert index.handle(Deleted(1, ())) == DiskResult()


def test_what_was_touched_goes_last() -> None:
    index, disk = opened()
    words = ["aaaa", "bbbb", "cccc", "abaa", "acaa", "baaa", "bcaa", "caaa", "cbaa", "abbb"]
    for word in words:
        finish(index, disk, index.write(pages(word)))
        index.touch(keys("aaaa"))
    assert index.stats().evictions > 0
    assert index.prefix(keys("aaaa")) == 4


def test_a_page_that_there_was_no_descriptor_for_stays() -> None:
    index, disk = opened()
    finish(index, disk, index.write(pages("ab")))
    (order,) = index.read_pages([(key("a"), 7)]).orders
    disk.submit(order)
    ended = [each for event in disk.read(0, 1, "busy") for each in index.handle(event).ended]
    assert [each.ok for each in ended if isinstance(each, ReadEnded)] == [False]
    assert index.prefix(keys("ab")) == 2


def test_the_speed_is_that_of_the_reads() -> None:
    index, disk = opened()
    assert not index.speed.measured
    finish(index, disk, index.write(pages("abca")))
    finish(index, disk, index.read_pages([(each, slot) for slot, each in enumerate(keys("abca"))]))
    assert index.speed.measured
    assert index.speed.latency == pytest.approx(0.001)
    assert index.speed.bytes_per_second == pytest.approx(4 * PAGE / 0.001)
