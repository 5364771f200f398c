"""Steps of an engine that are run in a row."""

# pyright: strict

from __future__ import annotations

from engine.step import ScheduledBatch


class StepRun:
    """Steps in a row; each takes `growth` longer than the one before."""

    def __init__(self, plan: ScheduledBatch, began: float, first: float, growth: float) -> None:
        self.plan, self.began, self._first, self._growth = plan, began, first, growth
        self.steps = 1

    @property
    def end(self) -> float:
        return self.began + self.seconds(self.steps)

    def seconds(self, steps: int) -> float:
        """That the first `steps` take."""
        return steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def ended(self, now: float) -> int:
        """How many have ended by now."""
        steps = min(self.steps, int((now - self.began) / self._first))
        while steps and self.began + self.seconds(steps) > now:
            steps -= 1
        return steps

    def cut(self, now: float) -> bool:
        """End with the step that runs now. Returns whether that is sooner than it would have been."""
        steps = min(self.steps, self.ended(now) + 1)
        sooner, self.steps = steps < self.steps, steps
        return sooner
