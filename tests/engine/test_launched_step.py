"""A step beside the loop, without a GPU: its events, its seconds, the thread that watches it, and lost devices."""

from __future__ import annotations

import threading

import pytest
import torch

from baton.errors import DeviceLost
from engine.cuda.errors import device_errors
from engine.cuda.steps import LaunchedStep, StepWatch
from engine.step.batch import Sampled


class FakeEvent:
    def __init__(self, at: float, error: Exception | None = None) -> None:
        self.at, self._error = at, error  # milliseconds
        self.reached = threading.Event()

    def query(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(5)
        if self._error is not None:
            raise self._error

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        return end_event.at - self.at


def test_results_come_after_the_device_has_ended_with_its_own_time() -> None:
    ended = FakeEvent(1_500.0)
    step = LaunchedStep(FakeEvent(1_000.0), ended, lambda: ([Sampled(7)], {}))
    assert not step.done()
    ended.reached.set()
    assert step.done()
    finished = step.wait()
    assert finished.sampled == [Sampled(7)]
    assert 0.5 <= finished.seconds < 0.6


def test_the_watch_rings_when_a_step_has_ended_and_when_it_failed() -> None:
    watch, rung = StepWatch(), threading.Semaphore(0)
    watch.alarm = rung.release
    events = [FakeEvent(0.0), FakeEvent(0.0, RuntimeError("lost")), FakeEvent(0.0)]
    for event in events:
        watch.watch(event)
    for event in events:
        assert not rung.acquire(timeout=0.02)
        event.reached.set()
        assert rung.acquire(timeout=5)


class _Accelerator(torch.AcceleratorError):
    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


def test_a_context_that_is_dead_is_a_lost_device() -> None:
    step = LaunchedStep(FakeEvent(0.0), FakeEvent(0.0, _Accelerator("illegal address", 700)), lambda: ([], {}))
    with pytest.raises(DeviceLost, match="illegal address"):
        step.done()


def test_running_out_of_memory_loses_nothing() -> None:
    for error in (torch.OutOfMemoryError("full"), _Accelerator("out of memory", 2)):
        with pytest.raises(torch.OutOfMemoryError), device_errors():
            raise error
    with pytest.raises(ValueError, match="a bad chunk"), device_errors():
        raise ValueError("a bad chunk")
