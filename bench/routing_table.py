"""Routing policies compared on production traces: the table of docs/lab/routing.md.

    bench/routing_table.py TRACE.jsonl ... [--quick] [--into cells.jsonl] [--jobs 2] [--policies baton,llm_d]
    bench/routing_table.py --quick TRACE.jsonl    # six cells of the first trace named
    bench/routing_table.py                        # the table of what is there, without running anything

A cell is a trace, a speed, a cluster and a policy. Each finished cell is appended to a file of JSON lines with the
commit it was made with; cells that are there already are not run again, so a table may be made in many sittings. The
Markdown goes to stdout.

Goodput is the rate of requests that meet both objectives: first token within 30 s, and TBT within 100, 200 or 300 ms.
TBT (time between tokens) is the mean of the longest tenth of a request's gaps. The rate is per second of the time over
which requests arrive, so it compares as the share of requests does. One run serves all three: requests ask for the
first only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from baton.errors import BatonError, ConfigError
from bench import report
from router.policies import OWN, POLICIES, policy_named
from simulator import mooncake, timing
from simulator.cluster import Layout, SimulatedCluster
from simulator.workloads import Wishes, trace

TTFT = 30.0  # seconds
TBTS = (0.1, 0.2, 0.3)  # seconds
SPEEDS = (1.0, 1.5, 2.0, 3.0)
CLUSTERS = ("8P+8D", "16D")
NEAR = 0.03  # of the best goodput
_QUICK = (2.0, ("baton", "dynamo_kv", "mooncake"))  # the speed and the policies, on both clusters
_QUANTILES = (50, 90, 99)
_PAGE_SIZE = mooncake.BLOCK  # what prompts share in the traces


class Cell(Struct, frozen=True):
    """One run. `trace` is the file's name without its ending; its first `count` requests are served, or all."""

    trace: str
    speed: float
    cluster: str
    policy: str
    model: str = "a800_70b"
    seed: int = 1
    count: int | None = None


class Result(Struct, frozen=True):
    """The figures of a cell. Latencies are the 50th, 90th and 99th percentile, in seconds, of finished requests."""

    cell: Cell
    commit: str
    requests: int
    finished: int
    seconds: float  # over which they arrived
    goodput: tuple[float, ...]  # requests a second, for each of TBTS
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    hit_rate: float  # share of prompt tokens that came from caches
    busy: dict[str, float]  # share of the time that workers of a role spent in steps
    wall: float  # seconds that the simulation took


def cells(traces: Sequence[str], policies: Sequence[str], *, quick: bool) -> list[Cell]:
    """Those of the table, in the order in which they are best run: one comparison after the other."""
    if quick:
        speed, policies = _QUICK
        return [Cell(traces[0], speed, cluster, policy) for cluster, policy in product(CLUSTERS, policies)]
    return [Cell(*cell) for cell in product(traces, SPEEDS, CLUSTERS, policies)]


def run(cell: Cell, path: Path) -> Result:
    """Simulate a cell, whose trace is in `path`. Raises ConfigError."""
    began, commit = time.monotonic(), report.commit()
    times = timing.read(cell.model)
    cluster = SimulatedCluster(
        Layout.parse(cell.cluster), times, times.configuration(_PAGE_SIZE, {}), cell.seed,
        policy_named(cell.policy, cell.seed, times.costs, times.network),
    )  # fmt: skip
    load = trace(mooncake.read(path, cell.count), cell.speed, Wishes(ttft=TTFT), cell.seed)
    measures = cluster.run(load)
    table = measures.table()
    finished = table["finished"] > 0
    seconds = float(np.ptp(table["arrived"]))
    if not seconds:
        raise ConfigError(f"all requests of {path} come at once, so there is no rate of them")
    return Result(
        cell=cell,
        commit=commit,
        requests=measures.arrived,
        finished=int(finished.sum()),
        seconds=seconds,
        goodput=tuple(measures.goodput(TTFT, tbt) * measures.arrived / seconds for tbt in TBTS),
        ttft=_spread(table["ttft"][finished]),
        tpot=_spread(table["tpot"][finished]),
        hit_rate=float(table["cached"][finished].sum() / max(table["prompt"][finished].sum(), 1)),
        busy=cluster.utilisation(),
        wall=time.monotonic() - began,
    )


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, ...]:
    known = values[~np.isnan(values)]
    return tuple(np.percentile(known, _QUANTILES).tolist()) if len(known) else (0.0,) * len(_QUANTILES)


# --- what is there -------------------------------------------------------------------------------------------------


def missing(wanted: Iterable[Cell], done: Iterable[Result]) -> list[Cell]:
    have = {result.cell for result in done}
    return [cell for cell in wanted if cell not in have]


def read(path: Path) -> list[Result]:
    """The results of a file; none where there is no such file. A line cut short by a crash is as if it were not
    there."""
    if not path.exists():
        return []
    results: list[Result] = []
    for line in path.read_bytes().splitlines():
        try:
            results.append(msgspec.json.decode(line, type=Result))
        except msgspec.DecodeError:
            if line:
                report.say(f"{path}: a line that is no result is left out")
    return results


def append(path: Path, result: Result) -> None:
    """A line of its own, whatever the file ends with."""
    with path.open("ab") as file:
        file.write(b"\n" * bool(file.tell()) + msgspec.json.encode(result))


# --- the table -----------------------------------------------------------------------------------------------------


def render(results: Sequence[Result]) -> Iterator[str]:
    """The Markdown, line by line: how Baton fares, beside the best of the others in each comparison, then one table for
    each trace, cluster and speed."""
    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.cell.trace, result.cell.cluster, result.cell.speed)):
        groups.setdefault(_name(result.cell), []).append(result)
    yield from _verdict(groups)
    yield from _beside_the_best(groups)
    for name, group in groups.items():
        yield ""
        yield f"**{name}**: {group[0].requests:,} requests in {group[0].seconds:,.0f} s"
        yield ""
        tbts = " | ".join(f"≤ {tbt * 1_000:.0f} ms" for tbt in TBTS)
        yield f"| policy | {tbts} | TTFT p50 / p90 / p99, s | TPOT p50 / p90 / p99, ms | hits |"
        yield f"|---|{'---|' * len(TBTS)}---|---|---|"
        best = [max(result.goodput[index] for result in group) for index in range(len(TBTS))]
        for result in sorted(group, key=lambda result: -sum(result.goodput)):
            goodputs = " | ".join(_marked(own, most) for own, most in zip(result.goodput, best, strict=True))
            ttft = _ttft(result)
            tpot = " / ".join(f"{seconds * 1_000:.0f}" for seconds in result.tpot)
            yield f"| {result.cell.policy} | {goodputs} | {ttft} | {tpot} | {result.hit_rate:.1%} |"


def _name(cell: Cell) -> str:
    """Of a comparison: what its cells have in common."""
    first = f", first {cell.count}" if cell.count is not None else ""
    return f"{cell.trace}{first}, {cell.model}, {cell.cluster}, {cell.speed:g}×"


def _own(group: Sequence[Result]) -> Result | None:
    return next((result for result in group if result.cell.policy == OWN), None)


def _ttft(result: Result) -> str:
    return " / ".join(f"{seconds:.2f}" for seconds in result.ttft)


def _beside_the_best(groups: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """The best other rule of each comparison, by all three objectives together; its goodput by the strictest."""
    yield ""
    tbts = " / ".join(f"{tbt * 1_000:.0f}" for tbt in TBTS)
    yield f"| comparison | best other | {OWN} over it at {tbts} ms | TTFT p50 / p90 / p99, s | that rule's |"
    yield "|---|---|---|---|---|"
    for name, group in groups.items():
        own, others = _own(group), [result for result in group if result.cell.policy != OWN]
        if own is None or not others:
            continue
        best = max(others, key=lambda result: sum(result.goodput))
        over = " / ".join(
            f"{mine / its:.1%}" if its else "–" for mine, its in zip(own.goodput, best.goodput, strict=True)
        )
        yield f"| {name} | {best.cell.policy}, {best.goodput[0]:.2f}/s | {over} | {_ttft(own)} | {_ttft(best)} |"


def _marked(own: float, most: float) -> str:
    """The best is bold; what is within 3 % of it has a tilde."""
    text = f"{own:.3f}"
    if own == most:
        return f"**{text}**"
    return f"{text} ~" if own >= (1 - NEAR) * most else text


def _verdict(groups: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """In how many comparisons Baton is best or near it, where it falls shortest, and with which commits."""
    shares: list[tuple[float, str]] = []
    for name, group in groups.items():
        own = _own(group)
        if own is None or len(group) < 2:
            continue
        for index, tbt in enumerate(TBTS):
            most = max(result.goodput[index] for result in group)
            share = own.goodput[index] / most if most else 1.0
            shares.append((share, f"{name}, {tbt * 1_000:.0f} ms"))
    if not shares:
        return
    near = sum(share >= 1 - NEAR for share, _ in shares)
    worst, where = min(shares)
    commits = sorted({result.commit for group in groups.values() for result in group})
    yield f"Baton is best or within {NEAR:.0%} of it in {near} of {len(shares)} comparisons;"
    yield f"at its worst it has {worst:.1%} of the best ({where}). Commits: {', '.join(commits)}."
    took = [result.wall for group in groups.values() for result in group]
    minutes = sum(took) / 60
    yield f"The {len(took)} cells took {minutes:.0f} minutes of a core, {min(took):.0f} to {max(took):.0f} s each."


# --- the command ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    paths: Mapping[str, Path] = {path.stem: path for path in asked.traces}
    if paths:
        wanted = [
            msgspec.structs.replace(cell, model=asked.model, seed=asked.seed, count=asked.count)
            for cell in cells(list(paths), asked.policies, quick=asked.quick)
        ]
        try:
            _run_all(missing(wanted, read(asked.into)), paths, asked)
        except BatonError as error:
            report.say(f"routing_table: {error}")
            return 1
    for line in render(read(asked.into)):
        print(line)
    return 0


def _run_all(wanted: Sequence[Cell], paths: Mapping[str, Path], asked: argparse.Namespace) -> None:
    """What has finished is kept whatever becomes of the others."""
    for number, result in enumerate(_results(wanted, paths, asked.jobs), 1):
        append(asked.into, result)
        report.say(f"{number} of {len(wanted)}: {result.cell} in {result.wall:.0f} s")


def _results(wanted: Sequence[Cell], paths: Mapping[str, Path], jobs: int) -> Iterator[Result]:
    """As they come, from so many processes; from this one where one will do."""
    if jobs == 1:
        yield from (run(cell, paths[cell.trace]) for cell in wanted)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = [pool.submit(run, cell, paths[cell.trace]) for cell in wanted]
        for future in as_completed(running):
            yield future.result()


def _policies(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(POLICIES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(POLICIES)}")
    return names


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Routing policies compared on production traces.")
    parser.add_argument("traces", nargs="*", type=Path, help="files in Mooncake's format")
    parser.add_argument("--into", type=Path, default=Path("routing_cells.jsonl"), help="where finished cells are kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--policies", type=_policies, default=list(POLICIES), help="of all, by name, with commas")
    parser.add_argument("--model", default="a800_70b", help="of simulator/models, or a file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="of requests, from the trace's start; for trying things out")
    parser.add_argument("--quick", action="store_true", help="six cells")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
