"""The GPUs of a worker, as NVIDIA's management library sees them: memory and utilization, of all their users.

`nvidia-ml-py` is optional (`pip install 'baton[gpu]'`). Without it, and on a CPU, there is nothing to read.
"""

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from baton.samples import Sample

log = logging.getLogger(__name__)


class GpuMetrics:
    """Reads the GPUs of all ranks. Any thread may call `read_samples`."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        """`nvml` is the module `pynvml`, initialized. `handles` are the GPUs in it, by their UUIDs."""
        self._nvml = nvml
        self._handles = handles

    @classmethod
    def of(cls, gpus: Sequence[str]) -> Self | None:
        """Return the reader of the GPUs with these UUIDs. None: there is none, or the library is missing or fails."""
        if not gpus:
            return None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            log.info("no metrics of %s: nvidia-ml-py is not installed", ", ".join(gpus))
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, {gpu: nvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus})
        except nvml.NVMLError as error:
            log.warning("no metrics of %s: %s", ", ".join(gpus), error)
            return None

    def read_samples(self) -> Mapping[str, Sample]:
        """The metrics by name. What the library can't tell at the moment is left out."""
        used: dict[tuple[str, ...], float] = {}
        total: dict[tuple[str, ...], float] = {}
        busy: dict[tuple[str, ...], float] = {}
        for gpu, handle in self._handles.items():
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                used[gpu,], total[gpu,] = float(memory.used), float(memory.total)
                busy[gpu,] = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except self._nvml.NVMLError as error:
                log.debug("can't read %s: %s", gpu, error)
        values = {"gpu_memory_used_bytes": used, "gpu_memory_total_bytes": total, "gpu_utilization_perc": busy}
        return {name: sample for name, sample in values.items() if sample}
