"""Measure how long prompts delay the tokens of other streams: colocated, split, and vLLM, on the same cores.

    python -m bench.cluster.interference    # about 6 minutes, and more the first time: vLLM's environment is made
    python -m bench.cluster.interference --no-vllm --quick   # about 50 s

Streams of short prompts run in closed loops while a long prompt arrives at a fixed pace. docs/lab/benchmarks.md says
what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal

import aiohttp
import grpc.aio

from baton.client import Client
from baton.config import parse_override
from baton.errors import BatonError
from bench import clusters, models, processes, report
from bench.peers import vllm_server
from bench.processes import Memory, Neighbours
from bench.streams import Completions, Prompts, Router, Server, Streams, every
from deploy.load.figures import percentile
from deploy.local import LocalCluster

STREAMS, PROMPT, OUTPUT = 8, 64, 256
LONG, PERIOD = 3_500, 2.0  # tokens, seconds
_LEAD = 2.0  # seconds that the streams run before the first long prompt: requests are then spread over their course
_POOL = "512MiB"
_THREADS = 2  # of a process that has both cores
SPLIT, COLOCATED = "1P+1D", "1D, colocated"
_VLLM = {"vLLM": None, "vLLM, chunks of 512": 512}  # tokens a step; none: its own default


@dataclass(frozen=True)
class Seen:
    """One run. Times are milliseconds."""

    itl: tuple[float, float, float]  # p50, p99, largest
    rate: float  # tokens a second of all streams
    ttft: tuple[float, ...]  # of the long prompts
    others: float = 0.0  # cores that processes of others used meanwhile
    memory: Mapping[str, int] = field(default_factory=dict[str, int])  # process → the most it has had so far, bytes


async def interfere(server: Server, prompts: Prompts, longs: int) -> Seen:
    """Streams, and `longs` long prompts among them."""
    async with Streams(server, prompts, STREAMS, PROMPT, OUTPUT) as streams:
        await asyncio.sleep(_LEAD)
        start = time.perf_counter()
        ttft = await every(PERIOD, longs, server, prompts, LONG)
        end = time.perf_counter()
    gaps = [gap * 1_000 for gap in streams.gaps_between(start, end)]
    itl = percentile(gaps, 50), percentile(gaps, 99), max(gaps)
    return Seen(itl, streams.tokens_between(start, end) / (end - start), tuple(one * 1_000 for one in ttft))


def results(seen: Mapping[str, Sequence[Seen]]) -> list[report.Result]:
    """The medians of every side's runs; for ours, beside the better setting of vLLM where there is one: that whose p99
    is the lowest."""
    peers = {name: runs for name, runs in seen.items() if name in _VLLM}
    best = min(peers, key=lambda name: median(run.itl[1] for run in peers[name]), default=None)
    lines: list[report.Result] = []
    for name, runs in seen.items():
        for case, values, unit in _figures(runs):
            result = report.median_of("interference", f"{name}: {case}", unit, values)
            if best is not None and name in _TARGETS and case in _TARGETS[name]:
                limit = median({case: values for case, values, _ in _figures(peers[best])}[case])
                target, better = _TARGETS[name][case]
                result = replace(result, limit=limit, ratio=result.value / limit)
                result = report.judged(result, target, better)
            lines.append(result)
        for process, peak in runs[-1].memory.items():
            lines.append(report.Result("interference", f"{name}: peak RSS of {process}", peak / 2**20, "MiB"))
    return lines


_P99, _RATE = "itl p99", "output tokens"
_TARGETS: dict[str, dict[str, tuple[float, Literal["low", "high"]]]] = {
    SPLIT: {_P99: (0.2, "low"), _RATE: (0.9, "high")},
    COLOCATED: {_P99: (1.0, "low"), _RATE: (1.1, "high")},
}


def _figures(runs: Sequence[Seen]) -> list[tuple[str, list[float], str]]:
    return [
        ("itl p50", [run.itl[0] for run in runs], "ms"),
        (_P99, [run.itl[1] for run in runs], "ms"),
        ("itl max", [run.itl[2] for run in runs], "ms"),
        (_RATE, [run.rate for run in runs], "1/s"),
        ("long ttft p50", [median(run.ttft) for run in runs], "ms"),
        ("long ttft max", [max(run.ttft) for run in runs], "ms"),
        ("used by others meanwhile", [run.others for run in runs], "cores"),
    ]


# --- the sides -----------------------------------------------------------------------------------------------------


def start(
    stack: ExitStack, name: str, model: Path, overrides: Sequence[str], patience: float = 90.0, on_gpu: bool = False
) -> LocalCluster:
    """Start a cluster of this shape on the cores of this process. Split, each worker has a core of its own, and router,
    store and client share that of the prefill worker, which has no stream to keep going. On a GPU none is pinned."""
    split = name == SPLIT
    settings: dict[str, object] = {"model.device": "cpu", "store.host_cache_bytes": _POOL}
    for role in ("prefill", "decode"):
        settings |= {f"{role}.threads": 1 if split else _THREADS, f"{role}.kv_cache_bytes": _POOL}
    settings |= dict(map(parse_override, overrides))
    cluster = stack.enter_context(clusters.local(model, 1 if split else 0, 1, settings, patience))
    if split and not on_gpu:
        first, *rest = sorted(os.sched_getaffinity(0))
        for process, pid in cluster.pids.items():
            processes.pin_tree(pid, {first} if process == "decode-0" else rest)
        before = os.sched_getaffinity(0)
        processes.pin(os.getpid(), rest)
        stack.callback(processes.pin, os.getpid(), before)
    return cluster


async def _measure(server: Server, name: str, vocab: int, arguments: argparse.Namespace) -> list[Seen]:
    """The first run only warms up."""
    runs: list[Seen] = []
    for number in range(arguments.runs + 1):
        others = Neighbours()
        # A seed of its own for each run: no prompt of one must be found in the cache by the next.
        run = await interfere(server, Prompts(vocab, arguments.seed + number), arguments.longs if number else 1)
        run = replace(run, others=others.lap())
        figures = ", ".join(f"{value:.1f}" for value in run.itl)
        report.say(
            f"{name}, run {number} of {arguments.runs}: ITL {figures} ms, {run.rate:.0f} tokens/s, "
            f"long TTFT {median(run.ttft):.0f} ms; others used {run.others:.2f} cores"
        )
        runs.append(run)
    return runs[1:]


async def _ours(name: str, model: Path, arguments: argparse.Namespace) -> list[Seen]:
    with ExitStack() as stack:
        report.say(f"starting {name}")
        cluster = start(
            stack, name, model, arguments.settings, arguments.patience, on_gpu=arguments.vllm_python is not None
        )
        with Client(operator=cluster.operator) as client:
            vocab = client.status(timeout=10).model.vocab_size  # pyright: ignore[reportOptionalMemberAccess]
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            runs = await _measure(Router(channel), name, vocab, arguments)
        peaks = {process: Memory.of(pid).peak for process, pid in sorted(cluster.pids.items())}
        return [*runs[:-1], replace(runs[-1], memory=peaks)]


async def _theirs(name: str, model: Path, arguments: argparse.Namespace) -> list[Seen]:
    report.say(f"starting {name}")
    peers = arguments.peers or model.parent / "peers"
    with vllm_server.serve(model, peers, _VLLM[name], _THREADS, arguments.vllm_python) as url:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            server = Completions(session, url, str(model))
            return await _measure(server, name, models.LLAMA_100M["vocab_size"], arguments)


async def measure(model: Path, arguments: argparse.Namespace) -> dict[str, list[Seen]]:
    """Every side that is asked for, one after the other. Raises BatonError."""
    # One event loop for all: channels of gRPC don't outlive theirs without complaint. Starting a side blocks it, while
    # there is nothing else to do.
    seen = {name: await _ours(name, model, arguments) for name in arguments.ours}
    return seen | {name: await _theirs(name, model, arguments) for name in _VLLM if arguments.vllm}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    report.say(report.machine())
    try:
        seen = asyncio.run(measure(models.directory("100m"), arguments))
    except BatonError as error:
        report.say(f"interference: {error}")
        return 1
    for result in results(seen):
        report.emit(result)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of 3 long prompts, instead of 3 of 6")
    parser.add_argument("--runs", type=int, help="the median of so many runs is reported")
    parser.add_argument("--longs", type=int, metavar="N", help="long prompts in each run, one every 2 s")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="only ours")
    parser.add_argument("--no-ours", dest="ours", action="store_const", const=(), help="only vLLM")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for a cluster to start")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where vLLM's environment is, or is made")
    parser.add_argument("--vllm-python", type=Path, help="on a GPU: the Python with vLLM that serves there")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.SETTING=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(ours=(COLOCATED, SPLIT))
    arguments = parser.parse_args(argv)
    arguments.runs = arguments.runs or (1 if arguments.quick else 3)
    arguments.longs = arguments.longs or (3 if arguments.quick else 6)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
