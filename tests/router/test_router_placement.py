"""Placement: the quickest way to a covered prefix, loads only where they pay, and a split only where it can work."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.messages import Source, TierRun, TierSpeed
from kvstore.cost import DEFAULT_PREFILL_RATE, DEFAULT_SPEEDS
from router.candidates import DecodeCandidate, PrefillCandidate
from router.placement import Plan, Wait, place
from router.reach import Prefix, Store

PREFIX = Prefix(pages=8, page_size=10, page_bytes=1_000)
RATE = 100.0  # tokens per second: a page is computed in 0.1 s
QUICK = TierSpeed("disk", latency=0.01, bytes_per_second=1e6)  # a page is loaded in 1 ms
SLOW = TierSpeed("disk", latency=0.01, bytes_per_second=1e3)  # a page is loaded in 1 s
NEAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e6)
FAR = TierSpeed("remote", latency=0.02, bytes_per_second=1e3)


def decoder(name: str = "d0", node: str = "a", busy: int = 0, device: int = 0) -> DecodeCandidate:
    return DecodeCandidate(name, name, node, busy, device, RATE)


def prefiller(name: str = "p0", node: str = "a", busy: int = 0, device: int = 0, slots: int = 1) -> PrefillCandidate:
    return PrefillCandidate(name, name, node, busy, device, slots, RATE)


def store(
    node: str = "a", host: int = 0, disk: int = 0, *, serves: bool = True, speeds: tuple[TierSpeed, ...] = (QUICK, NEAR)
) -> Store:
    return Store(f"s-{node}", node, f"tcp://{node}" if serves else "", host, disk, *speeds)


def source(node: str, pages: int) -> Source:
    return Source(f"s-{node}", f"tcp://{node}", pages)


def plan(
    decoders: list[DecodeCandidate], prefillers: list[PrefillCandidate], stores: list[Store], *, local: bool = False
) -> Plan:
    choice = place(PREFIX, decoders, prefillers, stores, local=local)
    assert isinstance(choice, Plan)
    return choice


# --- one node ---


def test_missing_pages_are_prefilled_elsewhere() -> None:
    choice = plan([decoder()], [prefiller()], [store(host=3)])
    assert choice == Plan("d0", "p0", fetch=8, cached=3, store="s-a")
    assert choice.awaited
    assert choice.predicted.compute == pytest.approx(0.5)
    assert choice.predicted.total == pytest.approx(0.5)


def test_nothing_missing_nothing_split() -> None:
    empty = Prefix(0, 10, 1_000)
    assert place(empty, [decoder()], [prefiller()], [store()]) == Plan("d0")
    assert plan([decoder()], [prefiller()], [store(host=8)]) == Plan("d0", fetch=8, cached=8, store="s-a")
    assert plan([decoder(device=8)], [prefiller()], [store(host=2)]) == Plan("d0", cached=8)


def test_a_split_needs_a_prefill_worker_and_a_store_on_both_nodes() -> None:
    assert plan([decoder(node="b")], [prefiller()], [store()]) == Plan("d0")
    assert plan([decoder(node="b")], [prefiller()], [store("b")]) == Plan("d0")
    assert plan([decoder()], [prefiller()], []) == Plan("d0")
    assert plan([decoder()], [], [store(host=5)]) == Plan("d0", fetch=5, cached=5, store="s-a")


def test_full_prefill_workers_are_waited_for() -> None:
    full = prefiller(slots=0)
    assert isinstance(place(PREFIX, [decoder()], [full], [store()]), Wait)
    assert isinstance(place(PREFIX, [decoder(node="b")], [full], [store("a"), store("b")]), Wait)
    assert isinstance(place(PREFIX, [], [prefiller()], [store()]), Wait)
    assert plan([decoder(), decoder("d1", node="b", busy=100)], [full], [store()]) == Plan("d1")


def test_the_longest_prefix_wins_until_it_costs_more_than_it_saves() -> None:
    assert plan([decoder("d0"), decoder("d1", device=6)], [], []) == Plan("d1", cached=6)
    assert plan([decoder("d0"), decoder("d1", device=6, busy=7)], [], []) == Plan("d0")


def test_the_prefill_worker_that_is_done_first_is_chosen() -> None:
    many = [prefiller("p0", busy=5), prefiller("p1", busy=5, device=3), prefiller("p2", slots=0)]
    assert plan([decoder()], many, [store()]) == Plan("d0", "p1", fetch=8, cached=3, store="s-a")
    quick = replace(prefiller("p3", busy=20), rate=RATE * 10)
    assert plan([decoder()], [*many, quick], [store()]).prefill == "p3"


def test_a_local_plan_needs_nobody() -> None:
    cached = [store(host=8), store("b", host=8)]
    assert plan([decoder(), decoder("d1", device=2)], [prefiller()], cached, local=True) == Plan("d1", cached=2)


# --- tiers below the arena ---


@pytest.mark.parametrize(
    ("here", "others", "expected"),
    [
        pytest.param(store(host=2, disk=4), [], (6, [TierRun(QUICK, 4)], []), id="disk where that is quicker"),
        pytest.param(store(host=2, disk=4, speeds=(SLOW, NEAR)), [], (2, [], []), id="no disk where that is slower"),
        pytest.param(
            store(host=2),
            [store("b", host=7)],
            (7, [TierRun(NEAR, 5)], [source("b", 7)]),
            id="another node where that is quicker",
        ),
        pytest.param(
            store(host=2, speeds=(QUICK, FAR)), [store("b", host=7)], (2, [], []), id="no other node if that is slower"
        ),
        pytest.param(
            store(host=2, disk=2),
            [store("b", host=3, disk=4)],
            (7, [TierRun(QUICK, 2), TierRun(NEAR, 3)], [source("b", 7)]),
            id="the disk, and the rest from another node",
        ),
        pytest.param(
            store(host=2, disk=2, speeds=(QUICK, FAR)),
            [store("b", host=7)],
            (4, [TierRun(QUICK, 2)], []),
            id="the disk, and no further",
        ),
        pytest.param(
            store(host=1, disk=1, speeds=(SLOW, NEAR)), [store("b", host=8)], (1, [], []), id="not past a slow run"
        ),
        pytest.param(store(host=2), [store("b", host=7, serves=False)], (2, [], []), id="another that serves nobody"),
        pytest.param(store(host=5), [store("b", host=5)], (5, [], []), id="another that has no more"),
        pytest.param(
            store(),
            [store("b", host=3), store("c", host=6), store("d", disk=5), store("e", host=4)],
            (6, [TierRun(NEAR, 6)], [source("c", 6), source("d", 5), source("e", 4)]),
            id="at most three, the longest first",
        ),
    ],
)
def test_cached_pages_are_loaded_where_that_pays(
    here: Store, others: list[Store], expected: tuple[int, list[TierRun], list[Source]]
) -> None:
    cached, loads, sources = expected
    choice = plan([decoder()], [], [here, *others])
    assert (choice.fetch, choice.cached) == (cached, cached)
    assert (list(choice.loads), list(choice.sources)) == (loads, sources)
    assert choice.predicted.compute == pytest.approx((8 - cached) * 0.1)


def test_only_what_follows_the_workers_own_pages_is_loaded() -> None:
    choice = plan([decoder(device=4)], [], [store(host=2, disk=4), store("b", host=8)])
    assert choice == Plan(
        "d0",
        fetch=8,
        cached=8,
        store="s-a",
        sources=(source("b", 8),),
        loads=(TierRun(QUICK, 2), TierRun(NEAR, 2)),
    )
    assert choice.predicted.load == pytest.approx(0.01 + 0.002 + 0.02 + 0.002)


def test_a_prefill_worker_loads_what_pays_for_it() -> None:
    choice = plan([decoder()], [prefiller(node="a")], [store(host=1), store("b", host=6)])
    assert (choice.prefill, choice.cached) == ("p0", 6)
    assert (choice.sources, choice.prefill_sources) == ((), (source("b", 6),))
    has_them = plan([decoder()], [prefiller(device=6)], [store(host=1), store("b", host=6)])
    assert (has_them.cached, has_them.prefill_sources) == (6, ())
    slow_link = plan([decoder()], [prefiller()], [store(host=1, speeds=(QUICK, FAR)), store("b", host=6)])
    assert (slow_link.cached, slow_link.prefill_sources) == (1, ())


@pytest.mark.parametrize(("rate", "prefills"), [(RATE, False), (RATE * 1_000, True)])
def test_a_whole_cached_prefix_is_computed_again_where_a_prefill_worker_is_quicker(rate: float, prefills: bool) -> None:
    """The decode worker alone would load it all: it computes slowly."""
    choice = plan([decoder()], [replace(prefiller(), rate=rate)], [store(disk=8)])
    assert (choice.prefill is not None, choice.cached) == (prefills, 0 if prefills else 8)


def test_without_figures_the_defaults_count() -> None:
    """A page of 10 tokens takes 5 ms to compute then, and one of 1 MB takes 1 ms from the disk, after 2 ms."""
    prefix = Prefix(4, 10, 1_000_000)
    here = Store("s-a", "a", disk=4)
    choice = place(prefix, [DecodeCandidate("d0", "d0", "a", 0, 0)], [], [here])
    assert isinstance(choice, Plan)
    assert choice == Plan("d0", fetch=4, cached=4, store="s-a", loads=(TierRun(DEFAULT_SPEEDS["disk"], 4),))
    assert choice.predicted.load == pytest.approx(0.006)
    alone = place(prefix, [DecodeCandidate("d0", "d0", "a", 0, 0)], [], [])
    assert isinstance(alone, Plan)
    assert alone.predicted.compute == pytest.approx(40 / DEFAULT_PREFILL_RATE)
    assert place(Prefix(4, 10, 9_000_000), [DecodeCandidate("d0", "d0", "a", 0, 0)], [], [here]) == Plan("d0")


# --- two nodes ---


def test_a_pair_of_two_nodes_hands_pages_over_from_store_to_store() -> None:
    choice = plan([decoder(node="b")], [prefiller(node="a")], [store("a", host=3), store("b")])
    assert choice == Plan("d0", "p0", fetch=8, cached=3, store="s-b", sources=(source("a", 8),))
    assert choice.predicted.transfer == pytest.approx(NEAR.latency)


def test_the_prefill_worker_gets_what_the_decode_workers_node_has() -> None:
    choice = plan([decoder(node="b")], [prefiller(node="a")], [store("a"), store("b", host=5)])
    assert (choice.sources, choice.prefill_sources) == ((source("a", 8),), (source("b", 5),))


def test_a_pair_of_one_node_is_preferred_while_it_costs_no_more() -> None:
    decoders, stores = [decoder("d0", "b"), decoder("d1", "a")], [store("a"), store("b")]
    assert plan(decoders, [prefiller("p0", "a")], stores).decode == "d1"
    assert plan(decoders, [prefiller("p0", "a"), prefiller("p1", "b")], stores).sources == ()
    near_is_busy = [prefiller("p0", "a", busy=2), prefiller("p1", "b")]
    assert plan([decoder("d1", "a")], near_is_busy, stores).prefill == "p1"
    assert plan([decoder("d1", "a")], [prefiller("p0", "a", slots=0), prefiller("p1", "b")], stores).prefill == "p1"
    far = [store("a", speeds=(QUICK, FAR)), store("b")]
    choice = plan([decoder("d1", "a")], near_is_busy, far)
    assert choice.prefill == "p0"
    assert plan([decoder("d1", "a")], [prefiller("p1", "b")], far).predicted.transfer == pytest.approx(8.02 - 0.8)


@pytest.mark.parametrize(
    "stores",
    [
        pytest.param([store("a", serves=False), store("b")], id="the prefill worker's store serves nobody"),
        pytest.param([store("b")], id="the prefill worker's store is gone"),
        pytest.param([store("a")], id="the decode worker's store is gone"),
    ],
)
def test_a_pair_of_two_nodes_needs_both_stores(stores: list[Store]) -> None:
    assert plan([decoder(node="b")], [prefiller(node="a")], stores) == Plan("d0")


def test_a_store_that_serves_nobody_may_be_served() -> None:
    choice = plan([decoder(node="b")], [prefiller(node="a")], [store("a"), store("b", serves=False)])
    assert choice.sources == (source("a", 8),)


# --- whatever there is ---

NODES = st.sampled_from("abc")
PAGES = st.integers(0, 8)
RATES = st.sampled_from([0.0, 10.0, 1e6])
DECODERS = st.builds(
    DecodeCandidate, st.uuids().map(str), st.sampled_from("xyz"), NODES, st.integers(0, 99), PAGES, RATES
)
PREFILLERS = st.builds(
    PrefillCandidate,
    st.uuids().map(str),
    st.sampled_from("pqr"),
    NODES,
    st.integers(0, 99),
    PAGES,
    st.integers(-1, 3),
    RATES,
)
STORES = st.builds(
    store,
    NODES,
    st.integers(0, 4),
    st.integers(0, 4),
    serves=st.booleans(),
    speeds=st.tuples(st.sampled_from([QUICK, SLOW]), st.sampled_from([NEAR, FAR])),
)


@given(
    decoders=st.lists(DECODERS, max_size=4),
    prefillers=st.lists(PREFILLERS, max_size=4),
    stores=st.lists(STORES, max_size=3, unique_by=lambda s: s.node),
    local=st.booleans(),
)
def test_every_plan_can_be_carried_out(
    decoders: list[DecodeCandidate], prefillers: list[PrefillCandidate], stores: list[Store], local: bool
) -> None:
    choice = place(PREFIX, decoders, prefillers, stores, local=local)
    if isinstance(choice, Wait):
        assert not (local and decoders)
        return
    chosen = {d.incarnation: d for d in decoders}[choice.decode]
    own = {s.node: s for s in stores}.get(chosen.node)
    by_name = {s.incarnation: s for s in stores}
    assert choice.store == (own.incarnation if own and choice.fetch else "")
    assert min(choice.predicted.queue, choice.predicted.load, choice.predicted.compute) >= 0
    for each in (*choice.sources, *choice.prefill_sources):
        assert each.endpoint == by_name[each.store].endpoint != ""
    assert all(by_name[each.store].node != chosen.node for each in choice.sources)
    if local or own is None:
        assert (choice.fetch, choice.prefill, choice.loads) == (0, None, ())
    elif choice.prefill is not None:
        maker = {p.incarnation: p for p in prefillers}[choice.prefill]
        assert maker.slots > 0
        assert choice.fetch == PREFIX.pages > 0
        theirs = {s.node: s for s in stores}[maker.node]
        named = () if maker.node == chosen.node else (theirs.incarnation,)
        assert tuple(each.store for each in choice.sources) == named
        assert all(by_name[each.store].node != maker.node for each in choice.prefill_sources)
    elif choice.fetch:
        reach = max(own.pages, *(each.pages for each in choice.sources), 0)
        assert chosen.device_pages < choice.fetch <= reach
        assert all(each.pages > own.pages for each in choice.sources)


@given(
    decoders=st.lists(DECODERS, min_size=1, max_size=3),
    prefillers=st.lists(PREFILLERS, min_size=1, max_size=4),
    stores=st.lists(STORES, max_size=3, unique_by=lambda s: s.node),
)
def test_no_pair_that_costs_less_is_passed_by(
    decoders: list[DecodeCandidate], prefillers: list[PrefillCandidate], stores: list[Store]
) -> None:
    choice = place(PREFIX, decoders, prefillers, stores)
    if isinstance(choice, Wait):
        return
    for one in decoders:
        for other in prefillers:
            pair = place(PREFIX, [one], [other], stores)
            if isinstance(pair, Plan) and pair.prefill is not None:
                assert choice.predicted.total <= pair.predicted.total
