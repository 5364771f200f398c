"""Page copies of a CUDA device: two streams beside that of the steps, events, and memory that the driver has pinned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from engine.cuda.errors import device_errors

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of this process


class CudaCopies:
    """The copies of one pool. See `engine.cuda.mover.DeviceCopies`."""

    def __init__(self, pages: torch.Tensor) -> None:
        """`pages`: [num_pages, …], on a CUDA device, which gathers those that are no contiguous range."""
        self._pages = pages
        self._page_bytes = pages[0].numel() * pages.element_size()
        self._coming: Any = torch.cuda.Stream(pages.device)
        self._leaving: Any = torch.cuda.Stream(pages.device)
        torch.cuda.synchronize(pages.device)  # the pages may just be zeroed
        self._duplicated: Any = None  # event after the last duplicate, in the stream of the steps

    def duplicate(self, source: int, dest: int) -> None:
        """Copy one page to another in the stream of the steps. Copies in that are queued later wait for it."""
        with device_errors():
            self._pages[dest].copy_(self._pages[source])
            event: Any = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._pages.device))
            self._duplicated = event

    def pin(self, memory: memoryview) -> bool:
        with torch.cuda.device(self._pages.device):
            runtime: Any = torch.cuda.cudart()
            return int(runtime.cudaHostRegister(_tensor(memory).data_ptr(), memory.nbytes, _PORTABLE)) == 0

    def unpin(self, memory: memoryview) -> None:
        with torch.cuda.device(self._pages.device):
            runtime: Any = torch.cuda.cudart()
            failed = int(runtime.cudaHostUnregister(_tensor(memory).data_ptr()))
        if failed:
            log.warning("the driver did not unpin %d bytes of the arena (error %d)", memory.nbytes, failed)

    def staging(self, count: int) -> Sequence[memoryview]:
        with torch.cuda.device(self._pages.device):
            pinned = torch.empty((count, self._page_bytes), dtype=torch.uint8, pin_memory=True)
        return [row.numpy().data for row in pinned]

    def copy_in(self, source: memoryview, page: int) -> None:
        with device_errors(), torch.cuda.stream(self._coming):
            if (duplicated := self._duplicated) is not None:
                self._coming.wait_event(duplicated)
            self._pages[page].copy_(self._page_of(source), non_blocking=True)

    def copy_out(self, page: int, dest: memoryview) -> None:
        with device_errors(), torch.cuda.stream(self._leaving):
            self._page_of(dest).copy_(self._pages[page], non_blocking=True)

    def finish(self, *, inward: bool) -> None:
        with device_errors():
            event: Any = torch.cuda.Event(blocking=True)  # the thread sleeps
            event.record(self._coming if inward else self._leaving)
            event.synchronize()

    def _page_of(self, memory: memoryview) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=self._pages.dtype).view(self._pages.shape[1:])


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
