"""Placement: the longest cached prefix, the least work, and a split only where it can work."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from router.placement import DecodeCandidate, Plan, PrefillCandidate, Wait, place


def decoder(
    name: str = "d0", node: str = "a", busy: int = 0, device: int = 0, store: int | None = 0
) -> DecodeCandidate:
    return DecodeCandidate(name, name, node, busy, device, store)


def prefiller(name: str = "p0", node: str = "a", busy: int = 0, device: int = 0, slots: int = 1) -> PrefillCandidate:
    return PrefillCandidate(name, name, node, busy, device, slots)


def test_missing_pages_are_prefilled_elsewhere() -> None:
    assert place(8, [decoder(store=3)], [prefiller()]) == Plan("d0", "p0", fetch=8, cached=3)


def test_nothing_missing_nothing_split() -> None:
    assert place(0, [decoder()], [prefiller()]) == Plan("d0")
    assert place(8, [decoder(store=9)], [prefiller()]) == Plan("d0", fetch=8, cached=8)
    assert place(8, [decoder(device=8, store=2)], [prefiller()]) == Plan("d0", cached=8)


def test_a_split_needs_a_prefill_worker_and_a_store_on_the_node() -> None:
    assert place(8, [decoder(node="b")], [prefiller()]) == Plan("d0")
    assert place(8, [decoder(store=None)], [prefiller()]) == Plan("d0")
    assert place(8, [decoder(store=5)], []) == Plan("d0", fetch=5, cached=5)


def test_a_full_prefill_worker_is_waited_for() -> None:
    assert isinstance(place(8, [decoder()], [prefiller(slots=0)]), Wait)
    other = decoder("d1", node="b", busy=100)
    assert place(8, [decoder(), other], [prefiller(slots=0)]) == Plan("d1")
    assert isinstance(place(8, [], [prefiller()]), Wait)


def test_the_longest_prefix_wins_until_it_costs_more_than_it_saves() -> None:
    assert place(8, [decoder("d0"), decoder("d1", device=6)], []) == Plan("d1", cached=6)
    assert place(8, [decoder("d0"), decoder("d1", device=6, busy=7)], []) == Plan("d0")


def test_the_prefill_worker_with_least_to_do_is_chosen() -> None:
    many = [prefiller("p0", busy=5), prefiller("p1", busy=5, device=3), prefiller("p2", slots=0)]
    assert place(8, [decoder()], many) == Plan("d0", "p1", fetch=8)


def test_a_local_plan_needs_nobody() -> None:
    plan = place(8, [decoder(store=8), decoder("d1", device=2, store=8)], [prefiller()], local=True)
    assert plan == Plan("d1")


@given(
    pages=st.integers(0, 50),
    decoders=st.lists(
        st.builds(
            DecodeCandidate,
            st.uuids().map(str),
            st.sampled_from("xyz"),
            st.sampled_from("ab"),
            st.integers(0, 99),
            st.integers(0, 60),
            st.none() | st.integers(0, 60),
        ),
        max_size=4,
    ),
    prefillers=st.lists(
        st.builds(
            PrefillCandidate,
            st.uuids().map(str),
            st.sampled_from("pqr"),
            st.sampled_from("ab"),
            st.integers(0, 99),
            st.integers(0, 60),
            st.integers(-1, 3),
        ),
        max_size=4,
    ),
    local=st.booleans(),
)
def test_every_plan_can_be_carried_out(
    pages: int, decoders: list[DecodeCandidate], prefillers: list[PrefillCandidate], local: bool
) -> None:
    plan = place(pages, decoders, prefillers, local=local)
    if isinstance(plan, Wait):
        assert not (local and decoders)
        return
    chosen = {d.incarnation: d for d in decoders}[plan.decode]
    assert 0 <= plan.fetch <= pages
    if local:
        assert (plan.fetch, plan.prefill) == (0, None)
    if plan.prefill is not None:
        maker = {p.incarnation: p for p in prefillers}[plan.prefill]
        assert maker.node == chosen.node
        assert maker.slots > 0
        assert chosen.store_pages is not None
        assert plan.fetch == pages > plan.cached
    elif plan.fetch:
        assert chosen.store_pages is not None
        assert plan.fetch <= chosen.store_pages
