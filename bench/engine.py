"""The bare engine beside what the machine's memory and arithmetic allow.

    bench/engine.py [--quick] [--cases decode-1,prefill-8] [--threads 2] [--step-tokens 512]

`Engine.step` in a loop, in a process of its own, and nothing else, on a Llama of 100 M random parameters. Each round
runs every case with prompts of its own, and measures the limits before and after it, since a virtual machine's memory
is not as fast at every moment. docs/lab/benchmarks.md says how tokens are counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench import models, report, roofline
from bench.peers import environments
from bench.peers.adapter import Peer, PeerFailed
from bench.peers.cases import CASES, Case, chosen
from bench.roofline import Shape
from bench.turns import Run, Turn, Turns, quiet
from engine.models.weights import TORCH_DTYPES

OWN = "baton"
TARGETS = {"decode-1": 0.75, "decode-8": 0.75}
"""Shares of the roofline."""


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    try:
        with bare_engine(asked.model, asked.dtype, asked.threads, asked.step_tokens) as engine:
            report.say(report.machine())
            vocabulary = models.LLAMA_100M["vocab_size"]
            turns = Turns({OWN: engine}, vocabulary, asked.threads, TORCH_DTYPES[asked.dtype])
            taken = measure(turns, asked.cases, asked.rounds)
    except PeerFailed as error:
        report.say(f"engine: {error}")
        return 1
    shape = Shape.of(models.LLAMA_100M, TORCH_DTYPES[asked.dtype].itemsize)
    runs = {case: [turn.runs[OWN] for turn in own] for case, own in taken.items()}
    for result in results(runs, shape):
        report.emit(result)
    return 0


def bare_engine(
    model: str, dtype: str, threads: int, max_num_batched_tokens: int, variables: Mapping[str, str] | None = None
) -> Peer:
    """The engine's process, ready. Raises PeerFailed."""
    told = [str(models.directory(model)), dtype, str(threads), str(max_num_batched_tokens)]
    command = [sys.executable, "-m", "bench.peers.baton_engine", *told]
    return Peer(OWN, command, environments.variables(variables or {}))


def measure(turns: Turns, cases: Sequence[Case], count: int) -> dict[Case, list[Turn]]:
    """`count` turns at each case after one to warm up; then those that were quiet."""
    taken: dict[Case, list[Turn]] = {case: [] for case in cases}
    for number in range(count + 1):
        for case in cases:
            taken[case].append(turns.take(case, [OWN]))
        told = ", ".join(f"{case.name} {case.rate(taken[case][-1].runs[OWN].seconds):,.0f}/s" for case in cases)
        report.say(f"round {number} of {count}: {told}; {taken[cases[-1]][-1].runs[OWN].limits}")
    return {case: quiet(own[1:]) for case, own in taken.items()}


def results(runs: Mapping[Case, Sequence[Run]], shape: Shape) -> list[report.Result]:
    """Each case beside its roofline, and the limits that it is made of. A ratio is the median of the runs' own."""
    lines: list[report.Result] = []
    for case, taken in runs.items():
        told = beside_roofline("engine", case.name, case, taken, shape)
        target = TARGETS.get(case.name)
        lines.append(told if target is None else report.judged(told, target, "high"))
    seen = [one.limits for taken in runs.values() for one in taken]
    read, compute = statistics.median(one.read for one in seen), statistics.median(one.compute for one in seen)
    others = [one.others for taken in runs.values() for one in taken]
    return [
        *lines,
        report.Result("engine", "limit: memory read", read, "B/s"),
        report.Result("engine", "limit: large product", compute, "FLOP/s"),
        report.Result("engine", "used by others meanwhile", max(others), "cores"),
    ]


def beside_roofline(bench: str, name: str, case: Case, runs: Sequence[Run], shape: Shape) -> report.Result:
    rates = [case.rate(one.seconds) for one in runs]
    bounds = [roofline.rate(case, shape, one.limits) for one in runs]
    ratio = statistics.median(rate / bound for rate, bound in zip(rates, bounds, strict=True))
    told = report.median_of(bench, name, case.unit, rates)
    return replace(told, limit=statistics.median(bounds), ratio=ratio)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 7")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cases", type=chosen, default=CASES, help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--step-tokens", type=int, default=2_048, help="the most tokens of one step (default 2,048)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", default="100m", help="a checkpoint of that same shape, as bench/models.py knows it")
    asked = parser.parse_args(argv)
    asked.rounds = asked.rounds or (2 if asked.quick else 7)
    return asked


if __name__ == "__main__":
    sys.exit(main())
