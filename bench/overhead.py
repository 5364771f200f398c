"""What the cluster adds to the time between two tokens: single-stream ITL through it, over the bare engine loop's.

    bench/overhead.py [--quick] [--threads N]

One stream at a time, so that nothing is measured but the path of a token: decode worker's turn, router, gRPC. The bare
engine, a 1P+1D cluster and a colocated one are up together and take turns (A B C A B C … A), so that a machine that
grows slower or faster meanwhile does so for all; a round's ratio is against the mean of the bare rounds around it.

Where the time goes: no token can be computed before the one before it, so the gap between two is one turn of the decode
worker's loop, and the router and gRPC add to it only the CPU that they take from it. The turn's engine step is known
from the worker's metrics; what it takes longer than the bare engine's is what others take from the CPU and its caches.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from baton.errors import BatonError
from baton.v1 import cluster_pb2
from bench import cluster, load, models, report
from bench.bare import BareEngine
from bench.workload import Lengths, Planned, Workload
from deploy.client import Client

TARGET = 1.15
_PROMPT = 33  # tokens: two pages for the prefill worker, and no step of the decode worker with more than one token
_SPLIT = "1P+1D"
_SHAPES = {_SPLIT: (1, 1), "1D": (0, 1)}
_POOL = "64MiB"

Gaps = Callable[[Planned], list[float]]


@dataclass
class Rounds:
    """What one way of generating took in each of its rounds: seconds between tokens."""

    medians: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, gaps: Sequence[float]) -> None:
        self.medians.append(statistics.median(gaps))
        self.means.append(statistics.fmean(gaps))


@dataclass(frozen=True)
class Steps:
    """Engine steps of a decode worker since its start, as its metrics page tells."""

    count: float
    seconds: float


class Through:
    """Generating through a cluster."""

    def __init__(self, address: str) -> None:
        self._address = address
        with Client(address) as client:
            processes = client.status().processes
        self._metrics = next(p.metrics_address for p in processes if p.role == cluster_pb2.ROLE_DECODE)

    def gaps(self, request: Planned) -> list[float]:
        (outcome,) = asyncio.run(load.closed_loop(self._address, [request], concurrency=1, timeout=120.0))
        if outcome.failed:
            raise BatonError(f"a request failed: {outcome.failed}")
        return outcome.gaps

    def steps(self) -> Steps:
        with urlopen(f"http://{self._metrics}/metrics", timeout=10) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        return Steps(samples["baton_step_seconds_count"], samples["baton_step_seconds_sum"])


def ratios(runs: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Each run over the mean of the bare runs before and after it: `bare` has one more."""
    return [run / ((before + after) / 2) for run, (before, after) in zip(runs, pairwise(bare), strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    try:
        with ExitStack() as stack:
            for result in measure(asked, stack):
                report.emit(result)
    except BatonError as error:
        report.say(f"overhead: {error}")
        return 1
    return 0


def measure(asked: argparse.Namespace, stack: ExitStack) -> list[report.Result]:
    """Start everything, warm it up, let it take turns."""
    model = models.directory("100m")
    bare = stack.enter_context(BareEngine(model, "auto", asked.threads))
    clusters = {name: Through(_start(name, model, asked.threads, stack)) for name in _SHAPES}
    sides: dict[str, Gaps] = {"bare": lambda request: bare.gaps(request.prompt, request.output)}
    sides |= {name: through.gaps for name, through in clusters.items()}
    report.say(report.machine())
    workload = Workload(Lengths("fixed", _PROMPT), Lengths("fixed", asked.tokens), models.LLAMA_100M["vocab_size"])
    for side, request in zip(sides.values(), workload.plan(len(sides), seed=0), strict=True):
        side(request)
    split = clusters[_SPLIT]
    before = split.steps()
    rounds = alternate(sides, workload, asked.rounds)
    after = split.steps()
    step = (after.seconds - before.seconds) / (after.count - before.count)
    return [*results(rounds, asked.threads), *parts(rounds, step, asked.threads)]


def alternate(sides: Mapping[str, Gaps], workload: Workload, count: int) -> dict[str, Rounds]:
    """Let every side generate `count` times in turn, the first of them, the bare engine, once more at the end; each
    time from another prompt."""
    bare, *_ = sides
    rounds = {name: Rounds() for name in sides}
    order = [*(list(sides) * count), bare]
    for name, request in zip(order, workload.plan(len(order), seed=1), strict=True):
        rounds[name].add(sides[name](request))
        report.say(f"{name}: {rounds[name].medians[-1] * 1_000:.2f} ms")
    return rounds


def results(rounds: Mapping[str, Rounds], threads: int) -> list[report.Result]:
    """Median and mean ITL of every side; the target is on the median."""
    (name, bare), *others = rounds.items()
    told = [_result(f"{name} ITL p50", bare.medians, threads), _result(f"{name} ITL mean", bare.means, threads)]
    for name, side in others:
        medians = _beside(_result(f"{name} ITL p50", side.medians, threads), side.medians, bare.medians)
        means = _beside(_result(f"{name} ITL mean", side.means, threads), side.means, bare.means)
        told += [report.judged(medians, TARGET, better="low"), means]
    return told


def parts(rounds: Mapping[str, Rounds], step: float, threads: int) -> list[report.Result]:
    """The mean gap of 1P+1D, in two: the worker's engine step, beside the bare engine's, and all else of its turn."""
    bare, mean = (statistics.fmean(rounds[name].means) for name in ("bare", _SPLIT))
    inside = _result(f"{_SPLIT} mean engine step in the worker", [step], threads)
    outside = _result(f"{_SPLIT} mean ITL outside the step", [mean - step], threads)
    return [replace(inside, limit=bare * 1_000, ratio=step / bare), outside]


def _beside(result: report.Result, runs: Sequence[float], bare: Sequence[float]) -> report.Result:
    return replace(result, limit=statistics.median(bare) * 1_000, ratio=statistics.median(ratios(runs, bare)))


def _result(case: str, runs: Sequence[float], threads: int) -> report.Result:
    return report.median_of("overhead", f"{case}, threads={threads}", "ms", [run * 1_000 for run in runs])


def _start(name: str, model: Path, threads: int, stack: ExitStack) -> str:
    """Start a cluster of that shape; the address of its router."""
    report.say(f"starting {name}")
    settings = {"model.device": "cpu", "store.arena_bytes": _POOL}
    for role in ("prefill", "decode"):
        settings |= {f"{role}.threads": threads, f"{role}.pool_bytes": _POOL}
    prefill, decode = _SHAPES[name]
    return stack.enter_context(cluster.local(model, prefill, decode, settings)).address


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 rounds of 24 tokens, instead of 40 of 48")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--tokens", type=int, help="tokens generated in each")
    parser.add_argument("--threads", type=int, default=1, help="of the tensor library, in every process (default 1)")
    asked = parser.parse_args(argv)
    asked.rounds = asked.rounds or (10 if asked.quick else 40)
    asked.tokens = asked.tokens or (24 if asked.quick else 48)
    return asked


if __name__ == "__main__":
    sys.exit(main())
