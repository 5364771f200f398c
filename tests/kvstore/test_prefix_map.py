"""PrefixMap against a naive model, and what it does with events that can't be."""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.messages import Medium
from kvstore.changes import page_runs
from kvstore.prefix_map import MEDIA, Match, PrefixMap
from tests.kvstore.chains import CHAINS, key, keys, parent

HOLDERS = st.sampled_from(["one", "two", "three"])
MEDIUM = st.sampled_from(MEDIA)


class PrefixMapMachine(RuleBasedStateMachine):
    """The model: which (holder, word, tier) there are."""

    def __init__(self) -> None:
        super().__init__()
        self.map = PrefixMap()
        self.model: set[tuple[str, bytes, Medium]] = set()
        self.known: set[str] = set()

    def has(self, holder: str, name: bytes) -> bool:
        return any((holder, name, medium) in self.model for medium in MEDIA)

    @rule(holder=HOLDERS, chain=CHAINS, start=st.integers(0, 5), medium=MEDIUM)
    def stored(self, holder: str, chain: str, start: int, medium: Medium) -> None:
        start = min(start, len(chain) - 1)
        above = parent(chain, start)
        fits = self.map.stored(holder, above, keys(chain, start), medium)
        assert fits == (start == 0 or self.has(holder, above))
        self.known.add(holder)
        if fits:
            self.model |= {(holder, name, medium) for name in keys(chain, start)}

    @rule(holder=HOLDERS, chain=CHAINS, medium=MEDIUM)
    def removed(self, holder: str, chain: str, medium: Medium) -> None:
        self.map.removed(holder, [key(chain)], medium)
        self.model.discard((holder, key(chain), medium))

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
        self.map.load_snapshot(holder, page_runs(pages.items(), medium))
        self.known.add(holder)
        self.model = {entry for entry in self.model if entry[0] != holder} | {(holder, name, medium) for name in pages}

    @rule(chain=CHAINS)
    def match(self, chain: str) -> None:
        expected: dict[str, Match] = {}
        for holder in self.known:
            tiers: dict[Medium, int] = {}
            for name in keys(chain):
                here = [medium for medium in MEDIA if (holder, name, medium) in self.model]
                if not here:
                    break
                tiers[here[0]] = tiers.get(here[0], 0) + 1
            if tiers:
                expected[holder] = Match(sum(tiers.values()), tiers)
        assert self.map.match(keys(chain)) == expected

    @invariant()
    def is_valid(self) -> None:
        self.map.validate()
        assert set(self.map.holders()) == self.known
        assert self.map.stats().pages == len({name for _, name, _ in self.model})
        assert self.map.stats().entries == len({(holder, name) for holder, name, _ in self.model})
        for holder in self.known:
            assert self.map.pages(holder) == len({name for other, name, _ in self.model if other == holder})


PrefixMapMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPrefixMap = PrefixMapMachine.TestCase


def test_a_prefix_counts_only_without_a_gap_and_by_the_fastest_tier() -> None:
    prefixes = PrefixMap()
    prefixes.stored("worker", b"", keys("abcd"), "GPU")
    prefixes.stored("store", b"", keys("abcd"), "DISK")
    prefixes.stored("store", b"", keys("ab"), "CPU")
    prefixes.removed("worker", [key("ab")], "GPU")
    assert prefixes.match(keys("abcd")) == {
        "worker": Match(1, {"GPU": 1}),
        "store": Match(4, {"CPU": 2, "DISK": 2}),
    }
    assert prefixes.match([]) == {}


def test_a_long_prompt_is_matched_in_time() -> None:
    """128 thousand tokens in pages of 16, held by 8: a hint must not cost more than what it saves."""
    prefixes = PrefixMap()
    chain = [number.to_bytes(16, "big") for number in range(8_192)]
    for holder in range(8):
        prefixes.stored(str(holder), b"", chain, "CPU")
    started = time.perf_counter()
    assert prefixes.match(chain)["7"].pages == 8_192
    assert time.perf_counter() - started < 1.0
