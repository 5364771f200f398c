"""Engine steps that are simulated as one event: which they are, how long they take, and what the scheduler is told.

If a decode worker's next steps are repeatable (`RunDecodeScheduler.repeatable_steps`), they are simulated as one run. A
message ends the run with the step during which it arrives. A run thus costs the simulator one step and gives the same
result. The only difference: noise is drawn per run instead of per step. Pure.
"""

# pyright: strict

from collections.abc import Sequence

from msgspec import Struct

from decode_worker.scheduler import DecodeCommand, DecodeEvent, DecodeScheduler
from decode_worker.sequence import Sequence as DecodeSequence
from decode_worker.sequence import SequencePhase
from engine.step.batch import Sampled
from engine.step.outcome import ScheduledBatch
from prefill_worker.scheduler import PrefillScheduler


class StepRun:
    """Consecutive steps; each takes `growth` seconds longer than the one before."""

    def __init__(self, plan: ScheduledBatch, began: float, first: float, growth: float) -> None:
        self.plan, self.began, self._first, self._growth = plan, began, first, growth
        self.steps = 1

    @property
    def end(self) -> float:
        return self.began + self.seconds(self.steps)

    def seconds(self, steps: int) -> float:
        return steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def ended(self, now: float) -> int:
        steps = min(self.steps, int((now - self.began) / self._first))
        while steps and self.began + self.seconds(steps) > now:
            steps -= 1
        return steps

    def cut(self, now: float) -> bool:
        """End the run with the current step. Return whether that is earlier than planned."""
        steps = min(self.steps, self.ended(now) + 1)
        sooner, self.steps = steps < self.steps, steps
        return sooner


class RunDone(Struct, frozen=True):
    """A run has ended. `sampled`: for each chunk of the plan the tokens of all `steps` steps; none where no draw was
    asked for."""

    plan: ScheduledBatch
    sampled: Sequence[Sequence[Sampled]]
    steps: int


class RunDecodeScheduler(DecodeScheduler):
    """A decode worker's scheduler that can be told of a whole run."""

    def handle(self, event: DecodeEvent | RunDone, now: float, router: str = "") -> list[DecodeCommand]:
        """Take one event, which may be the end of a run."""
        return self._run_done(event, now) if isinstance(event, RunDone) else super().handle(event, now, router)

    def repeatable_steps(self, plan: ScheduledBatch) -> int:
        """Return how many steps in a row may run this plan, each row feeding on its own last token, with the same
        result as if each had been planned by itself. That holds while no message arrives and no stop token is drawn.
        No sequence may wait for a turn, a copy or its first token, or come to the end of its page or to
        `max_tokens`."""
        sequences = self._sequences.values()
        waits = any(s.phase is SequencePhase.RUNNING and s.name not in plan for s in sequences)
        if waits or self._copying_now:
            return 1
        return min(_repeatable_steps(self._sequences[name.request], chunk.end) for name, chunk in plan.items())

    def tokens_of(self, request: str) -> Sequence[int]:
        return self._sequences[request].tokens

    def _run_done(self, done: RunDone, now: float) -> list[DecodeCommand]:
        self._step += done.steps
        self._planner.step_ended(done.plan, now, steps=done.steps)
        return self._take_tokens(done.plan, done.sampled, now, computed=True)


class ReadPrefillScheduler(PrefillScheduler):
    """A prefill worker's scheduler whose prompts can be read."""

    def tokens_of(self, request: str) -> Sequence[int]:
        return self._requests[request].tokens


def _repeatable_steps(sequence: DecodeSequence, end: int) -> int:
    """How many steps of one token each the sequence can be given in a row, if the next one ends at position `end`,
    before it ends or needs another page; at least one."""
    if sequence.pending > 1 or len(sequence.tokens) == sequence.first_new:
        return 1
    to_page_end = -(-end // sequence.page_size) * sequence.page_size - end + 1
    return min(sequence.max_tokens - sequence.generated, to_page_end)
