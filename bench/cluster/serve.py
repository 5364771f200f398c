"""Measure a cluster under a load as its clients see it: latencies, throughput, goodput.

    python -m bench.cluster.serve --quick
    python -m bench.cluster.serve --prefill 1 --decode 1 --model 100m --rate 2 --slo-ttft 500 --slo-tpot 60
    python -m bench.cluster.serve --address 127.0.0.1:50051 --operator unix:/run/…/router.sock --concurrency 8
    python -m bench.cluster.serve --trace conversation_trace.jsonl --length-scale 0.02 --time-scale 4 --requests 200
    python -m bench.cluster.serve --rate 1 --batch 8    # what a batch costs the others

With `--batch` each run is followed by one of the same requests beside others of the lowest class, which fill gaps. No
request finds pages of another then.

docs/lab/benchmarks.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from baton.client import AsyncClient, Client
from baton.config import parse_override
from baton.errors import BatonError
from baton.messages import LOWEST_CLASS
from bench import clusters, models, report
from deploy.load import sender
from deploy.load.figures import Figure, Objectives, Outcome, errors, figures
from deploy.load.workload import Planned, Workload, from_trace, poisson
from simulator import mooncake
from simulator.lengths import Lengths

_DEFAULTS = {"model": "100m", "requests": 100, "concurrency": 4, "prompt": "256", "output": "64"}
BATCH_TARGET = 1.05
"""Of the 99th percentiles without a batch."""
_QUICK = {"model": "tiny", "requests": 40, "concurrency": 4, "prompt": "uniform:32:256", "output": "32"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with ExitStack() as stack:
            # One event loop for all runs: gRPC's own thread may still have something for the one before.
            measure(*_addresses(arguments, stack), arguments, stack.enter_context(asyncio.Runner()))
    except BatonError as error:
        report.say(f"serve: {error}")
        return 1
    return 0


def measure(address: str, operator: str, arguments: argparse.Namespace, runner: asyncio.Runner) -> None:
    """Run the load `arguments.runs` times and print the median of every figure."""
    with Client(operator=operator) as client:
        status = client.status(timeout=10)
    where = f"{status.model_name} {clusters.shape(status)}, {load_name(arguments)}"
    vocab = status.model.vocab_size  # pyright: ignore[reportOptionalMemberAccess]
    objectives = Objectives(_seconds(arguments.slo_ttft), _seconds(arguments.slo_tpot))
    report.say(report.machine())
    runner.run(_run(address, _warmup(arguments, vocab), arguments))
    runs: list[list[Figure]] = []
    beside: list[dict[str, float]] = []
    fillings: list[float] = []
    failed: Counter[str] = Counter()
    for run in range(arguments.runs):
        # A seed of its own for each run: the prompts of one must not be found in the cache by the next.
        planned = plan(arguments, vocab, arguments.seed + run)
        outcomes = runner.run(_run(address, planned, arguments))
        runs.append(figures(outcomes, objectives))
        failed += errors(outcomes)
        if arguments.batch:
            outcomes, rate = runner.run(_run_beside(address, planned, arguments))
            beside.append({figure.name: figure.value for figure in figures(outcomes, objectives)})
            fillings.append(rate)
            failed += errors(outcomes)
        report.say(f"run {run + 1} of {arguments.runs}: {len(outcomes)} requests, {failed.total()} errors so far")
    for name, unit in dict.fromkeys((figure.name, figure.unit) for run in runs for figure in run):
        values = [figure.value for run in runs for figure in run if figure.name == name]
        report.emit(report.median_of("serve", f"{where}: {name}", unit, values))
        if beside and name in beside[0] and name.startswith(("ttft", "itl", "tpot")):
            case = f"{where}: {name} beside a batch of {arguments.batch}"
            result = report.beside("serve", case, unit, [run[name] for run in beside], values)
            report.emit(report.judged(result, BATCH_TARGET, "low") if name.endswith("p99") else result)
    if fillings:
        report.emit(report.median_of("serve", f"{where}: the batch's output tokens", "tokens/s", fillings))
    for reason, count in sorted(failed.items()):
        report.emit(report.Result("serve", f"{where}: errors, {reason}, all runs", count, "count"))


def plan(arguments: argparse.Namespace, vocab: int, seed: int) -> list[Planned]:
    """The requests of one run. Raises ConfigError."""
    if arguments.trace is not None:
        lines = mooncake.read_trace(arguments.trace, arguments.requests)
        return list(from_trace(lines, vocab, seed, arguments.time_scale, arguments.length_scale))
    workload = Workload(
        Lengths.parse(arguments.prompt), Lengths.parse(arguments.output), vocab,
        arguments.prefix_groups, arguments.prefix_tokens,
        poisson(arguments.rate, arguments.requests, seed) if arguments.rate else (),
    )  # fmt: skip
    return workload.plan(arguments.requests, seed)


async def _run(address: str, planned: Sequence[Planned], arguments: argparse.Namespace) -> list[Outcome]:
    salted = arguments.batch > 0
    if arguments.concurrency is not None:
        return await sender.closed_loop(address, planned, arguments.concurrency, arguments.timeout, salted=salted)
    return await sender.open_loop(address, planned, arguments.timeout, salted=salted)


async def _run_beside(
    address: str, planned: Sequence[Planned], arguments: argparse.Namespace
) -> tuple[list[Outcome], float]:
    """Do so beside a batch of the same requests. Also return its tokens per second."""
    tokens = 0

    async def fill(filler: sender.Sender) -> None:
        nonlocal tokens
        for request in cycle(planned):
            tokens += len((await filler.send(request.prompt, request.output, 0))[1])

    async with AsyncClient(address) as client:
        filler = sender.Sender(client, arguments.timeout, salted=True, priority=LOWEST_CLASS)
        tasks = [asyncio.create_task(fill(filler)) for _ in range(arguments.batch)]
        try:
            return await _run(address, planned, arguments), tokens / filler.now()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _warmup(arguments: argparse.Namespace, vocab: int) -> list[Planned]:
    """First steps of each shape are slow: kernels are chosen and memory is mapped. All at once, so that every worker
    has its share."""
    return Workload(Lengths.parse("128"), Lengths.parse("8"), vocab).plan(
        arguments.warmup, seed=arguments.seed + 1_000_000
    )


def _addresses(arguments: argparse.Namespace, stack: ExitStack) -> tuple[str, str]:
    """The public port and the operator's, of the cluster that is named or of one started here."""
    if arguments.address:
        return arguments.address, arguments.operator
    model = models.directory(arguments.model)
    settings = dict(map(parse_override, arguments.settings)) | {"model.served_model_name": Path(arguments.model).name}
    report.say(f"starting {arguments.prefill} prefill and {arguments.decode} decode workers on {model}")
    cluster = stack.enter_context(clusters.local(model, arguments.prefill, arguments.decode, settings))
    return cluster.address, cluster.operator


def load_name(arguments: argparse.Namespace) -> str:
    if arguments.trace is not None:
        sent = f"x{arguments.concurrency}" if arguments.concurrency else f"time x{arguments.time_scale:g}"
        return f"{arguments.trace.stem} {sent} length x{arguments.length_scale:g}"
    sent = f"{arguments.rate:g}/s" if arguments.rate else f"x{arguments.concurrency}"
    prefix = f"{arguments.prefix_groups}({arguments.prefix_tokens})+" if arguments.prefix_groups else ""
    return f"{sent} {prefix}{arguments.prompt}->{arguments.output}"


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
    how.add_argument("--batch", type=int, default=0, metavar="N", help="also beside N requests of the lowest class")
    how.add_argument("--slo-ttft", type=float, metavar="MS", help="objective for the time to the first token")
    how.add_argument("--slo-tpot", type=float, metavar="MS", help="objective for the time per further token")
    how.add_argument("--runs", type=int, default=3, help="the median of so many runs is reported")
    how.add_argument("--warmup", type=int, default=4, metavar="N", help="requests sent beforehand and not measured")
    how.add_argument("--timeout", type=float, default=120.0, metavar="S", help="a request may take so long")
    how.add_argument("--seed", type=int, default=1)
    how.add_argument("--quick", action="store_true", help=f"changes the defaults to {_QUICK}")
    arguments = parser.parse_args(argv)

    if bool(arguments.address) != bool(arguments.operator):
        parser.error("--address and --operator go together; `baton status --json` tells both")
    if arguments.rate and arguments.trace:
        parser.error("a trace has its own times; --time-scale changes them")
    for name, value in (_QUICK if arguments.quick else _DEFAULTS).items():
        if getattr(arguments, name) is None and not (name == "concurrency" and (arguments.rate or arguments.trace)):
            setattr(arguments, name, value)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
