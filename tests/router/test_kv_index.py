"""Prefixes over lossy links: whatever is lost, repeated, late or damaged, quiet leaves the map equal to the truth."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.messages import Medium, PageSegment, Snapshot
from kvstore.client.device_block_manager import DeviceBlockManager
from kvstore.events.changes import packed_digest, page_runs
from kvstore.events.wire_format import EncodedKvEventBatch, KvEventBatch, KvEventLog, decode
from kvstore.prefix_map.event_tracker import EventTracker, TrackerAction
from kvstore.prefix_map.prefix_map import MEDIA, PrefixMap
from router.placement.kv_index import KvIndex
from tests.kvstore.chains import CHAINS, key, keys, parent
from tests.support.thorough import automaton

FATES = st.sampled_from(["arrives", "is lost", "comes twice", "is overtaken"])
TIERS = st.sampled_from(["CPU", "DISK"])


class Source:
    """A store of two tiers: its changes are published, and it answers snapshot requests."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.caches: dict[Medium, DeviceBlockManager] = {"CPU": DeviceBlockManager(6), "DISK": DeviceBlockManager(8)}
        self.log = KvEventLog(holder, "model", 0.0)
        self.sent: list[EncodedKvEventBatch] = [self.log.batch(0)]

    def use(self, chain: str, medium: Medium) -> None:
        cache = self.caches[medium]
        pages = cache.allocate_with_prefix(keys(chain), len(chain))
        for page in range(len(chain)):
            cache.cache_block(key(chain[: page + 1]), parent(chain, page), pages[page])
        cache.free(pages)
        if changes := cache.drain_events():
            self.sent.append(self.log.append([(medium, changes)], 16, 0.0))

    def runs(self) -> list[PageSegment]:
        return [
            run
            for medium, cache in self.caches.items()
            for run in page_runs(((page.key, page.parent) for page in cache.pages()), medium)
        ]

    def snapshot(self) -> list[Snapshot]:
        parts = [Snapshot(self.log.last, (run,), number, False) for number, run in enumerate(self.runs())]
        return [*parts, Snapshot(self.log.last, (), len(parts), True)]

    def holds(self) -> set[tuple[bytes, Medium]]:
        return {(page.key, medium) for medium, cache in self.caches.items() for page in cache.pages()}


class PrefixesMachine(RuleBasedStateMachine):
    """One router and one store at a time, and four one-way links between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count()
        self.prefixes = KvIndex()
        self.requests: list[str] = []
        self.answers: list[tuple[str, Snapshot]] = []
        self.beats: list[tuple[str, int, int]] = []
        self.restart()

    @rule()
    def restart(self) -> None:
        if hasattr(self, "source"):
            self.prefixes.forget(self.source.holder)
        self.source = Source(f"incarnation-{next(self.numbers)}")
        self.requests += self.prefixes.follow(self.source.holder, self.now)

    @rule(chain=CHAINS, medium=TIERS)
    def work(self, chain: str, medium: Medium) -> None:
        self.source.use(chain, medium)

    @rule(name=CHAINS.map(key), medium=TIERS, gone=st.booleans())
    def damage(self, name: bytes, medium: Medium, gone: bool) -> None:
        """Remove a page from the map, or add a wrong one, without an event."""
        if self.source.holder in self.prefixes.map.holders():
            change = (
                self.prefixes.map.removed if gone else lambda *args: self.prefixes.map.stored(args[0], b"", *args[1:])
            )
            change(self.source.holder, [name], medium)

    # --- the network ---

    def next_of(self, link: list[Any], fate: str) -> list[Any]:
        """What arrives of the next message of a link."""
        if not link:
            return []
        if fate == "is overtaken" and len(link) > 1:
            link[0], link[1] = link[1], link[0]
        message = link.pop(0)
        return {"is lost": [], "comes twice": [message, message]}.get(fate, [message])

    @rule(fate=FATES)
    def batch_travels(self, fate: str) -> None:
        for batch in self.next_of(self.source.sent, fate):
            read = decode(batch.topic, batch.sequence, batch.payload)
            self.requests += self.prefixes.apply_batch(read, self.now)

    @rule(fate=FATES)
    def request_travels(self, fate: str) -> None:
        for holder in self.next_of(self.requests, fate):
            if holder == self.source.holder:
                self.answers += [(holder, part) for part in self.source.snapshot()]

    @rule(fate=FATES)
    def answer_travels(self, fate: str) -> None:
        for holder, part in self.next_of(self.answers, fate):
            self.requests += self.prefixes.apply_snapshot(holder, part, self.now)

    @rule()
    def beat(self) -> None:
        self.beats.append((self.source.holder, self.source.log.last, self.source.log.digest))

    @rule(fate=FATES)
    def beat_travels(self, fate: str) -> None:
        for holder, sequence, digest in self.next_of(self.beats, fate):
            self.requests += self.prefixes.heartbeat(holder, sequence, digest, self.now)

    @rule()
    def all_is_lost(self) -> None:
        for link in (self.source.sent, self.requests, self.answers, self.beats):
            link.clear()

    @rule()
    def time_passes(self) -> None:
        self.now += 0.6
        self.requests += self.prefixes.tick(self.now)

    @rule()
    def quiet(self) -> None:
        """Nothing is lost for a while, and nothing happens any more."""
        for _ in range(150):
            for _ in range(3):
                while self.source.sent or self.requests or self.answers or self.beats:
                    self.request_travels("arrives")
                    self.answer_travels("arrives")
                    self.batch_travels("arrives")
                    self.beat_travels("arrives")
                self.beat()
            if self.contents() == self.source.holds() and self.prefixes._tracker.following(self.source.holder):
                break
            self.time_passes()
        assert self.contents() == self.source.holds()
        assert self.prefixes._tracker.following(self.source.holder)

    def contents(self) -> set[tuple[bytes, Medium]]:
        """What the map knows of the one holder that there is, whose place is then the first."""
        runs = self.prefixes.map._all_runs()
        return {
            (name, medium)
            for run in runs
            for name in run.keys
            for place, medium in enumerate(MEDIA)
            if run.mask >> self.shift() + place & 1
        }

    def shift(self) -> int:
        holder = self.prefixes.map._holders.get(self.source.holder)
        return 0 if holder is None else holder.shift

    @invariant()
    def nobody_else_is_in_the_map(self) -> None:
        self.prefixes.map.validate()
        assert set(self.prefixes.map.holders()) <= {self.source.holder}

    @invariant()
    def the_log_has_the_digest_of_what_is_held(self) -> None:
        result = 0
        for run in self.source.runs():
            result ^= packed_digest(run.keys, run.medium)
        assert self.source.log.digest == result


PrefixesMachine.TestCase.settings = automaton(count=150, steps=50)
TestPrefixes = PrefixesMachine.TestCase


# --- the machine finds what it is there to find -----------------------------------------------------------------------


def believe_every_digest(self: EventTracker, *args: object) -> list[TrackerAction]:
    return []


def overlook_gaps(self: EventTracker, batch: KvEventBatch, now: float) -> list[TrackerAction]:
    source = self._sources.get(batch.holder)
    if source is not None and source.following:
        source.next = max(source.next, batch.sequence)
    return _batch(self, batch, now)


def never_late(self: EventTracker, now: float) -> list[TrackerAction]:
    for source in self._sources.values():
        source.claim = None
    return _tick(self, now)


def keep_what_was(self: PrefixMap, holder: str, runs: Any) -> bool:
    return self.extend(holder, runs)


_batch, _tick = EventTracker.batch, EventTracker.tick


@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (EventTracker, "_compare", believe_every_digest),
        (EventTracker, "tick", never_late),
        (PrefixMap, "load_snapshot", keep_what_was),
    ],
)
def test_a_mistake_would_be_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PrefixesMachine, settings=settings(_ONCE, max_examples=2_000))


def test_digests_alone_find_what_gaps_would_have_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nets under one another: with one taken away the other holds."""
    monkeypatch.setattr(EventTracker, "batch", overlook_gaps)
    run_state_machine_as_test(PrefixesMachine, settings=_ONCE)


_ONCE = settings(
    max_examples=150, stateful_step_count=50, deadline=None, database=None, derandomize=True,
    phases=[Phase.generate], print_blob=False,
)  # fmt: skip
