"""The time to the first token of a lone prompt on one prefill worker, and on two that compute its chunks in turn.

    python -m bench.cluster.pipelined_prompts            # 3 to 10 minutes
    python -m bench.cluster.pipelined_prompts --quick    # 1 to 3 minutes

Each prefill worker has one thread. For the prompts of one worker the other is drained, in turns with those of both.
With few cores router, store and decode worker share those of the prefill workers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import grpc.aio

from baton.client import Client
from baton.config import parse_override
from baton.errors import BatonError
from bench import clusters, models, report
from bench.processes import Neighbours
from bench.streams import Prompts, Router, first_token

LENGTHS = (2_000, 4_000, 8_000)  # tokens
_SETTINGS = {
    "model.device": "cpu", "store.host_cache_bytes": "1GiB", "router.disaggregation": "always",
    "prefill.threads": 1, "prefill.kv_cache_bytes": "512MiB", "decode.threads": 1, "decode.kv_cache_bytes": "512MiB",
}  # fmt: skip


async def measure(model: Path, arguments: argparse.Namespace) -> list[report.Result]:
    """Raises BatonError."""
    settings = _SETTINGS | dict(map(parse_override, arguments.settings))
    lines: list[report.Result] = []
    with clusters.local(model, 2, 1, settings, 120.0) as cluster, Client(operator=cluster.operator) as client:
        described = client.status(timeout=10).model
        assert described is not None
        prompts = Prompts(described.vocab_size, arguments.seed)
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            server = Router(channel)
            for length in (LENGTHS[0], *LENGTHS):  # the first time warms up
                others, one, two = Neighbours(), list[float](), list[float]()
                for _ in range(arguments.rounds):
                    client.drain("prefill-1")
                    one.append(await first_token(server, prompts.draw(length)))
                    client.drain("prefill-1", undo=True)
                    two.append(await first_token(server, prompts.draw(length)))
                quicker = [a / b for a, b in zip(one, two, strict=True)]
                used = others.lap()
                report.say(f"{length} tokens: {median(one):.2f} s, on two workers {median(two):.2f} s")
                lines += [
                    report.median_of("pipelined_prompts", f"ttft of {length} tokens, one worker", "s", one),
                    report.median_of("pipelined_prompts", f"ttft of {length} tokens, two workers", "s", two),
                    report.median_of("pipelined_prompts", f"times quicker, {length} tokens", "1", quicker),
                    report.Result("pipelined_prompts", f"used by others meanwhile, {length} tokens", used, "cores"),
                ]
    return lines[4:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round, instead of 5")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", dest="settings", action="append", metavar="SECTION.SETTING=VALUE", default=[])
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    report.say(report.machine())
    try:
        lines = asyncio.run(measure(models.directory("100m"), arguments))
    except BatonError as error:
        report.say(f"pipelined_prompts: {error}")
        return 1
    for line in lines:
        report.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
