"""Which errors mean that a device is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.errors import DeviceLost

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceLost for errors after which every later call would fail, too. CUDA tells of most of them late, at
    whatever call comes next. Running out of memory is none of them."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(str(error)) from error
        raise DeviceLost(f"the GPU's context can't be used any more: {error}") from error
