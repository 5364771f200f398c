"""EventTracker over lossy links: whatever is lost, a quiet network leaves the map equal to the truth."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.messages import PageRun, Snapshot
from kvstore.changes import page_runs, snapshot_parts
from kvstore.device_cache import DeviceCache
from kvstore.events import Batch, BlockStored, EncodedBatch, EventLog, apply, decode
from kvstore.prefix_map import PrefixMap
from kvstore.tracker import Action, Apply, Ask, EventTracker, Load
from tests.kvstore.chains import CHAINS, key, keys, parent


class Source:
    """A worker: a cache whose changes are published, and which answers snapshot requests."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.cache = DeviceCache(6)
        self.log = EventLog(holder, "model", 0.0)
        self.sent: list[EncodedBatch] = self.log.replay()

    def use(self, chain: str) -> None:
        pages = self.cache.take(keys(chain), len(chain))
        assert pages is not None
        for page in range(len(chain)):
            self.cache.publish(key(chain[: page + 1]), parent(chain, page), pages[page])
        self.cache.free(pages)
        if changes := self.cache.drain_events():
            self.sent.append(self.log.append(changes, "GPU", 16, 0.0))

    def snapshot(self) -> list[Snapshot]:
        runs = list(page_runs(((page.key, page.parent) for page in self.cache.pages()), "GPU"))
        single = [PageRun(run.parent, run.keys, run.medium) for run in runs]
        parts = [Snapshot(self.log.last, (run,), number, False) for number, run in enumerate(single)]
        return [*parts, Snapshot(self.log.last, (), len(parts), True)]


class TrackerMachine(RuleBasedStateMachine):
    """One router and one worker at a time; batches, requests and answers may each be lost or late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count()
        self.prefixes = PrefixMap()
        self.tracker = EventTracker()
        self.asked: list[str] = []
        self.answers: list[tuple[str, Snapshot]] = []
        self.restart()

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(holder=holder):
                    self.asked.append(holder)
                case Load(holder=holder, runs=runs):
                    self.prefixes.load_snapshot(holder, runs)
                case Apply(holder=holder, events=events):
                    if not apply(self.prefixes, holder, events):
                        self.do(self.tracker.lost(holder, self.now))

    @rule()
    def restart(self) -> None:
        if hasattr(self, "source"):
            self.tracker.forget(self.source.holder)
            self.prefixes.remove_holder(self.source.holder)
        self.source = Source(f"incarnation-{next(self.numbers)}")
        self.do(self.tracker.track(self.source.holder, self.now))

    @rule(chain=CHAINS)
    def work(self, chain: str) -> None:
        self.source.use(chain)

    @rule(lost=st.booleans())
    def batch_travels(self, lost: bool) -> None:
        if self.source.sent:
            batch = self.source.sent.pop(0)
            if not lost:
                self.do(self.tracker.batch(decode(batch.topic, batch.sequence, batch.payload), self.now))

    @rule(lost=st.booleans())
    def request_travels(self, lost: bool) -> None:
        if self.asked:
            holder = self.asked.pop(0)
            if not lost and holder == self.source.holder:
                self.answers += [(holder, part) for part in self.source.snapshot()]

    @rule(lost=st.booleans())
    def answer_travels(self, lost: bool) -> None:
        if self.answers:
            holder, part = self.answers.pop(0)
            if not lost:
                self.do(self.tracker.snapshot(holder, part, self.now))

    @rule()
    def time_passes(self) -> None:
        self.now += 0.6
        self.do(self.tracker.tick(self.now))

    @rule()
    def all_is_delivered(self) -> None:
        """The network is quiet and reliable for a while, and one more page is used."""
        for _ in range(3):
            self.source.use("abc")
            self.source.use("cba")
            for _ in range(3):
                while self.source.sent or self.asked or self.answers:
                    self.request_travels(lost=False)
                    self.answer_travels(lost=False)
                    self.batch_travels(lost=False)
                self.time_passes()
        assert self.tracker.following(self.source.holder)
        held = {page.key for page in self.source.cache.pages()}
        assert self.prefixes.pages(self.source.holder) == len(held)
        for page in self.source.cache.pages():
            self.prefixes.removed(self.source.holder, [page.key], "GPU")
        assert self.prefixes.pages(self.source.holder) == 0
        self.prefixes.load_snapshot(self.source.holder, [run for part in self.source.snapshot() for run in part.runs])

    @invariant()
    def nobody_else_is_in_the_map(self) -> None:
        self.prefixes.validate()
        assert set(self.prefixes.holders()) <= {self.source.holder}


TrackerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTracker = TrackerMachine.TestCase


def stored(sequence: int, chain: str) -> Batch:
    return Batch("h", sequence, (BlockStored(tuple(keys(chain)), None, (), 16, None, "GPU", None),))


def test_batches_that_overtake_the_snapshot_are_applied_after_it() -> None:
    tracker = EventTracker()
    assert tracker.track("h", 0.0) == [Ask("h")]
    assert tracker.track("h", 0.0) == []
    assert tracker.batch(stored(4, "a"), 0.0) == []
    assert tracker.batch(stored(5, "b"), 0.0) == []
    (snapshot,) = snapshot_parts(4, [])
    assert tracker.snapshot("h", snapshot, 0.0) == [Load("h", ()), Apply("h", stored(5, "b").events)]
    assert tracker.batch(stored(6, "c"), 0.0) == [Apply("h", stored(6, "c").events)]
    assert tracker.batch(stored(6, "c"), 0.0) == []
    assert tracker.batch(stored(8, "a"), 0.0) == [Ask("h")]
    assert not tracker.following("h")
    assert tracker.gaps == 1


def test_a_snapshot_in_pieces_that_do_not_fit_is_asked_for_again() -> None:
    tracker = EventTracker()
    tracker.track("h", 0.0)
    assert tracker.snapshot("h", Snapshot(1, (), 0, False), 0.0) == []
    assert tracker.snapshot("h", Snapshot(1, (), 2, True), 0.0) == [Ask("h")]
    assert tracker.snapshot("h", Snapshot(1, (), 0, False), 0.0) == []
    assert tracker.snapshot("h", Snapshot(2, (), 1, True), 0.0) == [Ask("h")]
    assert tracker.snapshot("h", Snapshot(3, (), 0, True), 0.0) == [Load("h", ())]


def test_silence_is_answered_by_asking_again() -> None:
    tracker = EventTracker()
    tracker.track("h", 0.0)
    assert tracker.tick(0.5) == []
    assert tracker.tick(1.0) == [Ask("h")]
    assert tracker.tick(1.5) == []


def test_strangers_are_ignored() -> None:
    tracker = EventTracker()
    assert tracker.batch(stored(0, "a"), 0.0) == []
    assert tracker.snapshot("h", Snapshot(0, ()), 0.0) == []
    assert tracker.lost("h", 0.0) == []
