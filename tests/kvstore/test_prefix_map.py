"""PrefixMap against a naive model, what it does with events that can't be, and what a single event may cost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.messages import Medium, PageSegment
from kvstore.events.changes import digest, page_runs
from kvstore.prefix_map import key_runs as runs_module
from kvstore.prefix_map.key_runs import KeyRun, KeyRuns
from kvstore.prefix_map.prefix_map import MEDIA, PrefixMap, PrefixMatch
from tests.kvstore.chains import CHAINS, key, keys, parent
from tests.support.thorough import automaton

HOLDERS = st.sampled_from(["one", "two", "three"])
MEDIUM = st.sampled_from(MEDIA)
ANY_KEYS = st.lists(CHAINS.map(key), max_size=8)
"""Keys of several chains in any order, some of them twice: what no honest holder says."""


class PrefixMapMachine(RuleBasedStateMachine):
    """The model: which (holder, key, tier) there are. Runs are kept short, so that they are full soon."""

    max_run = 3

    def __init__(self) -> None:
        super().__init__()
        runs_module.MAX_RUN, self.restored = self.max_run, runs_module.MAX_RUN
        self.map = PrefixMap()
        self.model: set[tuple[str, bytes, Medium]] = set()
        self.known: set[str] = set()

    def teardown(self) -> None:
        runs_module.MAX_RUN = self.restored

    def has(self, holder: str, name: bytes) -> bool:
        return any((holder, name, medium) in self.model for medium in MEDIA)

    def tell(self, holder: str, above: bytes, names: Sequence[bytes], medium: Medium) -> None:
        fits = self.map.stored(holder, above, names, medium)
        assert fits == (not above or self.has(holder, above))
        self.known.add(holder)
        if fits:
            self.model |= {(holder, name, medium) for name in names}

    @rule(holder=HOLDERS, chain=CHAINS, start=st.integers(0, 5), medium=MEDIUM)
    def stored(self, holder: str, chain: str, start: int, medium: Medium) -> None:
        start = min(start, len(chain) - 1)
        self.tell(holder, parent(chain, start), keys(chain, start), medium)

    @rule(holder=HOLDERS, above=st.just(b"") | CHAINS.map(key), names=ANY_KEYS, medium=MEDIUM)
    def stored_nonsense(self, holder: str, above: bytes, names: list[bytes], medium: Medium) -> None:
        self.tell(holder, above, tuple(names), medium)

    @rule(holder=HOLDERS, chain=CHAINS, start=st.integers(0, 5), medium=MEDIUM, backwards=st.booleans())
    def removed(self, holder: str, chain: str, start: int, medium: Medium, backwards: bool) -> None:
        names = keys(chain, min(start, len(chain) - 1))
        self.take(holder, names[::-1] if backwards else names, medium)

    @rule(holder=HOLDERS, names=ANY_KEYS, medium=MEDIUM)
    def removed_nonsense(self, holder: str, names: list[bytes], medium: Medium) -> None:
        self.take(holder, tuple(names), medium)

    def take(self, holder: str, names: Sequence[bytes], medium: Medium) -> None:
        self.map.removed(holder, names, medium)
        self.model -= {(holder, name, medium) for name in names}

    @rule(holder=HOLDERS)
    def cleared(self, holder: str) -> None:
        self.map.cleared(holder)
        self.known.add(holder)
        self.model = {entry for entry in self.model if entry[0] != holder}

    @rule(holder=HOLDERS)
    def removed_holder(self, holder: str) -> None:
        self.map.remove_holder(holder)
        self.known.discard(holder)
        self.model = {entry for entry in self.model if entry[0] != holder}

    @rule(holder=HOLDERS, chains=st.lists(CHAINS, max_size=3), medium=MEDIUM)
    def loaded(self, holder: str, chains: list[str], medium: Medium) -> None:
        pages = {key(chain[: page + 1]): parent(chain, page) for chain in chains for page in range(len(chain))}
        assert self.map.load_snapshot(holder, page_runs(pages.items(), medium))
        self.known.add(holder)
        self.model = {entry for entry in self.model if entry[0] != holder} | {(holder, name, medium) for name in pages}

    @rule(chain=CHAINS)
    def match(self, chain: str) -> None:
        expected: dict[str, PrefixMatch] = {}
        for holder in self.known:
            tiers: dict[Medium, int] = {}
            for name in keys(chain):
                here = [medium for medium in MEDIA if (holder, name, medium) in self.model]
                if not here:
                    break
                tiers[here[0]] = tiers.get(here[0], 0) + 1
            if tiers:
                expected[holder] = PrefixMatch(sum(tiers.values()), tiers)
        assert self.map.match(keys(chain)) == expected

    @invariant()
    def is_valid(self) -> None:
        self.map.validate()
        assert set(self.map.holders()) == self.known
        stats = self.map.stats()
        assert stats.pages == len({name for _, name, _ in self.model})
        assert stats.entries == len({(holder, name) for holder, name, _ in self.model})
        for holder in self.known:
            assert self.map.pages(holder) == len({name for other, name, _ in self.model if other == holder})
            assert self.map.digest(holder) == self.digest(holder)

    def digest(self, holder: str) -> int:
        result = 0
        for other, name, medium in self.model:
            result ^= digest([name], medium) if other == holder else 0
        return result


class WithLongRuns(PrefixMapMachine):
    max_run = runs_module.MAX_RUN


PrefixMapMachine.TestCase.settings = automaton(count=150, steps=40)
TestPrefixMap = PrefixMapMachine.TestCase
WithLongRuns.TestCase.settings = automaton(count=60, steps=40)
TestWithLongRuns = WithLongRuns.TestCase


# --- the model test finds what it is there to find --------------------------------------------------------------------


def fit_whatever_the_holders(run: KeyRun, after: KeyRun) -> bool:
    return len(run.keys) + len(after.keys) <= runs_module.MAX_RUN


def never_join(self: KeyRuns, run: KeyRun) -> None:
    pass


def point_nowhere(self: KeyRuns, names: Sequence[bytes], run: KeyRun) -> None:
    for name in names:
        self.index.setdefault(name, run)


def count_what_is_not_there(self: PrefixMap, holder: str, names: Iterable[bytes], medium: Medium) -> None:
    names = list(names)
    before = self.digest(holder)
    _removed(self, holder, names, medium)
    if (me := self._holders.get(holder)) is not None and names:
        me.digest = before ^ digest(names, medium)


def strip_nothing(self: KeyRuns, field: int) -> None:
    pass


_removed = PrefixMap.removed


@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (runs_module, "_fit", fit_whatever_the_holders),
        (KeyRuns, "_settle", never_join),
        (KeyRuns, "_point", point_nowhere),
        (KeyRuns, "strip", strip_nothing),
        (PrefixMap, "removed", count_what_is_not_there),
    ],
)
def test_a_mistake_would_be_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, method, mutant)
    once = settings(
        max_examples=200, stateful_step_count=30, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], print_blob=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_state_machine_as_test(PrefixMapMachine, settings=once)


# --- by example -------------------------------------------------------------------------------------------------------


@pytest.mark.technique("Prefix reuse by a radix tree")
def test_a_prefix_counts_only_without_a_gap_and_by_the_fastest_tier() -> None:
    prefixes = PrefixMap()
    prefixes.stored("worker", b"", keys("abcd"), "GPU")
    prefixes.stored("store", b"", keys("abcd"), "DISK")
    prefixes.stored("store", b"", keys("ab"), "CPU")
    prefixes.removed("worker", [key("ab")], "GPU")
    assert prefixes.match(keys("abcd")) == {
        "worker": PrefixMatch(1, {"GPU": 1}),
        "store": PrefixMatch(4, {"CPU": 2, "DISK": 2}),
    }
    assert prefixes.match([]) == {}


def test_runs_join_in_any_order_after_a_holder_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MAX_RUN", 3)
    for _ in range(64):  # the order is that of a set
        prefixes = PrefixMap()
        prefixes.stored("one", b"", keys("baaaaa"), "GPU")
        prefixes.stored("two", b"", keys("b"), "GPU")
        prefixes.stored("two", b"", keys("ba"), "CPU")
        prefixes.cleared("two")
        prefixes.validate()


def test_part_of_a_key_is_left_out_and_told() -> None:
    prefixes = PrefixMap()
    good = PageSegment(b"", b"".join(keys("ab")), "CPU")
    assert not prefixes.load_snapshot(
        "h", [good, PageSegment(b"", b"x" * 17, "CPU"), PageSegment(key("z"), key("zz"), "CPU")]
    )
    assert prefixes.match(keys("ab"))["h"].pages == 2
    assert prefixes.pages("h") == 2


def test_the_same_set_has_the_same_digest_however_it_came_about() -> None:
    one, two = PrefixMap(), PrefixMap()
    chain = numbered(3_000)
    one.stored("h", b"", chain, "CPU")
    for start in range(0, 3_000, 7):
        two.stored("h", chain[start - 1] if start else b"", chain[start : start + 7], "CPU")
        two.stored("h", chain[start - 1] if start else b"", chain[start : start + 9], "CPU")
    assert one.digest("h") == two.digest("h") != 0
    two.stored("h", b"", chain, "GPU")
    assert one.digest("h") != two.digest("h")
    two.removed("h", chain, "CPU")
    assert one.digest("h") != two.digest("h"), "the same pages on another tier"
    two.removed("h", chain[::-1], "GPU")
    assert two.digest("h") == 0


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each change of the table touched."""
    counts: list[int] = []
    point = KeyRuns._point

    def counting(self: KeyRuns, names: Sequence[bytes], run: KeyRun) -> None:
        counts.append(len(names))
        point(self, names, run)

    monkeypatch.setattr(KeyRuns, "_point", counting)
    return counts


@pytest.mark.technique("Prefix reuse by a radix tree")
def test_a_page_costs_no_more_in_a_long_chain(touched: list[int]) -> None:
    """Whatever is said about one page touches the keys of a few runs at most, not those of its chain."""
    prefixes = PrefixMap()
    chain = numbered(50_000)
    prefixes.stored("one", b"", chain, "CPU")
    prefixes.stored("two", b"", chain, "CPU")
    touched.clear()
    events = 0
    for page in range(10, 50_000, 97):
        prefixes.removed("one", [chain[page]], "CPU")
        prefixes.removed("two", [chain[page]], "CPU")
        prefixes.stored("two", chain[page - 1], [chain[page]], "CPU")
        prefixes.stored("one", chain[page - 1], [chain[page]], "CPU")
        events += 4
    assert sum(touched) <= 3 * runs_module.MAX_RUN * events
    prefixes.validate()


def test_evicting_a_chain_page_by_page_touches_each_page_a_few_times(touched: list[int]) -> None:
    prefixes = PrefixMap()
    chain = numbered(20_000)
    for holder in "abc":
        prefixes.stored(holder, b"", chain, "GPU")
    touched.clear()
    for page in reversed(chain):
        prefixes.removed("a", [page], "GPU")
    assert sum(touched) <= 4 * len(chain)
    assert prefixes.stats().runs <= 2 + len(chain) // runs_module.MAX_RUN


def test_pages_said_twice_in_one_breath_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    are_new = PrefixMap._are_new

    def counting(self: PrefixMap, names: list[bytes]) -> bool:
        looked_at.append(len(names))
        return are_new(self, names)

    monkeypatch.setattr(PrefixMap, "_are_new", counting)
    prefixes = PrefixMap()
    prefixes.stored("h", b"", [name for name in numbered(10_000) for _ in range(2)], "CPU")
    assert sum(looked_at) <= 20_000
    assert prefixes.pages("h") == 10_000
    prefixes.validate()


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1, count + 1)]
