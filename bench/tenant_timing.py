"""Whether the time to the first token tells a tenant which prompts another tenant has cached.

    bench/tenant_timing.py              # 200 pairs: 1 to 2 minutes
    bench/tenant_timing.py --quick      # 60 pairs

Each pair is a prompt that tenant "one" has just sent, and one of the same length that no client has sent. Tenant "two"
sends both, in random order. By a rank test (Mann-Whitney, two-sided) the two must be distributed alike. The positive
control is tenant "one" with its own prompt again: there the same test must see the difference. With no leak, the first
test still fails once in 1 / `ALIKE` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import erfc, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import numpy as np

from baton import api_keys
from baton.api_keys import Identity
from baton.errors import BatonError, Unavailable
from baton.v1 import generation_pb2, generation_pb2_grpc
from bench import cluster, models, report
from bench.streams import Prompts

ALIKE = 0.01  # a smaller p says that the times differ
DIFFERENT = 1e-6  # a larger p says that the control has failed: the test could not have seen a leak
_TENANTS = ("one", "two")
_TIMEOUT = 60.0  # seconds that a request may take
_WARM_UP = 10  # pairs


@dataclass(frozen=True)
class Answer:
    """What a client sees of a request: seconds to the first token, and cached tokens."""

    ttft: float
    cached: int


@dataclass
class Pairs:
    """The answers to all pairs, in their order."""

    foreign: list[Answer] = field(default_factory=list[Answer])  # to "two", of prompts that "one" has cached
    fresh: list[Answer] = field(default_factory=list[Answer])  # to "two", of prompts that no client has sent
    own: list[Answer] = field(default_factory=list[Answer])  # to "one", of its own prompts


class Tenant:
    """A client with its key."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub: Any = generation_pb2_grpc.GenerationStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def ask(self, prompt: Sequence[int]) -> Answer:
        """Send a prompt and read its one token. Raises Unavailable."""
        ids = generation_pb2.TokenIds(ids=prompt)
        request = generation_pb2.GenerateRequest(token_ids=ids, max_tokens=1, temperature=0, ignore_eos=True)
        sent, first = time.perf_counter(), None
        try:
            async for response in self._stub.Generate(request, metadata=self._metadata, timeout=_TIMEOUT):
                if first is None:
                    first = time.perf_counter() - sent
                if response.HasField("finished"):
                    return Answer(first, response.finished.usage.cached_tokens)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the router ended a stream: {error.details()}") from None
        raise Unavailable("the router ended a stream without its end")


async def measure(one: Tenant, two: Tenant, prompts: Prompts, length: int, count: int, rng: random.Random) -> Pairs:
    """Send `count` pairs, one request at a time."""
    pairs = Pairs()
    for number in range(count):
        known, unknown = prompts.draw(length), prompts.draw(length)
        await one.ask(known)
        turns = [(known, pairs.foreign), (unknown, pairs.fresh)]
        rng.shuffle(turns)
        for prompt, answers in turns:
            answers.append(await two.ask(prompt))
        pairs.own.append(await one.ask(known))
        if (number + 1) % 50 == 0:
            report.say(f"{number + 1} of {count} pairs")
    return pairs


def mann_whitney(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Return the two-sided p that both are distributed alike, and the share of pairs in which `left` is smaller.

    By the normal approximation, with ties; each needs some 20 values."""
    together = np.concatenate([left, right])
    _, inverse, counts = np.unique(together, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]  # equal values share the mean of their ranks
    n, m, total = len(left), len(right), len(together)
    larger = float(ranks[:n].sum()) - n * (n + 1) / 2  # pairs in which `left` is larger
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (total * (total - 1))
    spread = sqrt(n * m / 12 * (total + 1 - ties))
    p = 1.0 if spread == 0 else erfc(abs(larger - n * m / 2) / spread / sqrt(2))
    return p, 1 - larger / (n * m)


def results(pairs: Pairs) -> list[report.Result]:
    """The medians, and both tests."""
    said: list[report.Result] = []
    for case, answers in (("cached by another tenant", pairs.foreign), ("new", pairs.fresh), ("own", pairs.own)):
        said.append(report.Result("tenant_timing", f"ttft, {case}", median(a.ttft for a in answers) * 1_000, "ms"))
        said.append(report.Result("tenant_timing", f"cached tokens, {case}", sum(a.cached for a in answers), "tokens"))
    fresh = [answer.ttft for answer in pairs.fresh]
    for case, answers in (("cached by another tenant", pairs.foreign), ("own", pairs.own)):
        p, sooner = mann_whitney([answer.ttft for answer in answers], fresh)
        ok = p >= ALIKE if answers is pairs.foreign else p < DIFFERENT
        said.append(report.Result("tenant_timing", f"{case} against new: p", p, "", ok=ok))
        said.append(report.Result("tenant_timing", f"{case} against new: sooner", sooner, "share of pairs"))
    return said


async def run(asked: argparse.Namespace) -> Pairs:
    """Start a cluster with two keys and measure there. Raises BatonError."""
    model = models.directory(asked.model)
    made = cluster.local(model, asked.prefill, 1, {"prefill.threads": 1, "decode.threads": 1})
    made.directory.mkdir(parents=True, exist_ok=True)
    path = Path(made.config.api.keys_file)
    keys = [api_keys.add(path, Identity(name=name, tenant=name), "") for name in _TENANTS]
    with made:
        async with grpc.aio.insecure_channel(made.address) as channel:
            one, two = (Tenant(channel, key) for key in keys)
            prompts, rng = Prompts(asked.vocab, asked.seed), random.Random(asked.seed)
            await measure(one, two, prompts, asked.prompt, _WARM_UP, rng)
            return await measure(one, two, prompts, asked.prompt, asked.pairs, rng)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the times to the first token that one tenant sees.")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=1_000, help="tokens")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers; 0: colocated")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--vocab", type=int, default=250, help="tokens to draw from")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="60 pairs")
    asked = parser.parse_args(argv)
    if asked.quick:
        asked.pairs = 60
    report.say(report.machine())
    try:
        told = results(asyncio.run(run(asked)))
    except BatonError as error:
        report.say(f"tenant_timing: {error}")
        return 1
    for result in told:
        report.emit(result)
    return 0 if all(result.ok is not False for result in told) else 1


if __name__ == "__main__":
    sys.exit(main())
