"""The streams of a device: that of the steps, and one beside it for draws that wait for a grammar's mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark in a stream: `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Streams(Protocol):
    """What a launch needs of a device's streams."""

    def mark(self) -> Event:
        """Put an event behind all that lies in the stream of the steps."""
        ...

    def beside(self, event: Event) -> contextlib.AbstractContextManager[None]:
        """What is launched within lies in a stream of its own, behind `event`. So it waits for no step that was
        launched after `event`."""
        ...


class CudaStreams:
    """The current stream of a CUDA device, and one whose work goes first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Event:
        event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # waiting threads sleep
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def beside(self, event: Any) -> Iterator[None]:
        """Tensors of the steps' stream that are read within must be kept until the host has seen the end of what reads
        them: the allocator knows of their own stream alone."""
        self._beside.wait_event(event)
        with torch.cuda.stream(self._beside):
            yield
