"""Measure a cluster under a load as its clients see it: latencies, throughput, goodput.

    python -m bench.cluster.serve --quick
    python -m bench.cluster.serve --prefill 1 --decode 1 --model 100m --rate 2 --slo-ttft 500 --slo-tpot 60
    python -m bench.cluster.serve --address 127.0.0.1:50051 --operator unix:/run/…/router.sock --concurrency 8
    python -m bench.cluster.serve --trace conversation_trace.jsonl --length-scale 0.02 --time-scale 4 --requests 200

docs/lab/benchmarks.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.client import Client
from baton.config import parse_override
from baton.errors import BatonError
from bench import clusters, models, report
from deploy.load import sender
from deploy.load.figures import Figure, Objectives, Outcome, errors, figures
from deploy.load.workload import Planned, Workload, from_trace, poisson
from simulator import mooncake
from simulator.lengths import Lengths

_DEFAULTS = {"model": "100m", "requests": 100, "concurrency": 4, "prompt": "256", "output": "64"}
_QUICK = {"model": "tiny", "requests": 40, "concurrency": 4, "prompt": "uniform:32:256", "output": "32"}


def main(argv: Sequence[str] | None = None) -> int:
    asked = parse(argv)
    try:
        with ExitStack() as stack:
            measure(*_addresses(asked, stack), asked)
    except BatonError as error:
        report.say(f"serve: {error}")
        return 1
    return 0


def measure(address: str, operator: str, asked: argparse.Namespace) -> None:
    """Run the load `asked.runs` times and print the median of every figure."""
    with Client(operator=operator) as client:
        status = client.status(timeout=10)
    where = f"{status.model_name} {clusters.shape(status)}, {load_name(asked)}"
    vocab = status.model.vocab_size  # pyright: ignore[reportOptionalMemberAccess]
    objectives = Objectives(_seconds(asked.slo_ttft), _seconds(asked.slo_tpot))
    report.say(report.machine())
    asyncio.run(_run(address, _warmup(asked, vocab), asked))
    runs: list[list[Figure]] = []
    failed: Counter[str] = Counter()
    for run in range(asked.runs):
        # A seed of its own for each run: the prompts of one must not be found in the cache by the next.
        outcomes = asyncio.run(_run(address, plan(asked, vocab, asked.seed + run), asked))
        runs.append(figures(outcomes, objectives))
        failed += errors(outcomes)
        report.say(f"run {run + 1} of {asked.runs}: {len(outcomes)} requests, {failed.total()} errors so far")
    for name, unit in dict.fromkeys((figure.name, figure.unit) for run in runs for figure in run):
        values = [figure.value for run in runs for figure in run if figure.name == name]
        report.emit(report.median_of("serve", f"{where}: {name}", unit, values))
    for reason, count in sorted(failed.items()):
        report.emit(report.Result("serve", f"{where}: errors, {reason}, all runs", count, "count"))


def plan(asked: argparse.Namespace, vocab: int, seed: int) -> list[Planned]:
    """The requests of one run. Raises ConfigError."""
    if asked.trace is not None:
        lines = mooncake.read(asked.trace, asked.requests)
        return list(from_trace(lines, vocab, seed, asked.time_scale, asked.length_scale))
    workload = Workload(
        Lengths.parse(asked.prompt), Lengths.parse(asked.output), vocab, asked.prefix_groups, asked.prefix_tokens,
        poisson(asked.rate, asked.requests, seed) if asked.rate else (),
    )  # fmt: skip
    return workload.plan(asked.requests, seed)


async def _run(address: str, planned: Sequence[Planned], asked: argparse.Namespace) -> list[Outcome]:
    if asked.concurrency is not None:
        return await sender.closed_loop(address, planned, asked.concurrency, asked.timeout)
    return await sender.open_loop(address, planned, asked.timeout)


def _warmup(asked: argparse.Namespace, vocab: int) -> list[Planned]:
    """First steps of each shape are slow: kernels are chosen and memory is mapped. All at once, so that every worker
    has its share."""
    return Workload(Lengths.parse("128"), Lengths.parse("8"), vocab).plan(asked.warmup, seed=asked.seed + 1_000_000)


def _addresses(asked: argparse.Namespace, stack: ExitStack) -> tuple[str, str]:
    """The public port and the operator's, of the cluster that is named or of one started here."""
    if asked.address:
        return asked.address, asked.operator
    model = models.directory(asked.model)
    settings = dict(map(parse_override, asked.settings)) | {"model.served_model_name": Path(asked.model).name}
    report.say(f"starting {asked.prefill} prefill and {asked.decode} decode workers on {model}")
    made = stack.enter_context(clusters.local(model, asked.prefill, asked.decode, settings))
    return made.address, made.operator


def load_name(asked: argparse.Namespace) -> str:
    if asked.trace is not None:
        sent = f"x{asked.concurrency}" if asked.concurrency else f"time x{asked.time_scale:g}"
        return f"{asked.trace.stem} {sent} length x{asked.length_scale:g}"
    sent = f"{asked.rate:g}/s" if asked.rate else f"x{asked.concurrency}"
    prefix = f"{asked.prefix_groups}({asked.prefix_tokens})+" if asked.prefix_groups else ""
    return f"{sent} {prefix}{asked.prompt}->{asked.output}"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1_000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("the cluster")
    where.add_argument("--address", help="host:port of a router that runs; without it a local cluster is started")
    where.add_argument(
        "--operator", metavar="TARGET", help="its operator port, unix:/PATH or host:port; with --address"
    )
    where.add_argument("--model", help="tiny, 100m, or the directory of a checkpoint (default 100m)")
    where.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers; 0 is the colocated mode")
    where.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers")
    where.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.SETTING=VALUE")

    pace = parser.add_argument_group("when requests are sent").add_mutually_exclusive_group()
    pace.add_argument("--rate", type=float, metavar="R", help="open loop: a Poisson process of R requests a second")
    pace.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N at a time (default 4)")

    what = parser.add_argument_group("what is sent; LENGTH is N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:LONGEST]")
    what.add_argument("--requests", type=int, metavar="N", help="in each run (default 100)")
    what.add_argument("--prompt", metavar="LENGTH", help="a prompt's own tokens (default 256)")
    what.add_argument("--output", metavar="LENGTH", help="tokens to generate (default 64)")
    what.add_argument("--prefix-groups", type=int, default=0, metavar="K", help="groups of prompts that share a prefix")
    what.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="length of those prefixes")
    what.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace, instead of the above")
    what.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's times")
    what.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's lengths")

    how = parser.add_argument_group("how it is measured")
    how.add_argument("--slo-ttft", type=float, metavar="MS", help="objective for the time to the first token")
    how.add_argument("--slo-tpot", type=float, metavar="MS", help="objective for the time per further token")
    how.add_argument("--runs", type=int, default=3, help="the median of so many runs is reported")
    how.add_argument("--warmup", type=int, default=4, metavar="N", help="requests sent beforehand and not measured")
    how.add_argument("--timeout", type=float, default=120.0, metavar="S", help="a request may take so long")
    how.add_argument("--seed", type=int, default=1)
    how.add_argument("--quick", action="store_true", help=f"changes the defaults to {_QUICK}")
    asked = parser.parse_args(argv)

    if bool(asked.address) != bool(asked.operator):
        parser.error("--address and --operator go together; `baton status --json` tells both")
    if asked.rate and asked.trace:
        parser.error("a trace has its own times; --time-scale changes them")
    for name, value in (_QUICK if asked.quick else _DEFAULTS).items():
        if getattr(asked, name) is None and not (name == "concurrency" and (asked.rate or asked.trace)):
            setattr(asked, name, value)
    return asked


if __name__ == "__main__":
    sys.exit(main())
