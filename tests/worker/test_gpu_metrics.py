"""The metrics of a GPU, read from a library that says what a test lets it say."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metrics import Metrics
from tests.support.metrics_page import parsed, total
from worker.gpu_metrics import GpuMetrics

GPUS = ["GPU-12", "GPU-34"]  # of two ranks


class Nvml(SimpleNamespace):
    """`pynvml`, for two GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(fails=False, started=False)

    def _answer(self, answer: Any) -> Any:
        if self.fails:
            raise self.NVMLError("GPU is lost")
        return answer

    def nvmlInit(self) -> None:  # noqa: N802
        self.started = self._answer(True)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert self.started
        return self._answer(f"handle of {uuid}")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        used = {"handle of GPU-12": 30 * 2**30, "handle of GPU-34": 40 * 2**30}
        return self._answer(SimpleNamespace(used=used[handle], total=80 * 2**30))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if handle == "handle of GPU-34":
            raise self.NVMLError("a part of a GPU has none")
        return self._answer(SimpleNamespace(gpu=42, memory=7))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_memory_and_utilization_stand_on_the_page(nvml: Nvml) -> None:
    reader = GpuMetrics.of(GPUS)
    assert reader is not None
    metrics = Metrics()
    metrics.read_at_scrape(reader.read_samples)
    page = parsed(metrics.text().decode())
    assert total(page, "gpu_memory_used_bytes", gpu="GPU-12") == 30 * 2**30
    assert total(page, "gpu_memory_total_bytes", gpu="GPU-12") == 80 * 2**30
    assert total(page, "gpu_utilization_perc") == 0.42
    assert total(page, "gpu_memory_used_bytes", gpu="GPU-34") == 40 * 2**30


def test_a_gpu_that_fails_later_leaves_the_rest_of_the_page(nvml: Nvml) -> None:
    reader = GpuMetrics.of(GPUS)
    assert reader is not None
    nvml.fails = True
    assert reader.read_samples() == {}


def test_there_is_nothing_without_a_gpu_without_the_library_or_where_that_fails(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GpuMetrics.of(()) is None
    nvml.fails = True
    assert GpuMetrics.of(GPUS) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMetrics.of(GPUS) is None
