"""Measure the inter-token latency (ITL) that the cluster adds: single-stream ITL through it over the bare engine's.

    python -m bench.cluster.overhead [--quick] [--threads N]

One stream runs at a time, so only the path of a token is measured: an iteration of the decode worker, router, gRPC. The
bare engine, a 1P+1D cluster and a colocated one are up together and alternate (A B C A B C … A). A machine that becomes
slower or faster meanwhile does so for all three. A round's ratio is against the mean of the bare runs around it. Only
the third of the rounds with the least CPU use by other processes counts, since that use does not slow all sides alike.

Where the time goes: a token depends on the one before it, so the gap between two tokens is one iteration of the decode
worker's loop. The router and gRPC add to it only the CPU time that they take from that loop. The worker's metrics give
the iteration's engine step. The excess of that step over the bare engine's is due to other processes on the CPU and its
caches. The CPU time of the loop's thread does not change when other processes are busy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from baton.client import Client
from baton.errors import BatonError
from bench import clusters, models, report
from bench.bare import BareEngine
from bench.peers.adapter import PeerFailed
from bench.processes import Neighbours
from deploy.load import sender
from deploy.load.workload import Lengths, Planned, Workload
from deploy.local import LocalCluster

TARGET = 1.15
_PROMPT = 33  # tokens: the prefill worker makes two pages, and each step of the decode worker computes one token
_SPLIT = "1P+1D"
_SHAPES = {_SPLIT: (1, 1), "1D": (0, 1)}
_POOL = "64MiB"


@dataclass(frozen=True)
class Turn:
    """One stream: seconds between its tokens, of an engine step, and of the CPU that the loop's thread used for a
    token. `split`: a prefill worker computed of the prompt. `others`: cores that others used meanwhile."""

    median: float
    mean: float
    step: float
    cpu: float
    split: bool = False
    others: float = 0.0

    @classmethod
    def of(cls, gaps: Sequence[float], cpu: float, step: float | None = None) -> Turn:
        """For the bare engine, the gap is the step."""
        mean = statistics.fmean(gaps)
        return cls(statistics.median(gaps), mean, mean if step is None else step, cpu)


Side = Callable[[Planned], Turn]


@dataclass(frozen=True)
class Round:
    """One turn of each side of a cluster, between two of the bare engine."""

    before: Turn
    sides: Mapping[str, Turn]
    after: Turn

    @property
    def others(self) -> float:
        return max(turn.others for turn in (self.before, *self.sides.values(), self.after))

    def bare(self, figure: str) -> float:
        return (getattr(self.before, figure) + getattr(self.after, figure)) / 2


class Through:
    """Generating through a cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._address = cluster.address
        with Client(operator=cluster.operator) as client:
            processes = client.status().processes
        (worker,) = (process for process in processes if process.role == "decode")
        self._metrics = worker.metrics_address
        self._process = psutil.Process(worker.pid)
        self._before = self._read()

    def generate(self, request: Planned) -> Turn:
        (outcome,) = asyncio.run(sender.closed_loop(self._address, [request], concurrency=1, timeout=120.0))
        if outcome.failed:
            raise BatonError(f"a request failed: {outcome.failed}")
        before, self._before = self._before, self._read()
        steps, seconds, cpu = (now - then for now, then in zip(self._before, before, strict=True))
        return replace(Turn.of(outcome.gaps, cpu / len(outcome.tokens), seconds / steps), split=outcome.split)

    def _read(self) -> tuple[float, float, float]:
        """Of the decode worker: steps, the seconds they took, and the CPU seconds of its loop's thread."""
        loop = next(thread for thread in self._process.threads() if thread.id == self._process.pid)
        return *clusters.steps(self._metrics), loop.user_time + loop.system_time


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        with ExitStack() as stack:
            for result in results(measure(arguments, stack), arguments.threads):
                report.emit(result)
    except (BatonError, PeerFailed) as error:
        report.say(f"overhead: {error}")
        return 1
    return 0


def measure(arguments: argparse.Namespace, stack: ExitStack) -> list[Round]:
    """Start everything, warm it up, let it take turns."""
    model = models.directory("100m")
    engine = stack.enter_context(BareEngine(model, "auto", arguments.threads))
    started = {name: _start(name, model, arguments.threads, stack) for name in _SHAPES}
    sides = {name: Through(cluster).generate for name, cluster in started.items()}
    report.say(report.machine())
    workload = Workload(Lengths("fixed", _PROMPT), Lengths("fixed", arguments.tokens), models.LLAMA_100M["vocab_size"])

    def bare(request: Planned) -> Turn:
        steps = engine.generate([request.prompt], request.output)
        return Turn.of(steps.gaps, steps.cpu)

    return alternate(bare, sides, workload, arguments.rounds)


def alternate(bare: Side, sides: Mapping[str, Side], workload: Workload, count: int) -> list[Round]:
    """`count` rounds after one to warm up, each turn with another prompt."""
    neighbours = Neighbours()
    requests = iter(workload.plan((count + 1) * (len(sides) + 1) + 1, seed=1))

    def turn(side: Side) -> Turn:
        request = next(requests)
        neighbours.lap()
        return replace(side(request), others=neighbours.lap())

    rounds: list[Round] = []
    before = turn(bare)
    for number in range(count + 1):
        turns = {name: turn(side) for name, side in sides.items()}
        after = turn(bare)
        rounds.append(Round(before, turns, after))
        before = after
        medians = ", ".join(f"{name} {one.median * 1_000:.2f} ms" for name, one in {"bare": after, **turns}.items())
        report.say(f"round {number} of {count}: {medians}; others used {rounds[-1].others:.2f} cores")
    return rounds[1:]


def quietest(rounds: Iterable[Round]) -> list[Round]:
    """The third in which others used the least CPU."""
    ranked = sorted(rounds, key=lambda one: one.others)
    return ranked[: -(-len(ranked) // 3)]


def results(rounds: Sequence[Round], threads: int) -> list[report.Result]:
    """ITL of every side, on whose median the target is; and for 1P+1D its mean in two: engine step and all else."""
    quiet = quietest(rounds)

    def line(case: str, runs: Sequence[float], bare: str = "") -> report.Result:
        case, milliseconds = f"{case}, threads={threads}", [run * 1_000 for run in runs]
        if not bare:
            return report.median_of("overhead", case, "ms", milliseconds)
        return report.beside("overhead", case, "ms", milliseconds, [one.bare(bare) * 1_000 for one in quiet])

    lines: list[report.Result] = []
    for name in _SHAPES:
        turns = [one.sides[name] for one in quiet]
        lines.append(report.judged(line(f"{name} ITL p50", [t.median for t in turns], "median"), TARGET, better="low"))
        lines.append(line(f"{name} ITL mean", [t.mean for t in turns], "mean"))
    split = [one.sides[_SPLIT] for one in quiet]
    lines.append(line(f"{_SPLIT} engine step, mean", [t.step for t in split], "step"))
    lines.append(line(f"{_SPLIT} ITL outside the step, mean", [t.mean - t.step for t in split]))
    lines.append(line(f"{_SPLIT} CPU of the loop for a token", [t.cpu for t in split], "cpu"))
    lines.append(
        report.Result("overhead", f"{_SPLIT} prefilled apart", statistics.fmean(t.split for t in split), "share")
    )
    others = [one.others for one in quiet]
    return [*lines, report.median_of("overhead", "used by others meanwhile", "cores", others)]


def _start(name: str, model: Path, threads: int, stack: ExitStack) -> LocalCluster:
    report.say(f"starting {name}")
    settings = {"model.device": "cpu", "store.host_cache_bytes": _POOL, "router.disaggregation": "always"}
    for role in ("prefill", "decode"):
        settings |= {f"{role}.threads": threads, f"{role}.kv_cache_bytes": _POOL}
    prefill, decode = _SHAPES[name]
    return stack.enter_context(clusters.local(model, prefill, decode, settings))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 rounds of 24 tokens, instead of 45 of 48")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--tokens", type=int, help="tokens generated in each")
    parser.add_argument("--threads", type=int, default=1, help="of the tensor library, in every process (default 1)")
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (12 if arguments.quick else 45)
    arguments.tokens = arguments.tokens or (24 if arguments.quick else 48)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
