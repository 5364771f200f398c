"""The GPU of a worker, as NVIDIA's management library sees it: memory and utilization, of all processes that use it.

`nvidia-ml-py` is optional (`pip install 'baton[gpu]'`). Without it, and on a CPU, there is nothing to read.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Self

import torch

from baton.samples import Sample

log = logging.getLogger(__name__)


class GpuMetrics:
    """Reads one GPU. Any thread may call `read`."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        """`nvml` is the module `pynvml`, initialized. `handle` is the GPU in it, and `uuid` its label."""
        self._nvml = nvml
        self._handle = handle
        self._label = (uuid,)

    @classmethod
    def of(cls, device: torch.device) -> Self | None:
        """Return the reader of a CUDA device. None: the device is a CPU, or the library is missing or fails."""
        if device.type != "cuda":
            return None
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            log.info("no metrics of %s: nvidia-ml-py is not installed", uuid)
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), uuid)
        except nvml.NVMLError as error:
            log.warning("no metrics of %s: %s", uuid, error)
            return None

    def read(self) -> Mapping[str, Sample]:
        """The metrics by name. What the library can't tell at the moment is left out."""
        values: dict[str, Sample] = {}
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            values["gpu_memory_used_bytes"] = {self._label: float(memory.used)}
            values["gpu_memory_total_bytes"] = {self._label: float(memory.total)}
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            values["gpu_utilization_perc"] = {self._label: busy / 100}
        except self._nvml.NVMLError as error:
            log.debug("can't read %s: %s", self._label[0], error)
        return values
