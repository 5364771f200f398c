"""Baton's cluster on vLLM's runner beside vLLM's own engine and server, all in one run on one machine.

    .venv-vllm/bin/python -m bench.cluster.vllm_cluster [--short] [--parts decode,arrivals,pages]

The Python must be that of an environment with Baton and vLLM (`make test-vllm` makes it).

1. decode: 1, 8 and 32 prompts at once, in turns: vLLM's `LLM.generate`, Baton's `VllmRunner` bare, and a decode worker
   of a whole cluster behind gRPC. Tokens/s as `bench.peers.cases` counts them, gaps between tokens, what a step takes
   outside the model, and the CPU time of each of the cluster's processes for a step. Goal: the cluster has 0.95 of
   vLLM's tokens/s.
2. arrivals: eight streams while long prompts arrive, 1P+1D and a colocated worker beside `vllm serve`: gaps and times
   to the first token, as in `bench/cluster/interference.py`.
3. pages: a hand-off of prompts' pages between two vLLM processes through a store, beside copying the same bytes twice.

The first run of a turn warms up and does not count. Of the others, the rounds that other processes disturbed least do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median

import grpc.aio
import psutil

from baton.client import Client
from baton.config import parse_override
from baton.errors import BatonError
from bench import clusters, models, report
from bench.cluster import interference
from bench.peers import environments, steps
from bench.peers.adapter import PeerFailed, PeerProcess, Tokens
from bench.peers.cases import CASES, Case, agreement
from bench.peers.steps import Course, Decoding
from bench.processes import Neighbours
from bench.store import hand_off
from bench.streams import Router
from deploy.local import LocalCluster
from engine.vllm_runner import child_environment

GOAL = 0.95
THEIRS, BARE, OURS = "LLM.generate", "VllmRunner, bare", "decode worker"
_EAGER = "LLM.generate, eager"
_DECODE = tuple(case for case in CASES if case.output > 1)
_SHORT = tuple(replace(case, output=24) for case in _DECODE)
_FEWEST_STEPS = 64  # of a worker: it counts its steps once a heartbeat, and of fewer that leaves out too many
_POOL = "512MiB"
_BLOCKTIME = "5"  # ms; longer, and threads of one side would spin into the turns of another


def _settings(device: str) -> dict[str, object]:
    """A cluster on vLLM's runner: on the CPU, or on the GPUs that are here."""
    return {
        "model.engine": "vllm", "model.device": "cpu" if device == "cpu" else "auto", "pages.page_size": steps.PAGE_SIZE
    }  # fmt: skip


# --- 1. decode --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One case on one side. Seconds: from the first prompt to the last token; between two tokens of a stream; and of a
    step, what is not the model runner's, nan if too few were seen. `spent`: CPU seconds of each process for a step.
    `others`: cores that processes of others used meanwhile."""

    seconds: float
    gap: float
    host: float
    tokens: Tokens = field(default_factory=list[list[int]])  # a cluster's are not looked at
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    others: float = 0.0


Side = Callable[[Tokens, int], Run]


def alone(process: PeerProcess) -> Side:
    def run(prompts: Tokens, count: int) -> Run:
        reply = process.ask({"prompts": prompts, "count": count})
        decoding = Decoding.of(Course(reply["tokens"], reply["ends"], reply["model"]), count)
        return Run(reply["seconds"], decoding.step, decoding.step - decoding.model, reply["tokens"])

    return run


class Worker:
    """The decode worker of a cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._address = cluster.address
        with Client(operator=cluster.operator) as client:
            processes = client.status(timeout=10).processes
        (self._metrics,) = (each.metrics_address for each in processes if each.role == "decode")
        worker = psutil.Process(cluster.pids["decode-0"])
        own = {"router": psutil.Process(cluster.pids["router"]), "worker": worker, "client": psutil.Process()}
        self._processes = own | {"vLLM": max(worker.children(), key=lambda child: child.memory_info().rss)}

    def __call__(self, prompts: Tokens, count: int) -> Run:
        return asyncio.run(self._generate(prompts, count))

    async def _generate(self, prompts: Tokens, count: int) -> Run:
        async with grpc.aio.insecure_channel(self._address) as channel:
            server = Router(channel)

            arrived: list[list[float]] = [[] for _ in prompts]
            all_begun = asyncio.Event()

            async def one(prompt: Sequence[int], times: list[float]) -> None:
                async for tokens in server.generate(prompt, count):
                    times.extend([time.perf_counter()] * tokens)
                    if all(arrived):
                        all_begun.set()

            async def steps_without_prompts() -> tuple[list[float], list[float]]:
                await all_begun.wait()
                return [time.perf_counter(), *await asyncio.to_thread(clusters.steps, self._metrics)], self._spent()

            began = time.perf_counter()
            early = asyncio.create_task(steps_without_prompts())
            await asyncio.gather(*map(one, prompts, arrived))
            before, spent = await early
            used = [now - then for now, then in zip(self._spent(), spent, strict=True)]
        end = max(times[-1] for times in arrived)
        after = end, *clusters.steps(self._metrics)
        whole, number, took = (now - then for now, then in zip(after, before, strict=True))
        if any(len(times) != count for times in arrived):
            raise BatonError(f"a stream did not have {count} tokens")
        gaps = [later - earlier for times in arrived for earlier, later in pairwise(times)]
        if number < _FEWEST_STEPS:
            return Run(end - began, median(gaps), nan)
        each = {name: seconds / number for name, seconds in zip(self._processes, used, strict=True)}
        return Run(end - began, median(gaps), (whole - took) / number, spent=each)

    def _spent(self) -> list[float]:
        """The CPU seconds of each process so far."""
        times = [process.cpu_times() for process in self._processes.values()]
        return [each.user + each.system for each in times]


Round = Mapping[str, Run]


def take_turns(
    sides: Mapping[str, Side], cases: Sequence[Case], rounds: int, vocabulary: int
) -> dict[Case, list[Round]]:
    """`rounds` rounds of each case after one to warm up, each begun by another side."""
    neighbours = Neighbours()
    rounds_by_case: dict[Case, list[Round]] = {case: [] for case in cases}
    names = list(sides)
    for number in range(rounds + 1):
        first = number % len(names)
        for case in cases:
            runs: dict[str, Run] = {}
            prompts = case.prompts(vocabulary, number)
            for name in [*names[first:], *names[:first]]:
                neighbours.lap()
                runs[name] = replace(sides[name](prompts, case.output), others=neighbours.lap())
            rounds_by_case[case].append(runs)
            rates = ", ".join(f"{name} {case.rate(runs[name].seconds):,.0f}" for name in names)
            others = max(run.others for run in runs.values())
            report.say(f"round {number} of {rounds}, {case.name}: {rates} tokens/s; others used {others:.2f} cores")
    return {case: own[1:] for case, own in rounds_by_case.items()}


def quietest(rounds: Sequence[Round]) -> list[Round]:
    """The half that processes of others disturbed least."""
    ranked = sorted(rounds, key=lambda one: max(run.others for run in one.values()))
    return ranked[: -(-len(ranked) // 2)]


def decode_results(rounds_by_case: Mapping[Case, Sequence[Round]]) -> Iterator[report.Result]:
    """Each side's figures. Ours are judged by vLLM's of the same round: what disturbs a round disturbs both."""
    for case, all_rounds in rounds_by_case.items():
        rounds = quietest(all_rounds)
        for name in rounds[0]:
            runs = [one[name] for one in rounds]
            rates, theirs = ([case.rate(one[side].seconds) for one in rounds] for side in (name, THEIRS))
            case_name = f"{case.name}, {name}: tokens/s"
            if name == THEIRS:
                yield report.median_of("vllm", case_name, "1/s", rates)
            else:
                rate = report.beside("vllm", case_name, "1/s", rates, theirs)
                yield report.judged(rate, GOAL, "high") if name == OURS else rate
            yield report.median_of("vllm", f"{case.name}, {name}: ITL", "ms", [run.gap * 1e3 for run in runs])
            if host := [run.host * 1e3 for run in runs if not isnan(run.host)]:
                yield report.median_of("vllm", f"{case.name}, {name}: a step outside the model", "ms", host)
            for part in max((run.spent for run in runs), key=len):
                spent = [run.spent[part] * 1e3 for run in runs if run.spent]
                yield report.median_of("vllm", f"{case.name}, {name}: a step's CPU time, {part}", "ms", spent)
        if BARE in rounds[0]:
            agreed = fmean(agreement(one[BARE].tokens, one[THEIRS].tokens) for one in rounds)
            yield report.Result("vllm", f"{case.name}: first tokens of both as one", agreed, "share")
        others = [max(run.others for run in one.values()) for one in rounds]
        yield report.median_of("vllm", f"{case.name}: used by others meanwhile", "cores", others)


def decode(model: Path, arguments: argparse.Namespace) -> Iterator[report.Result]:
    """Measure part 1."""
    variables = environments.variables(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(arguments.threads),
            "KMP_BLOCKTIME": _BLOCKTIME,
        }
    )  # fmt: skip
    if arguments.device != "cpu" and arguments.numerics == "exact":
        variables["VLLM_BATCH_INVARIANT"] = "1"
    with ExitStack() as stack:
        command = [sys.executable, "-m", "bench.peers.steps"]
        words_by_name = {THEIRS: ["vllm", str(model), arguments.device]}
        words_by_name |= {BARE: ["baton", str(model), arguments.device, str(arguments.threads), arguments.numerics]}
        words_by_name |= {_EAGER: [*words_by_name[THEIRS], "eager"]} if arguments.eager else {}
        settings: dict[str, object] = {
            **_settings(arguments.device),
            "model.numerics": arguments.numerics,
            "store.host_cache_bytes": _POOL,
            "decode.threads": arguments.threads,
        }
        settings |= {"decode.gpu_memory_utilization": steps.GPU_SHARE}
        settings |= {"decode.kv_cache_bytes": _POOL, "decode.max_num_batched_tokens": steps.STEP_TOKENS}
        cluster = clusters.local(model, 0, 1, settings | arguments.settings, arguments.patience)
        report.say(f"starting {', '.join(words_by_name)} and {OURS}")
        with ThreadPoolExecutor() as starting:
            peers = {
                name: starting.submit(PeerProcess, name, [*command, *words], variables)
                for name, words in words_by_name.items()
            }
            worker = starting.submit(stack.enter_context, cluster)
        sides = {name: alone(stack.enter_context(peer.result())) for name, peer in peers.items()}
        sides[OURS] = Worker(worker.result())
        cases = _SHORT if arguments.short else _DECODE
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        yield from decode_results(take_turns(sides, cases, arguments.rounds, vocabulary))


# --- 2. arrivals ------------------------------------------------------------------------------------------------------


def arrivals(model: Path, arguments: argparse.Namespace) -> Iterator[report.Result]:
    """Measure part 2: one prefill and one decode worker, and one that does both, beside vLLM's server."""
    overrides = [f"{name}={value}" for name, value in (_settings(arguments.device) | arguments.settings).items()]
    options = [word for setting in overrides for word in ("--set", setting)]
    options += ["--runs", str(arguments.rounds), "--longs", "3" if arguments.short else "6"]
    options += ["--peers", str(arguments.peers)] if arguments.peers else []
    options += [] if arguments.device == "cpu" else ["--vllm-python", sys.executable]
    seen = asyncio.run(
        interference.measure(model, interference.parse([*options, "--patience", str(arguments.patience)]))
    )
    for result in interference.results(seen):
        yield replace(result, bench="vllm", case=f"arrivals, {result.case}")


# --- 3. pages ---------------------------------------------------------------------------------------------------------


def pages(model: Path, arguments: argparse.Namespace) -> Iterator[report.Result]:
    """Measure part 3: pages of two runners through a store's arena."""
    from engine.vllm_runner.runner import VllmRunner

    with ExitStack() as stack:
        runners: list[VllmRunner] = []
        for _ in range(2):
            runner = VllmRunner.load(
                model,
                "auto",
                hand_off.PAGES,
                steps.PAGE_SIZE,
                max_rows=8,
                max_tokens=256,
                threads=arguments.threads,
                device=arguments.device,
                memory_share=steps.GPU_SHARE,
                exact=arguments.numerics == "exact",
                eager=True,  # it runs no steps
            )
            stack.callback(runner.close)
            runners.append(runner)
        size = runners[0].layout.page_bytes
        measured = hand_off.between_runners(runners[0], runners[1], arguments.rounds)
        yield from hand_off.results("vllm", measured, size)


PARTS: Mapping[str, Callable[[Path, argparse.Namespace], Iterator[report.Result]]] = {
    "decode": decode, "arrivals": arrivals, "pages": pages
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    model = models.directory(arguments.model)
    report.say(report.machine())
    _preload(arguments)
    failed = False
    for name in arguments.parts:
        try:
            for result in PARTS[name](model, arguments):
                report.emit(result)
        except (BatonError, PeerFailed, ExceptionGroup) as error:  # a group: streams that failed
            report.say(f"{name}: {error}")
            failed = True
    return 1 if failed else 0


def _preload(arguments: argparse.Namespace) -> None:
    """Preload Intel's OpenMP runtime and tcmalloc into all that is started, as vLLM advises for CPUs."""
    folder = arguments.peers or models.directory(arguments.model).parent / "peers"
    try:
        libraries = environments.existing(child_environment.OPENMP), environments.tcmalloc(folder)
    except environments.NotPrepared as error:
        report.say(f"without Intel's OpenMP and tcmalloc: {error}")
    else:
        os.environ |= environments.preloading(*libraries)
    os.environ["KMP_BLOCKTIME"] = _BLOCKTIME


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="2 rounds of fewer tokens: a look, not a measurement")
    parser.add_argument("--rounds", type=int, help="that count, of each case (8; arrivals 3)")
    parser.add_argument("--parts", default=",".join(PARTS), help="those to run, in this order")
    parser.add_argument("--model", default="100m", help="100m, or the directory of a checkpoint")
    parser.add_argument("--eager", action="store_true", help="decode: vLLM without compiling besides")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda: on a GPU, as for bench.engine.gpu")
    parser.add_argument(
        "--numerics", default="exact", choices=("exact", "mixed"), help="exact: on a GPU, batch-invariant kernels"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side (all cores)")
    parser.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="where the environment of `vllm serve` is or is made"
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for a cluster to start")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.SETTING=VALUE")
    arguments = parser.parse_args(argv)
    arguments.settings = dict(map(parse_override, arguments.settings))
    arguments.rounds = arguments.rounds or (2 if arguments.short else 8)
    arguments.parts = [part for part in arguments.parts.split(",") if part]
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
