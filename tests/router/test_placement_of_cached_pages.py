"""Placement where pages lie in lower tiers or on another node: loads where they pay."""

from typing import Any

import pytest

from baton.messages import LoadReport, PageSource, TierSpeed
from baton.store_protocol import TierPages
from kvstore.load_or_recompute import DEFAULT_PREFILL_RATE
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.placement.cluster_view import ClusterView
from router.placement.types import Placement
from tests.router.placing import (
    CONFIG,
    FAR,
    HANDED,
    NEAR,
    PAGE,
    QUICK,
    RATE,
    REST,
    SLOW,
    Cluster,
    one_node,
    source,
    two_nodes,
)


@pytest.mark.parametrize(
    ("here", "others", "expected"),
    [
        pytest.param({"host": 2, "disk": 4}, [], (6, [TierPages(QUICK, 4)], []), id="disk where that is quicker"),
        pytest.param(
            {"host": 2, "disk": 4, "speeds": (SLOW, NEAR)}, [], (2, [], []), id="no disk where that is slower"
        ),
        pytest.param(
            {"host": 2},
            [{"host": 7}],
            (7, [TierPages(NEAR, 5)], [source("b", 7)]),
            id="another node where that is quicker",
        ),
        pytest.param(
            {"host": 2, "speeds": (QUICK, FAR)}, [{"host": 7}], (2, [], []), id="no other node if that is slower"
        ),
        pytest.param(
            {"host": 2, "disk": 2},
            [{"host": 3, "disk": 4}],
            (7, [TierPages(QUICK, 2), TierPages(NEAR, 3)], [source("b", 7)]),
            id="the disk, and the rest from another node",
        ),
        pytest.param(
            {"host": 2, "disk": 2, "speeds": (QUICK, FAR)},
            [{"host": 7}],
            (4, [TierPages(QUICK, 2)], []),
            id="the disk, and no further",
        ),
        pytest.param(
            {"host": 1, "disk": 1, "speeds": (SLOW, NEAR)}, [{"host": 8}], (1, [], []), id="not past a slow run"
        ),
        pytest.param(
            {"host": 2},
            [{"host": 7}, {"host": 5}, {"host": 8, "serves": False}, {"host": 2}],
            (7, [TierPages(NEAR, 5)], [source("b", 7), source("c", 5)]),
            id="all that have more, the longest first",
        ),
    ],
)
@pytest.mark.technique("KV-aware placement by predicted time to first token")
def test_loads_are_taken_where_they_pay(
    here: dict[str, Any], others: list[dict[str, Any]], expected: tuple[int, list[TierPages], list[PageSource]]
) -> None:
    cached, loads, sources = expected
    cluster = Cluster()
    cluster.decoder()
    cluster.store(**here)
    for node, other in zip("bcdef", others, strict=False):
        cluster.store(node, **other)
    plan = cluster.plan()
    assert (plan.fetch_pages, plan.cached_pages) == (cached, cached)
    assert (list(plan.loads), list(plan.sources)) == (loads, sources)
    assert plan.predicted.compute == pytest.approx((8 - cached) * PAGE)


def test_only_what_follows_the_workers_own_pages_is_loaded() -> None:
    cluster = Cluster()
    cluster.decoder(device=4)
    cluster.store(host=2, disk=4)
    cluster.store("b", host=8)
    plan = cluster.plan()
    runs = (TierPages(QUICK, 2), TierPages(NEAR, 2))
    assert plan == Placement("d0", fetch_pages=8, cached_pages=8, store="s-a", sources=(source("b", 8),), loads=runs)
    assert plan.predicted.load == pytest.approx(0.01 + 0.002 + 0.02 + 0.002)


def test_a_prefill_worker_loads_what_pays_for_it() -> None:
    cluster = one_node(host=1)
    cluster.store("b", host=6)
    plan = cluster.plan()
    assert (plan.prefill, plan.cached_pages) == ("p0", 6)
    assert (plan.sources, plan.prefill_sources) == ((), (source("b", 6),))
    cluster.held["p0"] = PrefixMatch(6)
    has_them = cluster.plan()
    assert (has_them.cached_pages, has_them.prefill_sources) == (6, ())
    cluster = one_node(host=1, speeds=(QUICK, FAR))
    cluster.store("b", host=6)
    slow_link = cluster.plan()
    assert (slow_link.cached_pages, slow_link.prefill_sources) == (1, ())


def test_before_anything_is_measured_the_rates_that_workers_tell_count() -> None:
    cluster = Cluster()
    cluster.view = ClusterView(CONFIG, cluster.members)
    worker = cluster.decoder()
    assert cluster.plan().predicted.total == pytest.approx(84 / RATE)
    worker.update_load(LoadReport(), 0, LoadReport(), cluster.now)
    assert cluster.plan().predicted.total == pytest.approx(84 / DEFAULT_PREFILL_RATE)


# --- two nodes ---


def test_a_pair_of_two_nodes_hands_pages_over_from_store_to_store() -> None:
    plan = two_nodes({"host": 3}, {}).plan()
    assert plan == Placement(
        "d0", "p0", fetch_pages=HANDED, cached_pages=3, store="s-b", sources=(source("a", HANDED),)
    )
    assert plan.predicted.transfer == pytest.approx(NEAR.latency)
    slow = two_nodes({"host": 3}, {"speeds": (QUICK, FAR)})
    slow.runs(slow.members.require_live("d0"), 20)
    assert slow.plan().predicted.transfer == pytest.approx(9.02 - 5 * PAGE - REST / RATE), (
        "the link is slower than the making"
    )


def test_the_prefill_worker_gets_what_the_decode_workers_node_has() -> None:
    plan = two_nodes({}, {"host": 5}).plan()
    assert (plan.sources, plan.prefill_sources) == ((source("a", HANDED),), (source("b", 5),))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param({"serves": False}, {}, id="the prefill worker's store serves nobody"),
        pytest.param(None, {}, id="the prefill worker's store is gone"),
        pytest.param({}, None, id="the decode worker's store is gone"),
    ],
)
def test_a_pair_of_two_nodes_needs_both_stores(a: dict[str, Any] | None, b: dict[str, Any] | None) -> None:
    assert two_nodes(a, b).plan() == Placement("d0")


def test_a_store_without_an_endpoint_may_fetch() -> None:
    assert two_nodes({}, {"serves": False}).plan().sources == (source("a", HANDED),)


def test_a_failed_source_is_not_asked_again() -> None:
    cluster = two_nodes({"host": 8}, {})
    assert cluster.plan().sources == (source("a", 8),)
    assert cluster.plan(excluded={"s-a"}) == Placement("d0")
    assert cluster.plan(excluded={"p0"}).prefill is None
    assert cluster.plan(excluded={"d0"}).decode == "d0", "there is no other"
    cluster.decoder("d1", "b")
    assert cluster.plan(excluded={"d0"}).decode == "d1"


@pytest.mark.parametrize(("measured", "chosen"), [(False, "d1"), (True, "d0")])
def test_an_unused_link_does_not_crowd_another(measured: bool, chosen: str) -> None:
    cluster = Cluster()
    cluster.prefiller(node="a")
    cluster.store("a")
    used = TierSpeed("remote", 0.02, 1e6, measured=True)
    slow = TierSpeed("remote", 0.02, 5e3, measured=measured)
    for name, node, link in (("d0", "b", used), ("d1", "c", slow)):
        cluster.decoder(name, node)
        cluster.store(node, speeds=(QUICK, link))
    cluster.runs(cluster.members.require_live("d0"), 3)
    assert cluster.plan().decode == chosen
