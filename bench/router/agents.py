"""Recorded agent sessions in the simulator, in a closed loop: how much of their prompts comes from caches.

    python -m bench.router.agents traces/agentic_*.jsonl --policies baton llm_d --host 8GB 24GB 96GB --seeds 5

A turn follows the answer to the one before, after its recorded gap. `reuse` is the share of prompt tokens that came
from caches, and its limit is the share that a cache without limits would have had, in whole pages. Cold figures are
those of the turns before `--warm-up`. docs/lab/routing.md has the results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.config import parse_override
from baton.errors import BatonError
from bench import report
from router import policies
from simulator import mooncake, timing
from simulator.cluster import Layout, SimulatedCluster
from simulator.sessions import Sessions
from simulator.workloads import Wishes

_GAPS = (60.0, 300.0)  # seconds between two turns of a session: where short, middle and long gaps part


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    value: float
    limit: float | None = None


def figures(
    table: Mapping[str, npt.NDArray[np.float64]], rows: npt.NDArray[np.bool_], page: int, ttft: float
) -> Iterator[Figure]:
    """Yield the figures of some rows of a `Measures.table`. The limit counts whole pages only."""
    rows = rows & (table["finished"] > 0)
    of = {name: column[rows] for name, column in table.items()}
    prompts = float(of["prompt"].sum())
    if not prompts:
        return
    possible = of["possible"] // page * page
    yield Figure("reuse", "ratio", float(of["cached"].sum()) / prompts, float(possible.sum()) / prompts)
    for percentile in (50, 90, 99):
        yield Figure(f"TTFT p{percentile}", "s", float(np.percentile(of["ttft"], percentile)))
    span = float(of["arrived"].max() - of["arrived"].min())
    yield Figure(f"goodput within {ttft:g} s", "requests/s", float((of["ttft"] <= ttft).sum()) / max(span, 1e-9))
    lost = possible - of["cached"]
    for low, high in itertools.pairwise((0.0, *_GAPS, np.inf)):
        within = (of["gap"] >= low) & (of["gap"] < high)
        until = f"to {high:g}" if high < np.inf else "or more"
        yield Figure(f"lost after {low:g} {until} s", "ratio", float(lost[within].sum()) / prompts)


def run(arguments: argparse.Namespace, lines: Sequence[mooncake.TraceLine], policy: str, host: str, seed: int) -> (
    Mapping[str, npt.NDArray[np.float64]]
):  # fmt: skip
    """Serve the users, and return the table of their requests."""
    model = timing.read_timing(arguments.model)
    settings = {**dict(map(parse_override, arguments.set)), "store.host_cache_bytes": host}
    config = model.configuration(arguments.page_size, settings)
    placer = policies.policy_named(policy, seed, model.costs, model.network)
    cluster = SimulatedCluster(Layout.parse(arguments.cluster, arguments.per_node), model, config, seed, placer)
    return cluster.run(Sessions(lines, Wishes(), seed).users(arguments.users, arguments.seconds)).table()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        lines = [line for path in arguments.traces for line in mooncake.read_trace(path)]
        for host, policy in itertools.product(arguments.host, arguments.policies):
            runs: dict[tuple[str, str], list[Figure]] = {}
            for seed in range(1, arguments.seeds + 1):
                table = run(arguments, lines, policy, host, seed)
                warm = table["arrived"] - table["arrived"].min() >= arguments.warm_up
                for when, rows in (("cold", ~warm), ("warm", warm)):
                    for figure in figures(table, rows, arguments.page_size, arguments.ttft):
                        runs.setdefault((when, figure.name), []).append(figure)
            for (when, name), results in runs.items():
                case = f"{arguments.cluster} {host} {policy}, {when}: {name}"
                values, limits = [each.value for each in results], [each.limit for each in results if each.limit]
                report.emit(
                    report.beside("agents", case, results[0].unit, values, limits) if limits
                    else report.median_of("agents", case, results[0].unit, values)
                )  # fmt: skip
    except BatonError as error:
        report.say(f"agents: {error}")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("traces", type=Path, nargs="+", help="recorded sessions, JSON lines")
    add("--cluster", default="2P+2D")
    add("--per-node", type=int, default=1, help="workers that share a node and its store")
    add("--model", default="h100_8b", help="a timing model: a name from simulator/models, or a file")
    add("--policies", nargs="+", default=[policies.OWN], choices=policies.POLICIES)
    add("--host", nargs="+", default=["24GB"], help="host cache of a node")
    add("--users", type=int, default=32)
    add("--seconds", type=float, default=3_600.0, help="until which users begin turns")
    add("--warm-up", type=float, default=1_200.0, help="seconds of the run that count as cold")
    add("--page-size", type=int, default=512, help="tokens")
    add("--ttft", type=float, default=2.0, help="objective, seconds")
    add("--seeds", type=int, default=1, help="the median of so many runs is reported")
    add("--set", action="append", default=[], metavar="SECTION.SETTING=VALUE", help="configuration")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
