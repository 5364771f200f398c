"""Whether the simulator agrees with reality: the same requests at the same times on a real cluster of this machine and
on a simulated one, medians side by side.

    bench/agreement.py [--cluster 1D] [--rates 0.5 1 1.5] [--timing cpu_100m] [--prompt 256] [--output 64]

    bench/agreement.py --sleeping --cluster 4P+4D --rates 2 4 6 --prompt 512

Every worker has a core of its own, and a thread; router, store, load generator and all else share the first core. Where
there are not so many cores the workers share those that are left, and waiting for a core is not simulated. What the
timing model says must have been measured on this machine: see bench/fit_model.py. With --sleeping the engines of real
workers sleep for as long as the timing model `sleeping` says, so many of them run on few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from unittest.mock import patch

from baton.client import Client
from baton.config import parse_override
from baton.errors import BatonError
from bench import cluster, cores, models, report, sleeping
from deploy.load import sender
from deploy.load.figures import Outcome
from deploy.load.workload import Lengths, Planned, Workload, poisson
from simulator import timing
from simulator.cluster import Layout, SimulatedCluster
from simulator.workloads import Arrival

_TOLERANCE = 0.2  # of the real median
_PAGE_SIZE = 16


def main() -> int:
    asked = _parse()
    try:
        layout = Layout.parse(asked.cluster)
        with ExitStack() as stack:
            address, vocab = _start(layout, asked, stack)
            report.say(report.machine())
            # A seed of its own for each rate: its prompts must not be found in the cache.
            agree = [_compare(address, vocab, layout, rate, seed, asked) for seed, rate in enumerate(asked.rates)]
    except BatonError as error:
        report.say(f"agreement: {error}")
        return 1
    return 0 if all(agree) else 1


def _start(layout: Layout, asked: argparse.Namespace, stack: ExitStack) -> tuple[str, int]:
    """A real cluster, warm and pinned. Returns its address and the size of its vocabulary."""
    model = timing.read(asked.timing)
    settings: dict[str, object] = {
        "prefill.threads": 1,
        "decode.threads": 1,
        "store.host_cache_bytes": model.host_cache_bytes,
    }
    settings |= {f"{role}.kv_cache_bytes": model.kv_cache_bytes for role in ("prefill", "decode")}
    settings |= {**model.config, **dict(map(parse_override, asked.set))}
    if asked.sleeping:
        stack.enter_context(patch.dict(os.environ, {sleeping.TIMING: asked.timing}))
        asleep = {role: ["bench.sleeping", role] for role in ("prefill", "decode")}
        stack.enter_context(patch.dict("deploy.local._MODULES", asleep))
    made = stack.enter_context(cluster.local(models.directory(asked.model), layout.prefill, layout.decode, settings))
    if not asked.sleeping:
        _pin(made.pids, stack)
    with Client(operator=made.operator) as client:
        vocab = client.status(timeout=10).model.vocab_size
    warm = Workload(Lengths.parse(asked.prompt), Lengths("fixed", 8), vocab).plan(6, seed=1_000)
    asyncio.run(sender.open_loop(made.address, warm, 120.0))
    return made.address, vocab


def _pin(pids: Mapping[str, int], stack: ExitStack) -> None:
    """Each worker to a core of its own, all else to the first."""
    first, *others = sorted(os.sched_getaffinity(0))
    own = iter([{core} for core in others])
    for process, pid in sorted(pids.items()):
        works = process.startswith(("prefill", "decode"))
        cores.pin(pid, next(own, set(others or [first])) if works else {first})
    stack.callback(cores.pin, os.getpid(), os.sched_getaffinity(0))
    cores.pin(os.getpid(), {first})


def _compare(address: str, vocab: int, layout: Layout, rate: float, seed: int, asked: argparse.Namespace) -> bool:
    prompt, output = Lengths.parse(asked.prompt), Lengths.parse(asked.output)
    workload = Workload(prompt, output, vocab, arrivals=poisson(rate, asked.requests, seed))
    planned = workload.plan(asked.requests, seed)
    real = asyncio.run(sender.open_loop(address, planned, 300.0))
    ours = _simulate(planned, layout, asked)
    agree = True
    for name, values in (("ttft", [o.ttft for o in real]), ("tpot", [o.tpot for o in real])):
        measured = statistics.median(value for value in values if value is not None)
        result = report.Result(
            "agreement", f"{asked.cluster} {rate:g}/s {asked.prompt}->{asked.output}: {name}, simulated / real",
            ours[name] * 1_000, "ms", limit=measured * 1_000, ratio=ours[name] / measured,
        )  # fmt: skip
        report.emit(result)
        agree &= abs(ours[name] / measured - 1) <= _TOLERANCE
    _check(real)
    return agree


def _simulate(planned: Sequence[Planned], layout: Layout, asked: argparse.Namespace) -> dict[str, float]:
    """The medians that the simulator foresees."""
    model = timing.read(asked.timing)
    config = model.configuration(_PAGE_SIZE, dict(map(parse_override, asked.set)))
    world = SimulatedCluster(
        Layout(layout.prefill, layout.decode, layout.prefill + layout.decode), model, config, seed=1
    )
    table = world.run(_arrivals(planned)).table()
    return {name: float(statistics.median(table[name])) for name in ("ttft", "tpot")}


def _arrivals(planned: Sequence[Planned]) -> Iterator[Arrival]:
    """The same prompts as far as time is concerned: of the same length, and no two alike."""
    for number, each in enumerate(planned):
        blocks = range(1_000 * number, 1_000 * number + len(each.prompt) // 512 + 1)
        yield Arrival(each.at, blocks, len(each.prompt), each.output, max_tokens=each.output)


def _check(outcomes: Sequence[Outcome]) -> None:
    failed = [outcome.failed for outcome in outcomes if outcome.failed]
    if failed:
        report.say(f"{len(failed)} of {len(outcomes)} real requests failed: {failed[0]}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cluster", default="1D", help="such as 1D (colocated) or 1P+1D")
    add("--sleeping", action="store_true", help="engines of real workers sleep instead of computing")
    add("--model", help="of the real cluster (default 100m, or tiny where engines sleep)")
    add("--timing", help="of the simulated one (default cpu_100m, or sleeping)")
    add("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="requests a second")
    add("--requests", type=int, default=40, help="at each rate")
    add("--prompt", default="256", help="tokens, as for bench/serve.py")
    add("--output", default="64", help="tokens")
    add("--set", action="append", default=[], metavar="SECTION.SETTING=VALUE", help="configuration of both")
    asked = parser.parse_args()
    asked.model = asked.model or ("tiny" if asked.sleeping else "100m")
    asked.timing = asked.timing or ("sleeping" if asked.sleeping else "cpu_100m")
    return asked


if __name__ == "__main__":
    sys.exit(main())
