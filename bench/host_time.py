"""What the host does for one decode step besides the model: the scheduler, the batch, drawing's bookkeeping, messages.

    python -m bench.host_time [--quick] [--cases 1x512,64x2000,256x2000,256x8000] [--profile]

No model runs: all logits are equal, so every row gets the same token. A case is rows × tokens of context. The value is
the median over steps of the thread's CPU time, in milliseconds, which other programs on the machine disturb least.
"sum" is the median of the steps' sums, so the parts may add up to a little more or less. On a GPU this time is hidden
only as far as steps overlap it. On a CPU it is added to every step.

The parts:

- tick: what the loop asks the scheduler each turn
- prepare: pages for the next token
- schedule: the choice of chunks
- batch: their flattening for the model
- draw: the sampler's work on the host, for greedy rows
- done: what the scheduler makes of the tokens
- messages: the encoding of what goes to the router
- heartbeat: the snapshot for one router
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from baton.clock import Tick
from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import Accepted, Decode, SamplingParams
from bench import report
from decode_worker.scheduler import DecodeScheduler
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import Sampled, flatten
from engine.step.outcome import StepDone
from kvstore.keys import pack_tokens

PAGE, VOCAB = 16, 32_000
ROUTER = "router"
_OUTPUT = 2_000  # tokens that each request may generate
_LOGITS = 8  # tokens of the vocabulary that logits are drawn from: a row's own computation is left out
_PARTS = ("tick", "prepare", "schedule", "batch", "draw", "done", "messages", "heartbeat")

T = TypeVar("T")


class HostSteps:
    """A scheduler whose sequences all decode, and the times of its steps."""

    def __init__(self, rows: int, context: int) -> None:
        self._rows = rows
        self._pages = 2 * rows * -(-(context + _OUTPUT) // PAGE) + 64
        config = DecodeConfig(max_num_batched_tokens=4_000_000, itl_ms=10_000_000)
        self._scheduler = DecodeScheduler(config, PAGE, self._pages, vocab_size=VOCAB)
        self._sampler = HostSampler()
        self._logits = torch.zeros((rows, _LOGITS))
        self._encoder = msgspec.msgpack.Encoder()
        self._now = 0.0
        self.times: dict[str, list[float]] = {part: [] for part in _PARTS}
        for row in range(rows):
            tokens = [(row * 7_919 + at) % (VOCAB - 1_000) for at in range(context)]
            order = Decode(
                f"r{row}", 1, bytes(16), pack_tokens(tokens), context, _OUTPUT, SamplingParams(temperature=0.0)
            )
            said = self._scheduler.handle(order, self._now, ROUTER)
            assert isinstance(said[0], SendToRouter)
            assert isinstance(said[0].message, Accepted), said
        prompts = True
        while prompts:
            self._scheduler.prepare(self._now)
            plan = self._scheduler.schedule(self._now)
            prompts = any(len(chunk.tokens) > 1 for chunk in plan.values())
            sampled = [None if chunk.sample is None else Sampled(5) for chunk in plan.values()]
            self._now += 0.01
            self._scheduler.handle(StepDone(plan, sampled), self._now)

    def step(self) -> None:
        """Run one step, and note what its parts took."""
        scheduler = self._scheduler
        self._timed("tick", self._tick)
        self._timed("prepare", lambda: scheduler.prepare(self._now))
        plan = self._timed("schedule", lambda: scheduler.schedule(self._now))
        self._timed("heartbeat", lambda: scheduler.heartbeat(0, ROUTER))
        chunks = list(plan.values())
        assert len(chunks) == self._rows, "every sequence decodes"
        self._timed("batch", lambda: flatten(chunks, PAGE, self._pages, VOCAB))
        draws = [chunk.sample for chunk in chunks if chunk.sample is not None]
        ends = [chunk.end for chunk in chunks]
        sampled = self._timed("draw", lambda: self._sampler.sample(self._logits, draws, ends))
        self._now += 0.01
        done = StepDone(plan, sampled)
        said = self._timed("done", lambda: scheduler.handle(done, self._now))
        messages = [command.message for command in said if isinstance(command, SendToRouter)]
        self._timed("messages", lambda: [self._encoder.encode(message) for message in messages])

    def _tick(self) -> None:
        self._scheduler.handle(Tick(0.0), self._now)
        assert self._scheduler.busy
        assert not self._scheduler.take_copies()
        assert not self._scheduler.patience

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        self.times[part].append((time.thread_time() - began) * 1e3)
        return result


def measure(rows: int, context: int, steps: int, *, profile: bool = False) -> None:
    """Emit the figures of one case."""
    case = HostSteps(rows, context)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(steps):
        case.step()
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    name = f"{rows} x {context}"
    for part, times in case.times.items():
        report.emit(report.Result("host_time", f"{name}: {part}", statistics.median(times), "ms"))
    sums = [sum(step) for step in zip(*case.times.values(), strict=True)]
    report.emit(report.Result("host_time", f"{name}: sum", statistics.median(sums), "ms"))


def _cases(text: str) -> list[tuple[int, int]]:
    try:
        return [(int(rows), int(context)) for rows, context in (case.split("x") for case in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 64x2000,256x2000") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: a look, not a measurement")
    parser.add_argument("--cases", type=_cases, default="1x512,64x2000,256x2000,256x8000", help="rows x context, ...")
    parser.add_argument("--profile", action="store_true", help="say on stderr where the time goes")
    asked = parser.parse_args(argv)
    report.say(report.machine())
    for rows, context in asked.cases:
        measure(rows, context, 20 if asked.quick else 200, profile=asked.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
