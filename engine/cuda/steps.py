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
    """The layers and the head lie in the stream, between two events. Tokens are drawn when the results are asked for:
    the draw needs the host."""

    def __init__(
        self, begun: Event, ended: Event, draw: Callable[[], tuple[Sequence[Sampled | None], PromptScores]]
    ) -> None:
        self._begun, self._ended, self._draw = begun, ended, draw

    def done(self) -> bool:
        with device_errors():
            return self._ended.query()

    def wait(self) -> Finished:
        """Return the results. `seconds` is the time between the events and that of the draw, without what passed
        until it was asked for."""
        with device_errors():
            self._ended.synchronize()
            began = time.perf_counter()
            sampled, scores = self._draw()
            drawing = time.perf_counter() - began
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
