"""The time to the first token of a prompt that one worker prefills and another goes on with, beside the bare engine;
and what the pages that come in do to the streams that run there, beside two bare engines of which one prefills.

    bench/hand_off_ttft.py            # 3 to 5 minutes
    bench/hand_off_ttft.py --quick    # 45 to 80 s

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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import grpc.aio
import msgspec

from baton.client import Client
from baton.errors import BatonError, TraceConflict, Unavailable
from baton.messages import MAX_TRACE_STEPS
from bench import cores, interference, models, report
from bench.bare import BareEngine
from bench.neighbours import Neighbours
from bench.streams import Gap, Prompts, Router, Streams, first_token
from deploy.local import LocalCluster
from engine.engine import Engine
from engine.step.batch import Chunk, TokenDraw

PROMPT = 2_000  # tokens
ALLOWED = 0.010  # seconds, besides prefill and two steps
_PAGE_SIZE, _STEPS = 16, 8
_OUTPUT = 1_500  # tokens of a stream, which is longer than what is measured
_LEAD, _PAUSE = 2.0, 0.25  # seconds that the streams run before a prompt and after its first token
_BARE_LEAD, _BARE_STEPS = 1.0, 320  # the same of the bare engine, and as many steps as outlast another's prefill
_TRACE_WRITTEN = 10.0  # seconds within which a trace must be on disk
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
    beside: float  # and of those until the first token: both share the machine's memory

    @classmethod
    def of(cls, gaps: Sequence[Gap], sent: float, arrived: float, end: float) -> Disturbance:
        """By a prompt that was sent then and had its first token when it `arrived`; until `end` it may hold up some."""
        before = [gap.seconds for gap in gaps if 2 * sent - end <= gap.at < sent]
        beside = [gap.seconds for gap in gaps if sent <= gap.at < arrived]
        after = [gap.seconds for gap in gaps if arrived <= gap.at < end]
        return cls(max(beside + after), max(before), median(before), median(beside))


@dataclass(frozen=True)
class Seen:
    """The same prompt and streams by different clocks, and what the machine alone does to such streams."""

    clients: Disturbance
    worker: Disturbance  # the decode worker's steps
    bare: Disturbance  # of an engine, by one that prefills on the other core


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
        prefill = self.prefill(prompt)
        steps: list[float] = []
        for position in range(len(prompt), len(prompt) + _STEPS):
            start = time.perf_counter()
            self._engine.step([Chunk([prompt[0]], position, self._pages, TokenDraw(temperature=0))])
            steps.append(time.perf_counter() - start)
        return prefill + 2 * median(steps)

    def prefill(self, prompt: Sequence[int]) -> float:
        """In seconds."""
        return self._prefill(prompt, self.max_num_batched_tokens)

    def _prefill(self, prompt: Sequence[int], max_num_batched_tokens: int) -> float:
        begin = time.perf_counter()
        for start in range(0, len(prompt), max_num_batched_tokens):
            end = min(start + max_num_batched_tokens, len(prompt))
            draw = TokenDraw(temperature=0) if end == len(prompt) else None
            self._engine.step([Chunk(prompt[start:end], start, self._pages, draw)])
        return time.perf_counter() - begin


def results(rounds: Sequence[Round], seen: Sequence[Seen], apart: float) -> list[report.Result]:
    """The medians, each beside what it may be at most."""
    bare = median(one.bare for one in rounds) + ALLOWED
    ttft = report.median_of("hand_off_ttft", "ttft", "ms", [one.ttft * 1_000 for one in rounds])
    ratio = median(one.ttft / (one.bare + ALLOWED) for one in rounds)
    largest, *others = _by("clients", [one.clients for one in seen])
    return [
        report.judged(replace(ttft, limit=bare * 1_000, ratio=ratio), 1.0, "low"),
        report.judged(replace(largest, limit=1.0, ratio=largest.value), 1.5, "low"),
        *others,
        *_by("decode worker", [one.worker for one in seen]),
        *_by("bare engines", [one.bare for one in seen]),
        report.Result("hand_off_ttft", "prefilled apart", apart, "share"),
        report.median_of("hand_off_ttft", "used by others meanwhile", "cores", [one.others for one in rounds]),
    ]


def _by(who: str, found: Sequence[Disturbance]) -> list[report.Result]:
    told = {
        ("largest gap, in steps", "1"): [one.largest / one.before for one in found],
        ("largest gap without a prompt, in steps", "1"): [one.calm / one.before for one in found],
        ("step", "ms"): [one.before * 1_000 for one in found],
        ("step beside a prefill", "ms"): [one.beside * 1_000 for one in found],
    }
    return [report.median_of("hand_off_ttft", f"{who}: {what}", unit, values) for (what, unit), values in told.items()]


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


async def _disturb(
    server: Router, client: Client, bare: Bare, decoding: BareEngine, prompts: Prompts, count: int
) -> list[Seen]:
    found: list[Seen] = []
    for number in range(count):
        alone = await _side_by_side(bare, decoding, prompts)
        # None of them ends, and none begins, while something is measured: their own prompts make gaps as well.
        async with Streams(server, prompts, interference.STREAMS, interference.PROMPT, _OUTPUT) as streams:
            trace = await asyncio.to_thread(_begin_trace, client)
            await asyncio.sleep(_LEAD)
            sent = time.perf_counter()
            await first_token(server, prompts.draw(PROMPT))
            arrived = time.perf_counter()
            await asyncio.sleep(_PAUSE)  # what it held up shows in gaps that end later
            end = time.perf_counter()
            client.stop_profile("decode-0")
            steps = await asyncio.to_thread(_step_ends, trace)
        one = Seen(
            clients=Disturbance.of(streams.gaps, sent, arrived, end),
            worker=Disturbance.of(_gaps(steps), sent, arrived, end),
            bare=alone,
        )
        found.append(one)
        told = ", ".join(
            f"{what} {by.largest / by.before:.2f} of {by.before * 1_000:.1f} ms"
            for what, by in (("clients", one.clients), ("decode worker", one.worker), ("bare engines", one.bare))
        )
        report.say(f"prompt {number + 1} of {count}: largest gap by {told}")
    return found


async def _side_by_side(bare: Bare, decoding: BareEngine, prompts: Prompts) -> Disturbance:
    """Of one bare engine's streams, by another one that prefills: what the machine alone does to them."""
    drawn = [prompts.draw(interference.PROMPT) for _ in range(interference.STREAMS)]
    streaming = asyncio.create_task(asyncio.to_thread(decoding.generate, drawn, _BARE_STEPS))
    await asyncio.sleep(_BARE_LEAD)
    sent = time.perf_counter()
    arrived = sent + await asyncio.to_thread(bare.prefill, prompts.draw(PROMPT))
    steps = (await streaming).times
    return Disturbance.of(_gaps(steps), sent, arrived, arrived)


def _begin_trace(client: Client) -> Path:
    """Have the decode worker trace its steps, once the router has heard that the last trace is written."""
    deadline = time.perf_counter() + _TRACE_WRITTEN
    while True:
        try:
            return Path(client.profile("decode-0", MAX_TRACE_STEPS).path)
        except TraceConflict:
            if time.perf_counter() > deadline:
                raise
        time.sleep(0.05)


def _step_ends(trace: Path) -> list[float]:
    """When the steps of a worker's trace ended, on `time.perf_counter`. Raises Unavailable when there is none yet."""
    deadline = time.perf_counter() + _TRACE_WRITTEN
    while not trace.exists():
        if time.perf_counter() > deadline:
            raise Unavailable(f"the decode worker did not write {trace} within {_TRACE_WRITTEN:.0f} s")
        time.sleep(0.05)
    spans = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    trace.unlink()
    return [(span["ts"] + span["dur"]) / 1e6 for span in spans if span["name"] == "step"]


def _gaps(times: Sequence[float]) -> list[Gap]:
    return [Gap(later, later - earlier) for earlier, later in pairwise(times)]


@contextmanager
def _anywhere(made: LocalCluster, names: Sequence[str]) -> Iterator[None]:
    """Let these processes use every core of the cluster within this context."""
    pids = [made.pids[name] for name in names]
    every = frozenset().union(*(each for pid in made.pids.values() for each in cores.of(pid)))
    before = os.sched_getaffinity(0)
    for pid in pids:
        cores.pin(pid, every)
    yield
    for pid in pids:
        cores.pin(pid, before)


async def measure(model: Path, asked: argparse.Namespace) -> list[report.Result]:
    """Raises BatonError."""
    with ExitStack() as stack:
        report.say("starting 1P+1D")
        made = interference.start(stack, interference.SPLIT, model, asked)
        client = stack.enter_context(Client(operator=made.operator))
        prompts = Prompts(client.status(timeout=10).model.vocab_size, asked.seed)
        async with grpc.aio.insecure_channel(made.address) as channel:
            server = Router(channel)
            bare, decoding = Bare(model), stack.enter_context(BareEngine(model, "auto", 1))
            cores.pin(decoding.pid, next(iter(cores.of(made.pids["decode-0"]))))
            with _anywhere(made, ("router", "store-0")):
                rounds = await _rounds(bare, server, prompts, asked.rounds)
            counts = client.status().counts
            seen = await _disturb(server, client, bare, decoding, prompts, asked.rounds)
        return results(rounds, seen, counts.placed_split / (counts.placed_split + counts.placed_local))


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    report.say(report.machine())
    try:
        lines = asyncio.run(measure(models.directory("100m"), asked))
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
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="where traces go, if --set has any written")
    parser.add_argument("--set", dest="settings", action="append", metavar="SECTION.SETTING=VALUE",
                        default=["router.disaggregation=always"])  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    asked.rounds = asked.rounds or (3 if asked.quick else 15)
    return asked


if __name__ == "__main__":
    sys.exit(main())
