"""How long a placement takes: `bench/router/placement.py [--quick]`.

Clusters have 2 to 1,000 workers, half of them prefill, eight to a node, each node with a store. A third of the
requested prefixes is cached nowhere, a third on one worker and its store, and a third on every fourth worker (a hot
prefix). A decision is timed with the work that precedes it in a router: workers that got or ended requests since the
last decision are read again. Matching a prefix is not part of it (`bench.prefix_map`).
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace

from baton.config import Config
from baton.messages import AttemptName, Hello, LoadReport, ModelCard, Namespace, Peer
from bench import report
from kvstore.prefix_map.prefix_map import PrefixMatch
from router.members import AssignedAttempt, ClusterMembership, PendingPrefill
from router.placement.cached_prefix import CacheablePrefix
from router.placement.cluster_view import ClusterView
from router.placement.policy import LowestTtft
from router.placement.step_costs import DecodeCost, PrefillCost
from router.placement.types import Placement, PlacementRequest

SIZES = (2, 8, 64, 256, 1_000)
_GOALS = {64: 100.0, 1_000: 500.0}  # µs
_PAGES = 800  # of a prompt of 12,800 tokens
_NAMESPACE = Namespace(
    model=b"m" * 16, numerics="test", kv_dtype="bfloat16", page_size=16, layout=1, form="split", kv_heads=1
)


class _Costs:
    """Those of a 70B model on eight A800, about."""

    def prefill(self, incarnation: str) -> PrefillCost:
        return PrefillCost(0.02, 1.2e-4, 2e-9)

    def step(self, incarnation: str) -> DecodeCost:
        return DecodeCost(0.02, 1e-4, 3e-8)


def measure(workers: int, decisions: int, seed: int = 0) -> list[float]:
    """Seconds of each decision."""
    draw = random.Random(seed)
    members = ClusterMembership(16)
    card = ModelCard(_NAMESPACE, 5_242_880, 32_000, 131_072, 200_000)
    for node in range(-(-workers // 8)):
        members.join(Hello(Peer("store", f"store-{node}", f"n{node}", f"s{node}", 1), data=f"tcp://n{node}"), 0.0)
    for index in range(workers):
        role = "decode" if index % 2 else "prefill"
        hello = Hello(Peer(role, f"w{index}", f"n{index // 8}", f"w{index}", 1), model=card)
        members.join(hello, 0.0).update_load(LoadReport(prefill_rate=8_000.0), 0, LoadReport(), 0.0)
    view, placer = ClusterView(Config(), members, _Costs()), LowestTtft()
    running: list[tuple[float, Placement, AttemptName]] = []
    seconds: list[float] = []
    for number in range(decisions):
        now = number * 8.0 / workers
        while running and running[0][0] <= now:
            _, plan, name = running.pop(0)
            for incarnation in filter(None, (plan.decode, plan.prefill)):
                members.require_live(incarnation).unassign(name)
        tokens = _PAGES * 16 + 10
        ask = PlacementRequest(
            f"r{number}", CacheablePrefix(_PAGES, 16, 5_242_880), (), _held(draw, workers), tokens, tokens + 300, tokens
        )
        begin = time.perf_counter()
        view.begin_scan(now)
        choice = placer.place(ask, view).choice
        seconds.append(time.perf_counter() - begin)
        if isinstance(choice, Placement):
            view.mark_used(choice)
            name = AttemptName(ask.request, 1)
            members.require_live(choice.prefill or choice.decode).assign_prefill(
                name, PendingPrefill((_PAGES - choice.cached_pages) * 16), now
            )
            members.require_live(choice.decode).assign(
                name, AssignedAttempt(number, _PAGES, tokens + 150.0, new_pages=_PAGES, tpot=0.1)
            )
            running.append((now + 20.0, choice, name))
    return seconds[decisions // 10 :]


def _held(draw: random.Random, workers: int) -> dict[str, PrefixMatch]:
    """Return how much of a prefix each worker and store has."""
    kind = draw.randrange(3)
    having = [] if kind == 0 else [draw.randrange(workers)] if kind == 1 else range(draw.randrange(4), workers, 4)
    held: dict[str, PrefixMatch] = {}
    for worker in having:
        pages = draw.randrange(1, _PAGES)
        held[f"w{worker}"] = PrefixMatch(pages, {"GPU": pages})
        held[f"s{worker // 8}"] = PrefixMatch(pages, {"CPU": pages})
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer decisions")
    decisions = 200 if parser.parse_args().quick else 2_000
    report.say(report.machine())
    for workers in SIZES:
        runs = [sorted(measure(workers, decisions, seed)) for seed in range(3)]
        middle, late = ([run[len(run) * share // 100] * 1e6 for run in runs] for share in (50, 99))
        result = report.median_of("placement", f"{workers:,} workers", "µs", middle)
        if (goal := _GOALS.get(workers)) is not None:
            result = report.judged(replace(result, limit=goal, ratio=result.value / goal), 1.0, "low")
        report.emit(result)
        report.emit(report.median_of("placement", f"{workers:,} workers, p99", "µs", late))


if __name__ == "__main__":
    main()
