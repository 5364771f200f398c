"""Whether the disk tier helps: time to first token with it and without it.

    python -m bench.store.tiers [--quick] [--directory DIR]

Prompts with prefixes that return, in turns and too many for the device and the arena, so that each is found on the disk
or nowhere. Two clusters of a model of 100 M parameters run side by side and take turns to answer the same prompts, one
with the tier and one without.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.errors import BatonError
from bench import clusters, models, report
from deploy.load import sender
from deploy.load.workload import Planned
from deploy.local import LocalCluster
from engine.engine import layout_of
from engine.models.config import load_spec

PREFIXES, TOKENS = 8, 512  # prefixes, and tokens of each
_PAGE_SIZE = 16
_WARM = 3  # passes over all prefixes: made, made again and so admitted, found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--directory", type=Path, help="where the disk tier lies (default: the temporary directory)")
    args = parser.parse_args(argv)
    report.say(report.machine())
    try:
        measure(args.directory, 2 if args.quick else 8)
    except BatonError as error:
        report.say(f"tiers: {error}")
        return 1
    return 0


def measure(directory: Path | None, rounds: int) -> None:
    """Each round asks for every prefix once of each cluster, in turns; its ratio is of the two sums."""
    with ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="baton-tiers-"))
        with_tier = stack.enter_context(_cluster(disk))
        without = stack.enter_context(_cluster(""))
        prompts = _Prompts()
        for _ in range(_WARM):
            for address in (with_tier.address, without.address):
                _send(address, prompts.next_pass())
        ours: list[float] = []
        limits: list[float] = []
        for number in range(rounds):
            sums = {with_tier.address: 0.0, without.address: 0.0}
            for place, prompt in enumerate(prompts.next_pass()):
                pair = list(sums)
                for address in pair if (place + number) % 2 else reversed(pair):
                    sums[address] += _send(address, [prompt])
            ours.append(sums[with_tier.address] / PREFIXES)
            limits.append(sums[without.address] / PREFIXES)
        case = f"TTFT of {TOKENS} tokens with the disk tier, against without"
        report.emit(report.judged(report.beside("tiers", case, "s", ours, limits), 1.0, "low"))


class _Prompts:
    """Passes over the prefixes, always in the same order: the next one needed is the one that was used longest ago."""

    def __init__(self) -> None:
        self._random = random.Random(20_261_121)
        self._prefixes = [self._some(TOKENS) for _ in range(PREFIXES)]

    def next_pass(self) -> list[Planned]:
        return [Planned(0.0, (*prefix, *self._some(8)), 1) for prefix in self._prefixes]

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(3, 500) for _ in range(count)]


def _send(address: str, plan: Sequence[Planned]) -> float:
    """Return the seconds to the first token, summed, one request after the other."""
    outcomes = asyncio.run(sender.closed_loop(address, plan, 1, timeout=120))
    failed = [outcome.failed for outcome in outcomes if outcome.ttft is None]
    if failed:
        raise BatonError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return sum(outcome.ttft or 0.0 for outcome in outcomes)


def _cluster(disk: str) -> LocalCluster:
    """Room for a third of the prefixes on the device and in the arena."""
    model = models.directory("100m")
    page_bytes = layout_of(load_spec(model), "auto", _PAGE_SIZE).page_bytes
    room = PREFIXES // 3 * (TOKENS // _PAGE_SIZE + 2) * page_bytes
    settings: dict[str, object] = {
        "store.host_cache_bytes": room,
        "prefill.kv_cache_bytes": room,
        "decode.kv_cache_bytes": room,
        "disk.path": disk,
    }
    return clusters.local(model, 1, 1, settings)


if __name__ == "__main__":
    sys.exit(main())
