"""Serve a load on a cluster in virtual time: the real router, workers and stores, with durations from a timing model.

    python -m bench.router.simulate --cluster 8P+8D --model a800_70b --trace conversation.jsonl --speed 2 --policy baton
    python -m bench.router.simulate --cluster 16D --poisson 4 --prompt lognormal:4000:1 --output lognormal:300:0.7
    python -m bench.router.simulate --cluster 32P+32D --poisson 20 --deaths 10 --seed 7
    python -m bench.router.simulate --cluster 2P+2D --poisson 0.5 --batch 32    # times are those of the other requests

Traces are JSON lines in Mooncake's format, such as the public FAST'25 traces. The same arguments give the same result,
to the byte.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton.config import parse_override
from baton.errors import BatonError
from baton.messages import LOWEST_CLASS
from baton.operator_api import Explanation
from deploy.commands import explain
from router import policies
from router.dashboard.operator_views import explanation
from simulator import faults, mooncake, timing
from simulator.cluster import Layout, SimulatedCluster
from simulator.lengths import Lengths
from simulator.measure import Measures
from simulator.workloads import FIRST_OWN, Arrival, Bursts, Random, Wishes, trace


class Batch:
    """Requests of the lowest class, so many under way from the first request of a load to its last one."""

    name = "batch"

    def __init__(self, size: int, prompt: Lengths, output: Lengths) -> None:
        self._requests = Random(1.0, prompt, output).arrivals(None, Wishes(priorities=((LOWEST_CLASS, 1.0),)), seed=0)
        self._size, self._over = size, False

    def beside(self, load: Iterator[Arrival]) -> Iterator[Arrival]:
        """Yield a load, and the first requests of the batch before it."""
        for _ in range(self._size):
            yield self._following(0.0)
        yield from load
        self._over = True

    def next(self, arrival: Arrival, answer: bytes, now: float) -> Arrival | None:
        """Return the next request. One that was refused is sent again after a second."""
        if not answer:
            return replace(arrival, at=1.0)
        return None if self._over else self._following(0.0)

    def _following(self, at: float) -> Arrival:
        # Prompts of another range of blocks than the load's.
        arrival = next(self._requests)
        blocks = [block + FIRST_OWN // 2 for block in arrival.blocks]
        return replace(arrival, at=at, blocks=blocks, play=self)


class Slowest:
    """Explains the requests whose first tokens came last, as `baton explain` does."""

    def __init__(self, cluster: SimulatedCluster, count: int) -> None:
        self._cluster, self._count = cluster, count
        self._heap: list[tuple[float, str, Explanation]] = []  # the quickest of them first
        cluster.measures.watch = self._ended

    @property
    def explained(self) -> list[Explanation]:
        return [entry for _, _, entry in sorted(self._heap, key=lambda item: item[:2], reverse=True)]

    def _ended(self, request: str, tenant: str, ttft: float) -> None:
        if math.isnan(ttft) or (len(self._heap) >= self._count and ttft <= self._heap[0][0]):
            return
        router = self._cluster.router_of(request)
        explained = explanation(router.state.explain(request), self._cluster.agenda.now)
        heapq.heappush(self._heap, (ttft, request, explained))
        if len(self._heap) > self._count:
            heapq.heappop(self._heap)


def main() -> None:
    args = _arguments()
    try:
        result, slowest = simulate(args)
    except BatonError as error:
        sys.exit(f"simulate.py: {error}")
    print(table(result))
    for each in slowest:
        explain.request(Console(), each)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def simulate(args: argparse.Namespace) -> tuple[dict[str, Any], list[Explanation]]:
    """The report, in which what the run itself took stands apart under `simulator`; and the slowest requests. Raises
    BatonError."""
    model = timing.read_timing(args.model)
    config = model.configuration(args.page_size, dict(map(parse_override, args.set)))
    model, layout = model.in_formats(config.model), Layout.parse(args.cluster, args.per_node)
    placer = policies.policy_named(args.policy, args.seed, model.costs, model.network)
    cluster = SimulatedCluster(
        layout, model, config, args.seed, placer, runs=not args.single_steps, routers=args.routers
    )
    faults.Faults(
        args.deaths, args.store_deaths, args.router_deaths, args.splits, args.split_seconds, args.loss, args.slow
    ).inject(cluster, args.seed)
    slowest = Slowest(cluster, args.explain_slowest) if args.explain_slowest else None
    began = time.perf_counter()
    load = _load(args)
    if args.batch:
        load = Batch(args.batch, Lengths.parse(args.prompt), Lengths.parse(args.output)).beside(load)
    measures = cluster.run(load, args.limit)
    took = time.perf_counter() - began
    explanations = slowest.explained if slowest else []
    result = {
        "arguments": {name: value for name, value in sorted(vars(args).items()) if name != "json"},
        **report(cluster, measures),
        "goodput": {f"{ttft:g}s/{tbt:g}s": measures.goodput(ttft, tbt) for ttft, tbt in args.goodput},
        "simulator": {
            "seconds": round(took, 3),
            "events": cluster.agenda.happened,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1_024,
        },
        "slowest": [msgspec.to_builtins(each) for each in explanations],
    }
    return result, explanations


def report(cluster: SimulatedCluster, measures: Measures) -> dict[str, Any]:
    """All figures of a run; they depend on nothing but its arguments."""
    return {
        **measures.report(),
        "tenants": measures.by_tenant(),
        "waiting": len(measures.waiting),
        "ended_twice": len(measures.ended_twice),
        "utilisation": cluster.utilisation(),
        "queue": cluster.queue_lengths(),
        "placed": cluster.placed,
        "asked_again": measures.resends,
        "network_bytes": cluster.network.bytes,
        "messages_lost": cluster.network.lost,
        "ends_of_processes": cluster.ends,
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['requests']} requests in {result['seconds']:.1f} s: "
        + ", ".join(f"{count} {end}" for end, count in result["ends"].items())
        + (f", {result['waiting']} still waiting" if result["waiting"] else "")
        + (f"; {result['ends_of_processes']} processes died" if result["ends_of_processes"] else "")
        + (f", {result['asked_again']} times a client turned to another router" if result["asked_again"] else ""),
        f"hit rate {result['hit_rate']:.1%}, "
        + ", ".join(f"{role} {share:.0%} busy" for role, share in result["utilisation"].items())
        + f", queue {result['queue']['mean']:.1f} on average, {result['queue']['most']} at most",
        "",
        f"{'':6}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}",
    ]
    for name, unit, scale in (("ttft", "s", 1), ("tpot", "ms", 1_000), ("tbt", "ms", 1_000)):
        spread = result[name]
        cells = (f"{spread[key] * scale:>10.3f}" if key in spread else f"{'-':>10}" for key in
                 ("mean", "p50", "p90", "p95", "p99"))  # fmt: skip
        lines.append(f"{name:6}{''.join(cells)} {unit}")
    lines += ["", *(f"goodput at {name}: {share:.1%}" for name, share in result["goodput"].items())]
    if len(result["tenants"]) > 1:
        tokens = ", ".join(f"{name or 'nobody'} {count:.0f}" for name, count in result["tenants"].items())
        lines.append(f"tokens by tenant: {tokens}")
    if result["arguments"]["batch"]:
        lines.append(f"{result['in_gaps'] / result['seconds']:.0f} tokens/s in gaps; the times are of other requests")
    if refused := result["refused_after"]:
        lines.append(
            f"refused after {refused['p50'] * 1_000:.1f} ms in the median, {refused['p99'] * 1_000:.1f} at p99"
        )
    took = result["simulator"]
    lines.append(f"simulated in {took['seconds']:.1f} s, {took['events']} events, {took['peak_mib']} MiB at most")
    return "\n".join(lines)


def _load(args: argparse.Namespace) -> Iterator[Arrival]:
    wishes = Wishes(args.max_tokens, args.ttft, args.tpot, tuple(args.tenants), tuple(args.priorities))
    if args.trace:
        return trace(mooncake.read_trace(Path(args.trace), args.requests), args.speed, wishes, args.seed)
    load = Random(
        args.poisson * args.speed, Lengths.parse(args.prompt), Lengths.parse(args.output), args.groups, args.prefix,
        Bursts(args.burst_factor, args.burst_share, args.burst_spell),
    )  # fmt: skip
    return load.arrivals(args.requests or 1_000, wishes, args.seed)


def _objectives(text: str) -> tuple[float, float]:
    ttft, _, tbt = text.partition("/")
    return float(ttft), float(tbt)


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.partition(":")
    return name, float(weight or 1)


def _priority(text: str) -> tuple[int, float]:
    name, weight = _weighted(text)
    if not name.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{name!r} is no level of priority, a whole number")
    return int(name), weight


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _above_0(text: str) -> float:
    if not (value := _at_least_0(text)):
        raise argparse.ArgumentTypeError("0 is too little")
    return value


def _at_least_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cluster", default="8P+8D", help="8P+8D, or 16D for a colocated one")
    add("--routers", type=_count, default=1, help="that share the workers, each with clients of its own")
    add("--per-node", type=_count, default=1, help="workers that share a node and its store")
    add("--model", default="a800_70b", help="a timing model: a name from simulator/models, or a file")
    add("--policy", default=policies.OWN, choices=policies.POLICIES)
    add("--page-size", type=_count, default=512, help="tokens")
    add("--trace", help="a file of JSON lines in Mooncake's format")
    add("--poisson", type=_above_0, default=1.0, metavar="RATE", help="without a trace: requests a second on average")
    add("--prompt", default="lognormal:4000:1.0:60000", help="tokens, as for bench/cluster/serve.py")
    add("--output", default="lognormal:250:0.8:2000", help="tokens")
    add("--groups", type=int, default=0, help="groups of prompts that begin alike")
    add("--prefix", type=int, default=2_048, help="tokens that a group shares")
    add("--burst-factor", type=_above_0, default=1.0, help="times the calm rate, during bursts")
    add("--burst-share", type=float, default=0.2, help="of the time")
    add("--burst-spell", type=_above_0, default=30.0, help="seconds that a burst lasts on average")
    add("--speed", type=_above_0, default=1.0, help="times the load's own")
    add("--requests", type=_count, help="at most so many")
    add(
        "--max-tokens",
        type=_count,
        default=4_096,
        help="what requests allow; outputs that are longer anyway have theirs",
    )
    add("--ttft", type=_above_0, help="objective of every request, seconds")
    add("--tpot", type=_above_0, help="the same for tokens after the first")
    add("--tenants", type=_weighted, nargs="+", default=[("", 1.0)], metavar="NAME:WEIGHT", help="who sends how many")
    add("--priorities", type=_priority, nargs="+", default=[(0, 1.0)], metavar="PRIORITY:WEIGHT")
    add("--batch", type=int, default=0, metavar="N", help="requests of the lowest class under way beside the load")
    add("--goodput", type=_objectives, nargs="*", default=[(30.0, 0.1), (30.0, 0.2), (30.0, 0.3)], metavar="TTFT/TBT")
    add("--deaths", type=_at_least_0, default=0.0, metavar="RATE", help="workers that die in a minute")
    add("--store-deaths", type=_at_least_0, default=0.0, metavar="RATE", help="stores that die in a minute")
    add("--router-deaths", type=_at_least_0, default=0.0, metavar="RATE", help="routers that die in a minute")
    add(
        "--splits",
        type=_at_least_0,
        default=0.0,
        metavar="RATE",
        help="a minute: a router loses sight of half of the rest",
    )
    add("--split-seconds", type=_above_0, default=10.0, help="that such a split lasts on average")
    add("--loss", type=_at_least_0, default=0.0, help="share of messages to and from routers that are lost")
    add("--slow", type=_at_least_0, default=0.0, help="share of workers that are twice as slow")
    add("--single-steps", action="store_true", help="simulate every decode step by itself")
    add("--explain-slowest", type=int, default=0, metavar="N", help="why the N slowest first tokens came so late")
    add("--limit", type=float, default=float("inf"), help="stop after so many simulated seconds")
    add("--seed", type=int, default=1)
    add("--set", action="append", default=[], metavar="SECTION.SETTING=VALUE", help="configuration")
    add("--json", help="write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
