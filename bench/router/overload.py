"""Overload a cluster, in virtual time, with the real router, workers and stores.

Measures goodput at three times the rate that is too much for it, the delay of rejections, and each tenant's fair share.

    python -m bench.router.overload                        # 8P+8D and 16D, equal and unequal weights
    python -m bench.router.overload --quick                # 8P+8D only, for a shorter time: a minute or two

Five tenants ask for very different amounts, in two classes of priority with objectives of their own. The rate rises by
half at a time. The sweep ends at three times the first rate whose goodput is less than 95 % of it. It looks for no
peak: with a longer queue to choose from, more short prompts fit. Figures exclude the start, while the cluster fills,
and the time after the last arrival, while it empties.

goodput    Requests a second that finished with their first token and mean gap within their class's objectives.
heard      Time from arrival to rejection, in virtual time: a decision on arrival takes none.
served     Tokens as the virtual token counter counts them (Sheng et al., OSDI 2024): a prompt's 1, an output's 2.
fair       Max-min fair shares, by weight, of all that was served: no tenant's share exceeds its demand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator import timing
from simulator.cluster import Layout, SimulatedCluster
from simulator.lengths import Lengths
from simulator.workloads import Arrival, Random, Wishes

DEMAND = (("huge", 0.50), ("large", 0.25), ("medium", 0.15), ("small", 0.08), ("tiny", 0.02))
"""The tenants, and which share of the requests is whose."""
WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "equal": {name: 1.0 for name, _ in DEMAND},
    "unequal": {"huge": 1.0, "large": 4.0, "medium": 2.0, "small": 1.0, "tiny": 1.0},
}
CLASSES = {0: (5.0, 0.1), 1: (15.0, 0.2)}  # objectives by priority: TTFT and TPOT, seconds
_PRIORITIES = ((0, 0.15), (1, 0.85))
_PROMPT, _OUTPUT = Lengths("lognormal", 4_000, 0.8, 16_000), Lengths("lognormal", 250, 0.8, 2_000)
_PAGE_SIZE = 128  # tokens
_OUTPUT_COST = 2.0  # `router.output_weight`
_MORE = 1.5  # times: so the rate rises
_WELL = 0.95  # of the rate: less goodput than this is too little
_OVERLOAD = 3.0  # times the rate that was too much
_SOON = 0.05  # seconds within which a rejection should be heard


@dataclass(frozen=True)
class Setting:
    """A cluster and the load it serves."""

    cluster: str = "8P+8D"
    model: str = "a800_70b"
    weights: str = "equal"
    filling: float = 60.0  # seconds
    seconds: float = 120.0  # that are measured
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    """Of one rate."""

    rate: float  # offered, requests a second
    arrived: int
    goodput: float  # requests a second
    heard: npt.NDArray[np.float64]  # seconds until each rejection, sorted
    served: Mapping[str, float]  # tokens by tenant
    fair: Mapping[str, float]  # the same
    ends: Mapping[str, int]
    waiting: int

    @property
    def worst(self) -> tuple[str, float]:
        """The tenant that got least of its fair share, and how much of it."""
        shares = ((name, self.served[name] / fair) for name, fair in self.fair.items() if fair > 0)
        return min(shares, key=lambda item: item[1], default=("-", 1.0))  # a tenant without demand lacks nothing

    @property
    def soon(self) -> float:
        """The share of the rejections that were heard within 50 ms."""
        return float(np.mean(self.heard <= _SOON)) if len(self.heard) else 1.0

    def as_json(self) -> dict[str, Any]:
        heard = np.percentile(self.heard, (50, 90, 99, 100)).tolist() if len(self.heard) else []
        return {
            "rate": self.rate, "arrived": self.arrived, "goodput": self.goodput, "rejections": len(self.heard),
            "heard_p50_p90_p99_max": heard, "heard_soon": self.soon, "worst": self.worst,
            "served": dict(self.served), "fair": dict(self.fair), "ends": dict(self.ends), "waiting": self.waiting,
        }  # fmt: skip


def offer(setting: Setting, rate: float) -> Outcome:
    """Serve Poisson arrivals of that rate. Raises ConfigError."""
    model = timing.read(setting.model)
    weights = WEIGHTS[setting.weights]
    settings = {
        "router.slo_classes": {level: {"ttft_ms": round(1_000 * ttft), "tpot_ms": round(1_000 * tpot)}
                           for level, (ttft, tpot) in CLASSES.items()},
        "router.tenants": {name: {"weight": weight} for name, weight in weights.items()},
        "router.output_weight": _OUTPUT_COST,
    }  # fmt: skip
    cluster = SimulatedCluster(
        Layout.parse(setting.cluster), model, model.configuration(_PAGE_SIZE, settings), setting.seed
    )
    arrivals: list[Arrival] = []
    ended: list[int] = []  # places in `arrivals`, in the order of the ends
    cluster.measures.watch = lambda request, tenant, ttft: ended.append(int(request[1:]) - 1)
    until = setting.filling + setting.seconds
    measures = cluster.run(_noted(_load(rate, until, setting.seed), arrivals))
    assert not measures.ended_twice
    table = measures.table()
    came = np.array([arrivals[place].at for place in ended])
    over = came + table["seconds"]
    measured = (over >= setting.filling) & (over <= until)
    objectives = np.array([CLASSES[arrivals[place].priority] for place in ended])
    finished = table["finished"] > 0
    well = finished & (table["ttft"] <= objectives[:, 0]) & ~(table["tpot"] > objectives[:, 1])
    tenants = np.array([arrivals[place].tenant for place in ended])
    cost = table["prompt"] + _OUTPUT_COST * table["output"]
    cohort = came >= setting.filling
    served = {name: float(cost[cohort & finished & (tenants == name)].sum()) for name in weights}
    demand = dict.fromkeys(weights, 0.0)
    for arrival in arrivals:
        if arrival.at >= setting.filling:
            demand[arrival.tenant] += arrival.prompt + _OUTPUT_COST * arrival.output
    return Outcome(
        rate, len(arrivals), float((well & measured).sum()) / setting.seconds,
        np.sort(table["seconds"][measured & ~finished]), served, fair_shares(sum(served.values()), demand, weights),
        measures.ends, len(measures.waiting),
    )  # fmt: skip


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


def sweep(setting: Setting, rate: float) -> Iterator[Outcome]:
    """Outcomes of rising rates, the last of three times the first one that was too much."""
    last = inf
    while rate < last:
        yield (outcome := offer(setting, rate))
        if last == inf and outcome.goodput < _WELL * rate:
            last = _OVERLOAD * rate
        rate *= _MORE
    yield offer(setting, last)


def _load(rate: float, until: float, seed: int) -> Iterator[Arrival]:
    wishes = Wishes(tenants=DEMAND, priorities=_PRIORITIES)
    for arrival in Random(rate, _PROMPT, _OUTPUT).arrivals(None, wishes, seed):
        if arrival.at > until:
            return
        yield arrival


def _noted(load: Iterator[Arrival], arrivals: list[Arrival]) -> Iterator[Arrival]:
    for arrival in load:
        arrivals.append(arrival)
        yield arrival


def _line(outcome: Outcome) -> str:
    heard = outcome.heard
    p50, p99, most = np.percentile(heard, (50, 99, 100)) if len(heard) else (0.0, 0.0, 0.0)
    name, share = outcome.worst
    return (
        f"| {outcome.rate:6.2f} | {outcome.goodput:6.2f} | {len(heard):6} | {outcome.soon:6.1%} "
        f"| {p50:.2f} / {p99:.2f} / {most:.2f} | {name} {share:.1%} |"
    )


_HEAD = """\
| offered, req/s | goodput, req/s | rejections | heard within 50 ms | heard after p50 / p99 / most, s | worst tenant |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--clusters", nargs="+", default=["8P+8D", "16D"])
    add("--model", default="a800_70b")
    add("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    add("--from", dest="first", type=float, default=10.0, help="requests a second of the lowest rate")
    add("--seconds", type=float, default=120.0, help="that are measured of each rate")
    add("--seed", type=int, default=1)
    add("--quick", action="store_true", help="8P+8D with equal weights, for 30 s")
    add("--json", help="write all outcomes to this file")
    args = parser.parse_args()
    if args.quick:
        args.clusters, args.weights, args.seconds = ["8P+8D"], ["equal"], 30.0
    results: dict[str, Any] = {}
    for name in args.clusters:
        for weights in args.weights:
            began = time.perf_counter()
            setting = Setting(name, args.model, weights, min(60.0, args.seconds / 2), args.seconds, args.seed)
            print(f"\n**{name}, {weights} weights**\n\n{_HEAD}", flush=True)
            outcomes: list[Outcome] = []
            for outcome in sweep(setting, args.first):
                outcomes.append(outcome)
                print(_line(outcome), flush=True)
            share = outcomes[-1].goodput / max(each.goodput for each in outcomes)
            print(f"\ngoodput at {_OVERLOAD:g}×: {share:.1%} of the most ({time.perf_counter() - began:.0f} s)")
            results[f"{name}, {weights}"] = [each.as_json() for each in outcomes]
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
