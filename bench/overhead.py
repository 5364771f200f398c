"""What the cluster adds to the time between two tokens: single-stream ITL through it, over the bare engine loop's.

    bench/overhead.py [--quick] [--threads N]

One stream at a time, so that nothing is measured but the path of a token: decode worker's turn, router, gRPC. The bare
engine, a 1P+1D cluster and a colocated one are up together and take turns (A B C A B C … A), so that a machine that
grows slower or faster meanwhile does so for all; a round's ratio is against the mean of the bare rounds around it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import BatonError
from bench import cluster, load, models, report
from bench.bare import BareEngine
from bench.workload import Lengths, Planned, Workload

TARGET = 1.15
_PROMPT = 48  # tokens: two full pages, so that 1P+1D really splits
_SHAPES = {"1P+1D": (1, 1), "1D": (0, 1)}
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


def ratios(runs: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Each run over the mean of the bare runs before and after it: `bare` has one more."""
    return [run / ((before + after) / 2) for run, (before, after) in zip(runs, pairwise(bare), strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    try:
        with ExitStack() as stack:
            sides = _start(asked, stack)
            report.say(report.machine())
            for result in results(alternate(sides, asked.rounds, asked.tokens), asked.threads):
                report.emit(result)
    except BatonError as error:
        report.say(f"overhead: {error}")
        return 1
    return 0


def alternate(sides: Mapping[str, Gaps], count: int, tokens: int) -> dict[str, Rounds]:
    """Let every side generate `count` times in turn, the first of them, the bare engine, once more at the end."""
    bare, *_ = sides
    rounds = {name: Rounds() for name in sides}
    order = [*(list(sides) * count), bare]
    # A prompt of its own for each turn, after one for each side to warm up with.
    workload = Workload(Lengths("fixed", _PROMPT), Lengths("fixed", tokens), models.LLAMA_100M["vocab_size"])
    plan = iter(workload.plan(len(sides) + len(order), seed=1))
    for gaps in sides.values():
        gaps(next(plan))
    for name in order:
        rounds[name].add(sides[name](next(plan)))
        report.say(f"{name}: {rounds[name].medians[-1] * 1_000:.2f} ms")
    return rounds


def results(rounds: Mapping[str, Rounds], threads: int) -> list[report.Result]:
    """Median and mean ITL of every side; the target is on the median."""
    (name, bare), *others = rounds.items()
    told = [_result(f"{name} ITL p50", bare.medians, threads), _result(f"{name} ITL mean", bare.means, threads)]
    for name, side in others:
        for kind, runs, limits in (("p50", side.medians, bare.medians), ("mean", side.means, bare.means)):
            result = _result(f"{name} ITL {kind}", runs, threads)
            limit, ratio = statistics.median(limits) * 1_000, statistics.median(ratios(runs, limits))
            told.append(report.judged(result, limit=limit, ratio=ratio, target=TARGET, better="low"))
    return told


def _result(case: str, runs: Sequence[float], threads: int) -> report.Result:
    return report.median_of("overhead", f"{case}, {threads} threads", "ms", [run * 1_000 for run in runs])


def _start(asked: argparse.Namespace, stack: ExitStack) -> dict[str, Gaps]:
    model = models.directory("100m")
    bare = stack.enter_context(BareEngine(model, "auto", asked.threads))
    sides: dict[str, Gaps] = {"bare": lambda request: bare.gaps(request.prompt, request.output)}
    settings = {"model.device": "cpu", "store.arena_bytes": _POOL}
    settings |= {f"{role}.threads": asked.threads for role in ("prefill", "decode")}
    settings |= {f"{role}.pool_bytes": _POOL for role in ("prefill", "decode")}
    for name, (prefill, decode) in _SHAPES.items():
        report.say(f"starting {name}")
        started = stack.enter_context(cluster.local(model, prefill, decode, settings))
        sides[name] = _through(started.address)
    return sides


def _through(address: str) -> Gaps:
    def gaps(request: Planned) -> list[float]:
        (outcome,) = asyncio.run(load.closed_loop(address, [request], concurrency=1, timeout=120.0))
        if outcome.failed:
            raise BatonError(f"a request failed: {outcome.failed}")
        return outcome.gaps

    return gaps


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds of 32 tokens, instead of 15 of 64")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--tokens", type=int, help="tokens generated in each")
    parser.add_argument("--threads", type=int, default=1, help="of the tensor library, in every process (default 1)")
    asked = parser.parse_args(argv)
    asked.rounds = asked.rounds or (5 if asked.quick else 15)
    asked.tokens = asked.tokens or (32 if asked.quick else 64)
    return asked


if __name__ == "__main__":
    sys.exit(main())
