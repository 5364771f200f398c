"""More load than a small cluster can serve: it goes on serving, rejections are sent, tenants get fair shares."""

from collections.abc import Mapping

import pytest

from simulator.lengths import Lengths
from simulator.workloads import Random, Wishes
from tests.simulator.simulated import cluster, serve

pytestmark = pytest.mark.slow

TENANTS = (("greedy", 0.6), ("fair", 0.3), ("modest", 0.1))
WEIGHTS = {"greedy": 1.0, "fair": 2.0, "modest": 1.0}


def fair_shares(total: float, demand: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Return max-min fair shares of `total` by weight.

    A tenant that asked for less than its share gets its demand. The remaining tenants divide the rest.
    """
    shares: dict[str, float] = {}
    weight = sum(weights.values())
    for name in sorted(demand, key=lambda name: demand[name] / weights[name]):
        shares[name] = min(demand[name], total * weights[name] / weight)
        total -= shares[name]
        weight -= weights[name]
    return shares


def test_fair_shares_are_max_min() -> None:
    shares = fair_shares(100.0, {"a": 10.0, "b": 80.0, "c": 80.0, "d": 15.0}, {"a": 1, "b": 1, "c": 2, "d": 1})
    assert shares == {"a": 10.0, "b": 25.0, "c": 50.0, "d": 15.0}


@pytest.mark.parametrize(("layout", "rate"), [("2P+1D", 30.0), ("3D", 45.0)])
def test_three_times_too_much(layout: str, rate: float) -> None:
    """Three times as many requests come as could be served, a tenth of them urgent."""
    settings = {
        "router__slo_classes": {0: {"ttft_ms": 3_000}, 1: {"ttft_ms": 9_000}},
        "router__tenants": {name: {"weight": weight} for name, weight in WEIGHTS.items()},
    }
    world = cluster(layout, **settings)
    wishes = Wishes(max_tokens=200, tenants=TENANTS, priorities=((0, 0.1), (1, 0.9)))
    load = list(Random(rate, Lengths("uniform", 500, 2_500), Lengths("uniform", 5, 60)).arrivals(900, wishes, 1))
    demand = dict.fromkeys(WEIGHTS, 0.0)
    for arrival in load:
        demand[arrival.tenant] += arrival.prompt + arrival.output
    measures = serve(world, load)
    table = measures.table()
    rejected = table["seconds"][table["finished"] == 0]
    served = measures.by_tenant()
    fair = fair_shares(sum(served.values()), demand, WEIGHTS)
    assert sum(measures.ends.values()) == 900
    assert 200 < measures.ends["finished"] < 500
    assert set(measures.ends) <= {"finished", "objective", "overloaded"}
    assert (rejected <= 0.05).mean() > 0.8, "most are told at once"
    assert min(served[name] / fair[name] for name in fair) > 0.9
