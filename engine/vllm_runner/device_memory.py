"""The memory of GPUs, as the child that runs vLLM needs it."""

# pyright: strict

import importlib
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from baton.errors import NotEnoughMemory

log = logging.getLogger(__name__)

LACKS = (
    "Free memory on device",
    "Error in memory profiling",
    "No available memory for the cache blocks",
    "is larger than the available KV cache memory",
    "Cannot auto-fit max_model_len",
)
"""What vLLM's errors say where a device has too little memory, or another process took some while vLLM measured."""


_PREDECESSOR, _POLL = 10.0, 0.25  # seconds


def await_memory(gpus: Sequence[str], share: float) -> None:
    """Wait until that part of each GPU is free: the driver gives a killed predecessor's memory back some time later.

    NVML tells, which vLLM brings. To ask CUDA would leave a context of half a gigabyte on the first GPU, also where the
    ranks are processes of their own.
    """
    nvml = importlib.import_module("vllm.third_party.pynvml")
    deadline = time.monotonic() + _PREDECESSOR
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        while time.monotonic() < deadline:
            infos = [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
            if all(memory.free >= share * memory.total for memory in infos):
                return
            time.sleep(_POLL)
    except nvml.NVMLError as error:
        log.warning("can't tell how much memory of %s is free: %s", ", ".join(gpus), error)


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
