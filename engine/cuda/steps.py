"""A step on a CUDA device, from its launch to its results."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from engine.cuda.errors import device_errors
from engine.cuda.streams import Event
from engine.runner import PromptScores, StepResults
from engine.step.batch import Sampled


class LaunchedStep:
    """Layers, head and draws lie in the stream, between two events. Draws with a mask may come later."""

    def __init__(
        self,
        begun: Event,
        ended: Event,
        collect: Callable[[], tuple[Sequence[Sampled | None], PromptScores]],
        *,
        go_on: Callable[[], None] = lambda: None,
        draws_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """`collect` returns what has come of the step. `go_on` launches what could not be launched before, without a
        wait. `draws_late`: whether the device waits for draws that come after `ended`, so that their time counts."""
        self._begun, self._ended, self._collect = begun, ended, collect
        self._go_on, self._draws_late = go_on, draws_late

    def done(self) -> bool:
        with device_errors():
            self._go_on()
            return self._ended.query()

    def wait(self) -> StepResults:
        """Return the results. `seconds` is the time between the events, and that of a draw that came later, without
        what passed until it was asked for."""
        with device_errors():
            self._ended.synchronize()
            counts, began = self._draws_late(), time.perf_counter()
            sampled, scores = self._collect()
            drawing = time.perf_counter() - began if counts else 0.0
            return StepResults(sampled, scores, self._begun.elapsed_time(self._ended) / 1_000 + drawing)


class StepWatch:
    """A thread that sleeps until a step has ended and then calls an alarm, so that the worker's loop need not spin."""

    def __init__(self) -> None:
        self.alarm: Callable[[], None] = lambda: None
        self._events: SimpleQueue[Event] = SimpleQueue()
        threading.Thread(target=self._watch, name="steps", daemon=True).start()

    def watch(self, event: Event) -> None:
        """Call the alarm once what lies before this event has ended."""
        self._events.put(event)

    def _watch(self) -> None:
        while True:
            event = self._events.get()
            with contextlib.suppress(RuntimeError):  # the loop meets the same error when it asks
                event.synchronize()
            self.alarm()
