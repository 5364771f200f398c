"""A step on a CUDA device, from its launch to its results."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from engine.cuda.errors import device_errors
from engine.runner import Finished, PromptScores
from engine.step.batch import Sampled


class Event(Protocol):
    """A mark in a stream: `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class LaunchedStep:
    """Layers, head and draws lie in the stream, between two events."""

    def __init__(
        self,
        begun: Event,
        ended: Event,
        collect: Callable[[], tuple[Sequence[Sampled | None], PromptScores]],
        *,
        draws: bool = False,
    ) -> None:
        """`collect` returns what has come of the step. `draws`: it is what draws the tokens, so its time counts."""
        self._begun, self._ended, self._collect, self._draws = begun, ended, collect, draws

    def done(self) -> bool:
        with device_errors():
            return self._ended.query()

    def wait(self) -> Finished:
        """Return the results. `seconds` is the time between the events, and that of a draw that came later, without
        what passed until it was asked for."""
        with device_errors():
            self._ended.synchronize()
            began = time.perf_counter()
            sampled, scores = self._collect()
            drawing = time.perf_counter() - began if self._draws else 0.0
            return Finished(sampled, scores, self._begun.elapsed_time(self._ended) / 1_000 + drawing)


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
