"""The metrics of a GPU, read from a library that says what a test lets it say."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.metrics import Metrics
from tests.support.metrics_page import parsed, total
from worker.gpu_metrics import GpuMetrics

DEVICE = torch.device("cuda", 1)


class Nvml(SimpleNamespace):
    """`pynvml`, for one GPU."""

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
        assert handle == "handle of GPU-1234"
        return self._answer(SimpleNamespace(used=30 * 2**30, total=80 * 2**30))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        assert handle == "handle of GPU-1234"
        return self._answer(SimpleNamespace(gpu=42, memory=7))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    def properties(device: torch.device) -> Any:
        assert device == DEVICE
        return SimpleNamespace(uuid="1234")

    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return fake


def test_memory_and_utilization_stand_on_the_page(nvml: Nvml) -> None:
    gpu = GpuMetrics.of(DEVICE)
    assert gpu is not None
    metrics = Metrics()
    metrics.read_at_scrape(gpu.read)
    page = parsed(metrics.text().decode())
    assert total(page, "gpu_memory_used_bytes", gpu="GPU-1234") == 30 * 2**30
    assert total(page, "gpu_memory_total_bytes", gpu="GPU-1234") == 80 * 2**30
    assert total(page, "gpu_utilization_perc", gpu="GPU-1234") == 0.42


def test_a_gpu_that_fails_later_leaves_the_rest_of_the_page(nvml: Nvml) -> None:
    gpu = GpuMetrics.of(DEVICE)
    assert gpu is not None
    nvml.fails = True
    assert gpu.read() == {}


def test_there_is_nothing_without_a_gpu_without_the_library_or_where_that_fails(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GpuMetrics.of(torch.device("cpu")) is None
    nvml.fails = True
    assert GpuMetrics.of(DEVICE) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMetrics.of(DEVICE) is None
