"""The next step of a decode worker: which sequences are in it, within what their steps have taken so far.

Owns what is known of steps: their times, the budget that follows, and the limit that memory sets. Pure: the time is an
argument.
"""

# pyright: strict

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from baton.config import DecodeConfig
from baton.messages import StepSample
from decode_worker.batching import BatchBudget, build_batch, chunk_alignment
from decode_worker.sequence import Sequence
from decode_worker.step_budget import STEP_WEIGHT, DecodeRows, StepBudget
from engine.step.limit import StepLimit
from engine.step.outcome import ScheduledBatch
from engine.step.timing import WorkerStepTimes, sample_of


class StepPlanner:
    """Plans steps, and learns from those that have ended."""

    def __init__(
        self, config: DecodeConfig, page_size: int, calibration: Items[StepSample] = (), *, fixed_borders: bool = False
    ) -> None:
        """`calibration`: steps that were run before there was any work. `fixed_borders`: see `engine.runner.Runner`."""
        self._first_step = config.first_step_ms / 1_000
        self._rows = config.max_num_seqs
        self._fixed_borders = fixed_borders
        self._alignment = chunk_alignment(page_size)
        self._limit = StepLimit(config.max_num_batched_tokens, 2 * self._alignment)
        self.costs = WorkerStepTimes(calibration)
        self.budget = StepBudget(config, self.costs, self._limit)
        self._planned = 0.0  # when the step that runs was planned, seconds
        self._ended = 0.0  # when the last one ended, seconds
        self._postponed = False  # the last plan had no short partial prefills, because of what came before it

    @property
    def tokens(self) -> int:
        """The most tokens of a step: as configured, or fewer since a step ran out of memory."""
        return self._limit.tokens

    def plan(self, sequences: Iterable[Sequence], now: float) -> ScheduledBatch:
        """Return the next step of those that may be in one; empty if there is none."""
        self._planned = now
        decoding: list[Sequence] = []
        partial_prefills: list[Sequence] = []
        for sequence in sequences:
            if sequence.steps:
                (decoding if sequence.next_pending == 1 else partial_prefills).append(sequence)
        if not partial_prefills:
            self._postponed = False
            return build_batch(decoding, partial_prefills, BatchBudget(self.tokens, rows=self._rows))
        rows = rows_of(decoding)
        context = max(s.next_start for s in partial_prefills)
        prompts = self.budget.prompt_tokens(rows, context, self._alignment)
        self._postponed = not self._postponed and self.budget.delays_too_long(rows, now - self._ended)
        parts = 0 if self._postponed else self.budget.short_prompt_tokens(rows, context, self._alignment)
        if parts and self._fixed_borders:
            parts = max(parts, self._alignment)
        budget = BatchBudget(
            self.tokens, prompts, parts, now - self._first_step, self.costs.rate(), self._alignment,
            self._rows, self._fixed_borders,
        )  # fmt: skip
        return build_batch(decoding, partial_prefills, budget)

    def step_delayed(self, seconds: float) -> None:
        """So many seconds since the plan are no part of its step."""
        self._planned += seconds

    def step_ended(self, plan: ScheduledBatch, now: float, seconds: float | None = None, steps: int = 1) -> StepSample:
        """A step has run, or so many alike in a row. `seconds` is what each took; none: all the time since it was
        planned. Return what there is to learn of it."""
        self._ended = now
        sample = sample_of(list(plan.values()), (now - self._planned) / steps if seconds is None else seconds)
        self.costs.add_steps([sample] * steps)
        if all(len(chunk.tokens) <= self._alignment for chunk in plan.values()):  # partial prefills are short ones
            self.budget.observe_step(sample, weight=1 - (1 - STEP_WEIGHT) ** steps)
        return sample

    def out_of_memory(self, plan: ScheduledBatch) -> bool:
        """A step ran out of memory. Return whether smaller ones can be planned."""
        return self._limit.out_of_memory(plan.values())


def rows_of(decoding: Collection[Sequence]) -> DecodeRows:
    """Return what these sequences are as rows of a step, each with one token."""
    return DecodeRows(len(decoding), sum([len(s.tokens) if s.kv_window is None else s.attended for s in decoding]))
