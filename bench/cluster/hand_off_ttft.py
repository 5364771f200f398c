"""The time to the first token of a prompt that one worker prefills and another goes on with, beside the bare engine;
and what the pages that come in do to the streams that run there.

    python -m bench.cluster.hand_off_ttft            # 2 to 4 minutes
    python -m bench.cluster.hand_off_ttft --quick    # 30 to 60 s

Each worker has a core of its own, as in `interference.py`, and the bare engine has that of the prefill worker, in turns
with it. While a prompt is alone router and store may use both cores, as one of them is idle; beside streams they share
the prefill worker's. docs/lab/benchmarks.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc.aio

from baton.client import Client
from baton.errors import BatonError
from bench import models, processes, report
from bench.cluster import interference
from bench.processes import Neighbours
from bench.streams import Gap, Prompts, Router, Streams, first_token
from deploy.local import LocalCluster
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw

PROMPT = 2_000  # tokens
ALLOWED = 0.010  # seconds, besides prefill and two steps
_PAGE_SIZE, _STEPS = 16, 8
_OUTPUT = 1_500  # tokens of a stream, which is longer than what is measured
_LEAD, _PAUSE = 2.0, 0.25  # seconds that the streams run before a prompt and after its first token
_STEP_TOKENS = (512, 1_024, PROMPT)  # chunk sizes of the bare engine for the prompt; the fastest counts


@dataclass(frozen=True)
class Round:
    """Seconds."""

    bare: float  # prefill, and two decode steps
    ttft: float  # through the cluster
    others: float  # cores that processes of others used meanwhile


@dataclass(frozen=True)
class Disturbance:
    """Of the streams, by one prompt that was computed beside them and whose pages came in. In seconds."""

    largest: float  # gap between tokens
    calm: float  # the largest in as long a time before
    before: float  # the median of those: a step

    @classmethod
    def of(cls, gaps: Sequence[Gap], sent: float, end: float) -> Disturbance:
        """By a prompt that was sent then; until `end` it may hold up some."""
        before = [gap.seconds for gap in gaps if 2 * sent - end <= gap.at < sent]
        return cls(max(gap.seconds for gap in gaps if sent <= gap.at < end), max(before), median(before))


class Bare:
    """The engine, alone in this process."""

    def __init__(self, model: Path) -> None:
        pages = -(-(PROMPT + _STEPS) // _PAGE_SIZE)
        self._engine = Engine.load(model, "auto", "cpu", pages, _PAGE_SIZE, head=True, threads=1)
        self._pages = range(pages)
        self.max_num_batched_tokens = PROMPT

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Find out how to take a prompt fastest."""
        took = {tokens: min(self._prefill(prompt, tokens) for _ in range(2)) for tokens in _STEP_TOKENS}
        self.max_num_batched_tokens = min(took, key=took.__getitem__)

    def first_token(self, prompt: Sequence[int]) -> float:
        """Prefill, and two decode steps after it, in seconds."""
        prefill = self._prefill(prompt, self.max_num_batched_tokens)
        steps: list[float] = []
        for position in range(len(prompt), len(prompt) + _STEPS):
            start = time.perf_counter()
            self._engine.step([Chunk([prompt[0]], position, self._pages, TokenDraw(temperature=0))])
            steps.append(time.perf_counter() - start)
        return prefill + 2 * median(steps)

    def _prefill(self, prompt: Sequence[int], max_num_batched_tokens: int) -> float:
        begin = time.perf_counter()
        for start in range(0, len(prompt), max_num_batched_tokens):
            end = min(start + max_num_batched_tokens, len(prompt))
            draw = TokenDraw(temperature=0) if end == len(prompt) else None
            self._engine.step([Chunk(prompt[start:end], start, self._pages, draw)])
        return time.perf_counter() - begin


def results(rounds: Sequence[Round], seen: Sequence[Disturbance], apart: float) -> list[report.Result]:
    """Return the medians, each beside what it may be at most."""
    limits = [(one.bare + ALLOWED) * 1_000 for one in rounds]
    ttft = report.beside("hand_off_ttft", "ttft", "ms", [one.ttft * 1_000 for one in rounds], limits)
    gaps, steps = [one.largest for one in seen], [one.before for one in seen]
    largest = report.beside("hand_off_ttft", "largest gap of the streams, beside a step", "s", gaps, steps)
    calm = [one.calm / one.before for one in seen]
    return [
        report.judged(ttft, 1.0, "low"),
        report.judged(largest, 1.5, "low"),
        report.median_of("hand_off_ttft", "largest gap without a prompt, in steps", "1", calm),
        report.Result("hand_off_ttft", "prefilled apart", apart, "share"),
        report.median_of("hand_off_ttft", "used by others meanwhile", "cores", [one.others for one in rounds]),
    ]


async def _rounds(bare: Bare, server: Router, prompts: Prompts, count: int) -> list[Round]:
    rounds: list[Round] = []
    bare.warm_up(prompts.draw(PROMPT))
    report.say(f"the bare engine takes the prompt in steps of {bare.max_num_batched_tokens}")
    for number in range(count + 1):
        others = Neighbours()
        took = bare.first_token(prompts.draw(PROMPT))
        ttft = await first_token(server, prompts.draw(PROMPT))
        rounds.append(Round(took, ttft, others.lap()))
        report.say(f"round {number} of {count}: bare {took * 1_000:.0f} ms, through the cluster {ttft * 1_000:.0f} ms")
    return rounds[1:]


async def _disturb(server: Router, prompts: Prompts, count: int) -> list[Disturbance]:
    disturbances: list[Disturbance] = []
    for number in range(count):
        # None of them ends, and none begins, while something is measured: their own prompts make gaps as well.
        async with Streams(server, prompts, interference.STREAMS, interference.PROMPT, _OUTPUT) as streams:
            await asyncio.sleep(_LEAD)
            sent = time.perf_counter()
            await first_token(server, prompts.draw(PROMPT))
            await asyncio.sleep(_PAUSE)  # what it held up shows in gaps that end later
            end = time.perf_counter()
        one = Disturbance.of(streams.gaps, sent, end)
        disturbances.append(one)
        steps = one.largest / one.before
        report.say(f"prompt {number + 1} of {count}: largest gap {steps:.2f} steps of {one.before * 1_000:.1f} ms")
    return disturbances


@contextmanager
def _anywhere(cluster: LocalCluster, names: Sequence[str]) -> Iterator[None]:
    """Let these processes use every core of the cluster within this context."""
    pids = [cluster.pids[name] for name in names]
    every = frozenset().union(*(each for pid in cluster.pids.values() for each in processes.cores_of(pid)))
    before = os.sched_getaffinity(0)
    for pid in pids:
        processes.pin(pid, every)
    yield
    for pid in pids:
        processes.pin(pid, before)


async def measure(model: Path, arguments: argparse.Namespace) -> list[report.Result]:
    """Raises BatonError."""
    with ExitStack() as stack:
        report.say("starting 1P+1D")
        cluster = interference.start(stack, interference.SPLIT, model, arguments.settings)
        client = stack.enter_context(Client(operator=cluster.operator))
        prompts = Prompts(client.status(timeout=10).model.vocab_size, arguments.seed)  # pyright: ignore[reportOptionalMemberAccess]
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            server = Router(channel)
            bare = Bare(model)
            with _anywhere(cluster, ("router", "store-0")):
                rounds = await _rounds(bare, server, prompts, arguments.rounds)
            counts = client.status().counts
            seen = await _disturb(server, prompts, arguments.rounds)
        return results(rounds, seen, counts.placed_split / (counts.placed_split + counts.placed_local))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    report.say(report.machine())
    try:
        lines = asyncio.run(measure(models.directory("100m"), arguments))
    except BatonError as error:
        report.say(f"hand_off_ttft: {error}")
        return 1
    for line in lines:
        report.emit(line)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, instead of 15")
    parser.add_argument("--rounds", type=int, help="prompts in each of the two parts")
    parser.add_argument("--set", dest="settings", action="append", metavar="SECTION.SETTING=VALUE",
                        default=["router.disaggregation=always"])  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 15)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
