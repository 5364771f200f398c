"""How long a worker's steps take: what it plans with, and what it reports.

Pure: the times are given.
"""

# pyright: strict

from collections import deque
from collections.abc import Sequence

from baton.messages import MAX_STEP_SAMPLES, StepSample
from baton.step_cost_model import StepCostModel, pairs
from engine.step.batch import Chunk
from engine.step.outcome import ScheduledBatch

_AT_ONCE = 8  # steps without prompts that are learned from together: they are many and alike, and a fit takes 0.2 ms
_CHUNK = 512  # tokens of a step whose speed is told as that of computing prompts, unless none had so many


class WorkerStepTimes(StepCostModel):
    """The fit to this worker's own steps; begins with those of its calibration."""

    def __init__(self, calibration: Sequence[StepSample] = ()) -> None:
        super().__init__()
        self._last: deque[StepSample] = deque(maxlen=MAX_STEP_SAMPLES)
        self._unlearned: list[StepSample] = []
        self.calibrate(calibration)

    def stepped(self, plan: ScheduledBatch, seconds: float) -> StepSample:
        """A step of this plan took that long. Returns what there is to learn of it."""
        sample = sample_of(list(plan.values()), seconds)
        self.add_steps([sample])
        return sample

    def add_steps(self, samples: Sequence[StepSample]) -> None:
        """The samples of steps in a row. Of many, the first few are learned from."""
        self._last.extend(samples)
        self._unlearned += samples[:_AT_ONCE]
        if samples[-1].tokens or len(self._unlearned) >= _AT_ONCE:
            self.observe(*self._unlearned)
            self._unlearned.clear()

    @property
    def last(self) -> tuple[StepSample, ...]:
        """The last steps, oldest first."""
        return tuple(self._last)

    def rate(self, context: int = 0) -> float:
        """Prompt tokens computed per second behind `context` others; 0: not known yet. Nor is it where all prompts so
        far came in steps with rows, and the fit takes those to be all that cost anything."""
        tokens = min(self.largest, _CHUNK)
        seconds = self.seconds(tokens, pairs(tokens, context))
        return tokens / seconds if seconds else 0.0


def sample_of(chunks: Sequence[Chunk], seconds: float) -> StepSample:
    """What a step of these chunks had to do. A chunk of one token is a row: a sequence that waits for its next one. A
    chunk with proposals is a row for each of its tokens."""
    tokens = attended = rows = context = 0
    for chunk in chunks:
        count = len(chunk.tokens)
        if count > 1 and not chunk.verify:
            tokens += count
            attended += pairs(count, chunk.before)
        else:
            rows += count
            context += pairs(count, chunk.before)
    return StepSample(tokens, attended, rows, context, seconds)
