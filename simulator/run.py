"""Engine steps that are simulated as one event."""

# pyright: strict

from __future__ import annotations

from engine.step import ScheduledBatch


class StepRun:
    """Consecutive steps; each takes `growth` seconds longer than the one before."""

    def __init__(self, plan: ScheduledBatch, began: float, first: float, growth: float) -> None:
        self.plan, self.began, self._first, self._growth = plan, began, first, growth
        self.steps = 1

    @property
    def end(self) -> float:
        return self.began + self.seconds(self.steps)

    def seconds(self, steps: int) -> float:
        """Return the duration of the first `steps` steps."""
        return steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def ended(self, now: float) -> int:
        """Return the number of steps that have ended by `now`."""
        steps = min(self.steps, int((now - self.began) / self._first))
        while steps and self.began + self.seconds(steps) > now:
            steps -= 1
        return steps

    def cut(self, now: float) -> bool:
        """End the run with the current step. Return whether that is earlier than planned."""
        steps = min(self.steps, self.ended(now) + 1)
        sooner, self.steps = steps < self.steps, steps
        return sooner
