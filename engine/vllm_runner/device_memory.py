"""The memory of GPUs, as the child that runs vLLM needs it."""

# pyright: strict

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from baton.errors import NotEnoughMemory

LACKS = (
    "Free memory on device",
    "Error in memory profiling",
    "No available memory for the cache blocks",
    "is larger than the available KV cache memory",
    "Cannot auto-fit max_model_len",
)
"""What vLLM's errors say where a device has too little memory, or another process took some while vLLM measured."""


@contextmanager
def lacks_of_memory() -> Generator[None]:
    """Raise NotEnoughMemory for whatever vLLM raises where there is too little memory. Most are ValueErrors, as for a
    model that it can't serve."""
    try:
        yield
    except Exception as error:
        if any(text in str(error) for text in LACKS):
            raise NotEnoughMemory(str(error)) from error
        raise
