"""Placement in whatever clusters there may be."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.messages import AttemptName
from baton.store_protocol import TierPages
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import PendingPrefill
from router.placement.cost_matrix import PlacementCosts
from router.placement.policy import place_on
from router.placement.step_costs import DecodeCost, PrefillCost
from router.placement.types import Placement, PlacementRequest, Wait
from tests.router import placing


@st.composite
def clusters(draw: st.DrawFn) -> placing.Cluster:
    cluster = placing.Cluster()
    nodes, pages, busy = st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 20)
    for node in draw(st.lists(nodes, unique=True, max_size=3)):
        speeds = draw(
            st.tuples(st.sampled_from([placing.QUICK, placing.SLOW]), st.sampled_from([placing.NEAR, placing.FAR]))
        )
        host, disk, serves = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.booleans())
        cluster.store(node, host, disk, serves=serves, speeds=speeds)
    for index in range(draw(st.integers(0, 4))):
        pool = draw(st.sampled_from([5, 40, 1_000]))
        member = cluster.decoder(f"d{index}", draw(nodes), draw(pages), draw(busy), pool)
        cluster.runs(member, draw(st.integers(0, 12)), draw(st.sampled_from([None, 0.02, 0.2])), pages=3)
        cluster.steps[f"d{index}"] = draw(st.sampled_from([DecodeCost(0.01, 0.0, 0.0), DecodeCost(0.005, 0.002, 1e-5)]))
        if draw(st.booleans()) and member.assigned:
            member.mark_busy(next(iter(member.assigned)))
    for index in range(draw(st.integers(0, 4))):
        cluster.prefiller(f"p{index}", draw(nodes), draw(pages), draw(busy), draw(st.integers(0, 2)))
        cluster.prefills[f"p{index}"] = draw(
            st.sampled_from([PrefillCost(0.0, 0.01, 0.0), PrefillCost(0.1, 0.001, 1e-5)])
        )
    return cluster


ASKS = st.fixed_dictionaries(
    {"decode_only": st.booleans(), "tpot": st.sampled_from([None, 0.015, 0.1]), "max_tokens": st.sampled_from([1, 50])}
)


@given(cluster=clusters(), ask=ASKS)
def test_every_plan_can_be_carried_out(cluster: placing.Cluster, ask: dict[str, Any]) -> None:
    choice = cluster.choose(**ask)
    if not isinstance(choice, Placement):
        return
    chosen = cluster.members.require_live(choice.decode)
    stores = {store.incarnation: store for store in cluster.members.with_role("store")}
    own = cluster.members.store_of(chosen.peer.node)
    assert chosen.busy_since is None, "full"
    assert chosen.hello.model.pool_pages >= cluster.ask(**ask).pages_needed
    assert choice.store == (own.incarnation if own and choice.fetch_pages else "")
    predicted = choice.predicted
    assert min(predicted.queue, predicted.load, predicted.compute, predicted.transfer, predicted.step) >= 0
    assert predicted.wait == 0
    for each in (*choice.sources, *choice.prefill_sources):
        assert each.endpoint == stores[each.store].hello.data != ""
    assert all(stores[each.store].peer.node != chosen.peer.node for each in choice.sources)
    if ask["decode_only"] or own is None:
        assert (choice.fetch_pages, choice.prefill, choice.loads) == (0, None, ())
    elif choice.prefill is not None:
        prefill_row = cluster.members.require_live(choice.prefill)
        assert len(prefill_row.pending_prefills) < 2
        assert choice.fetch_pages == placing.HANDED
        theirs = cluster.members.store_of(prefill_row.peer.node)
        named = () if prefill_row.peer.node == chosen.peer.node else (theirs.incarnation,)
        assert tuple(each.store for each in choice.sources) == named
        assert all(stores[each.store].peer.node != prefill_row.peer.node for each in choice.prefill_sources)


@given(cluster=clusters(), ask=ASKS)
def test_arrays_say_what_one_way_at_a_time_says(cluster: placing.Cluster, ask: dict[str, Any]) -> None:
    """Every pair and every decode worker alone, priced one by one in plain Python."""
    request = cluster.ask(**ask)
    cluster.view.begin_scan(cluster.now)
    decision = cluster.decide(**ask)
    choice, costs = decision.choice, decision.considered
    if costs is None or not costs.num_decode:
        return
    ways: dict[tuple[str | None, str], float] = {}
    for way in every_way(cluster, costs):
        seconds = by_hand(cluster, costs, request, *way)
        prefill_row = None if way[0] is None else costs.workers[way[0]].incarnation
        if seconds < inf:
            ways[prefill_row, costs.workers[way[1]].incarnation] = seconds
            assert costs.predict(*way).total == pytest.approx(seconds)
    dear = {
        (prefill_row, decode_row): seconds
        + (float(costs.interference_seconds[cluster.view.table.index[decode_row]]) if prefill_row is None else 0.0)
        for (prefill_row, decode_row), seconds in ways.items()
    }
    assert costs.lowest == pytest.approx(min(dear.values(), default=inf))
    if isinstance(choice, Placement):
        best = costs.lowest
        assert dear[choice.prefill, choice.decode] <= best + max(0.001, 0.02 * best) + 1e-9
        reach = costs.cached[cluster.view.table.index[choice.prefill or choice.decode]]
        assert choice.cached_pages == reach, "arrays and the one function agree on what is loaded"


def every_way(cluster: placing.Cluster, costs: PlacementCosts) -> Sequence[tuple[int | None, int]]:
    decode_rows = range(costs.num_decode)
    prefill_rows = range(costs.num_decode, len(costs.workers))
    return [(None, decode_row) for decode_row in decode_rows] + [
        (prefill_row, decode_row) for prefill_row in prefill_rows for decode_row in decode_rows
    ]


def by_hand(
    cluster: placing.Cluster, costs: PlacementCosts, ask: PlacementRequest, prefill_row: int | None, decode_row: int
) -> float:
    """Seconds of one way; inf: it can't be."""
    decoder = costs.workers[decode_row]
    if decoder.hello.model.pool_pages < ask.pages_needed:
        return inf
    step = costs.step[decode_row]
    if prefill_row is not None and costs.cached[decode_row] == placing.PREFIX.pages:
        return inf
    if prefill_row is None:
        begins = max(costs.queue[decode_row], costs.local_wait[decode_row])
        return (
            begins + costs.load[decode_row] + costs.compute[decode_row] + step + costs.last_tokens_seconds[decode_row]
        )
    worker = costs.workers[prefill_row]
    own, theirs = cluster.members.store_of(decoder.peer.node), cluster.members.store_of(worker.peer.node)
    same = worker.peer.node == decoder.peer.node
    if ask.decode_only or own is None or theirs is None or not (same or theirs.hello.data):
        return inf
    cost = cluster.prefill(worker.incarnation)
    cached = int(costs.cached[prefill_row])
    prefill_seconds = cost.seconds((placing.PREFIX.pages - cached) * 10 + placing.REST, cached * 10, 2_048)
    load = costs.load[prefill_row]
    left = sum(cost.seconds(prompt.new, 0, 2_048) for prompt in worker.pending_prefills.values())
    held = ask.held.get(own.incarnation, PrefixMatch(0))
    here = max(ask.device_pages(decoder.incarnation), held.pages - held.tiers.get("DISK", 0))
    transfer = 0.0
    if not same:
        speed = own.load.tiers[1]
        link = speed.latency + (placing.HANDED - here) * placing.PREFIX.page_bytes / speed.bytes_per_second
        transfer = max(speed.latency, link - load - prefill_seconds)
    return max(left, costs.wait[decode_row]) + load + prefill_seconds + transfer + step


@given(cluster=clusters(), more=st.integers(1, 30))
def test_a_longer_queue_makes_no_choice_likelier(cluster: placing.Cluster, more: int) -> None:
    before = cluster.choose()
    if not isinstance(before, Placement):
        return
    for member in cluster.members:
        worker = before.prefill or before.decode
        if member.incarnation not in (worker, before.decode) and member.peer.role != "store":
            member.assign_prefill(AttemptName("more", 1), PendingPrefill(more * 10), cluster.now)
    after = cluster.choose()
    assert isinstance(after, Placement)
    assert after.prefill == before.prefill or before.prefill is None
    assert after.predicted.queue == pytest.approx(before.predicted.queue)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_of_many_workers_the_best_are_found(random: Any) -> None:
    """With more workers than are paired, the choice is as good as the best of all pairs."""
    cluster = placing.Cluster()
    for index in range(40):
        node = f"n{index % 10}"
        if index < 10:
            cluster.store(node, host=random.randrange(9))
        cluster.decoder(f"d{index}", node, random.randrange(9), random.randrange(5))
        cluster.prefiller(f"p{index}", node, random.randrange(9), random.randrange(30), random.randrange(3))
    cluster.view.begin_scan(cluster.now)
    decision = cluster.decide()
    choice, costs = decision.choice, decision.considered
    assert costs is not None
    seconds = {way: by_hand(cluster, costs, cluster.ask(), *way) for way in every_way(cluster, costs)}
    dear = {
        way: value + (float(costs.interference_seconds[way[1]]) if way[0] is None else 0)
        for way, value in seconds.items()
    }
    assert costs.lowest <= min(dear.values()) * 1.02 + 0.001
    assert isinstance(choice, Placement | Wait)


def test_a_plan_for_chosen_workers_is_that_of_the_rule() -> None:
    cluster = placing.two_nodes({"host": 3}, {})
    cluster.decoder("d1", "b")
    assert place_on(cluster.ask(), cluster.view, "d1", "p0").choice == replace(cluster.plan(), decode="d1")
    assert place_on(cluster.ask(), cluster.view, "d1").choice == Placement(
        "d1",
        fetch_pages=3,
        cached_pages=3,
        store="s-b",
        sources=(placing.source("a", 3),),
        loads=(TierPages(placing.NEAR, 3),),
    )


def test_candidates_tell_what_was_weighed() -> None:
    cluster = placing.one_node(host=3)
    cluster.prefiller("p1", slots=0)
    cluster.decoder("d1", pool=5)
    plan = cluster.plan()
    candidates = {(each.decode, each.prefill): each for each in cluster.costs().candidates()}
    assert candidates["d0", "p0"].predicted == plan.predicted
    assert (candidates["d0", "p0"].cached, candidates["d0", "p0"].why_not) == (30, "")
    assert "p1" in candidates["d0", "p1"].why_not
    assert "d1" in candidates["d1", ""].why_not
    assert candidates["d0", ""].predicted.total == pytest.approx(
        5 * placing.PAGE + placing.STEP + placing.TAIL / placing.RATE
    )
