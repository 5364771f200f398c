"""Whether the disk tier helps: time to first token with it and without it, where loading pays and where it does not.

    bench/tiers.py [--quick] [--directory DIR]

Prompts with prefixes that return, in turns and too many for the device and the arena, so that each is found on the disk
or nowhere. Two clusters run side by side and take turns to answer the same prompts, one with the tier and one without.

`recompute is cheaper`  A small model whose tier reads at the pace of a slow network disk. The tier should cost nothing
                        (at most 3 %), because nothing is loaded.
`loading is cheaper`    A model of 100 M parameters and the disk as it is. The tier should gain.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baton import config
from baton.errors import BatonError
from bench import models, report
from deploy.load import sender
from deploy.load.workload import Planned
from deploy.local import LocalCluster, LocalNode
from engine.engine import layout_of
from engine.models.config import load_spec

PAGE_SIZE = 16
COSTS_AT_MOST = 1.03
_SLOW = ("20e6", "0.005")  # bytes per second, and seconds before the first
_WARM = 3  # passes over all prefixes: made, made again and so admitted, found


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    prefixes: int
    tokens: int  # of each prefix
    slow: bool


CASES = (
    Case("recompute is cheaper", "tiny", prefixes=16, tokens=768, slow=True),
    Case("loading is cheaper", "100m", prefixes=8, tokens=512, slow=False),
)


def main(argv: Sequence[str] | None = None) -> int:
    asked = parse(argv)
    report.say(report.machine())
    try:
        for case in CASES:
            measure(case, asked.directory, 2 if asked.quick else 8)
    except BatonError as error:
        report.say(f"tiers: {error}")
        return 1
    return 0


def measure(case: Case, directory: Path, rounds: int) -> None:
    """Each round asks for every prefix once of each cluster, in turns; its ratio is of the two sums."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="baton-tiers-")))
        with_tier = stack.enter_context(_cluster(case, folder / "with", folder / "disk"))
        without = stack.enter_context(_cluster(case, folder / "without", None))
        prompts = _Prompts(case)
        for _ in range(_WARM):
            for address in (with_tier.address, without.address):
                _ask(address, prompts.next_pass())
        ours: list[float] = []
        limits: list[float] = []
        for round_ in range(rounds):
            sums = {with_tier.address: 0.0, without.address: 0.0}
            for place, prompt in enumerate(prompts.next_pass()):
                pair = list(sums)
                for address in pair if (place + round_) % 2 else reversed(pair):
                    sums[address] += _ask(address, [prompt])
            ours.append(sums[with_tier.address] / case.prefixes)
            limits.append(sums[without.address] / case.prefixes)
        ratio = statistics.median(a / b for a, b in zip(ours, limits, strict=True))
        result = report.Result(
            "tiers", f"{case.name}: TTFT with the disk tier, against without", statistics.median(ours), "s",
            statistics.median(limits), ratio, runs=tuple(ours),
        )  # fmt: skip
        report.emit(report.judged(result, COSTS_AT_MOST if case.slow else 1.0, "low"))


class _Prompts:
    """Passes over the prefixes, always in the same order: the next one needed is the one that was used longest ago."""

    def __init__(self, case: Case) -> None:
        self._random = random.Random(20_261_121)
        self._prefixes = [self._some(case.tokens) for _ in range(case.prefixes)]

    def next_pass(self) -> list[Planned]:
        return [Planned(0.0, (*prefix, *self._some(8)), 1) for prefix in self._prefixes]

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(3, 500) for _ in range(count)]


def _ask(address: str, plan: Sequence[Planned]) -> float:
    """Seconds to the first token, summed, one request after the other."""
    outcomes = asyncio.run(sender.closed_loop(address, plan, 1, timeout=120))
    failed = [outcome.failed for outcome in outcomes if outcome.ttft is None]
    if failed:
        raise BatonError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return sum(outcome.ttft or 0.0 for outcome in outcomes)


def _cluster(case: Case, directory: Path, disk: Path | None) -> LocalCluster:
    """Room for a third of the prefixes on the devices and in the arena."""
    path = models.directory(case.model)
    model = load_spec(path)
    room = case.prefixes // 3 * (case.tokens // PAGE_SIZE + 2) * layout_of(model, "auto", PAGE_SIZE).page_bytes
    settings: dict[str, object] = {
        "model.path": str(path),
        "router.grpc_port": 0,
        "router.internal_port": 0,
        "router.http_port": 0,
        "api.port": 0,
        "store.host_cache_bytes": room,
        "prefill.kv_cache_bytes": room,
        "decode.kv_cache_bytes": room,
        "disk.path": str(disk) if disk else "",
    }
    node = LocalNode("local", enter=(sys.executable, "-m", "bench.throttled", *_SLOW) if case.slow and disk else ())
    return LocalCluster(config.load(None, settings), directory, nodes=[node])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the disk tier lies (default: the temporary directory)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
