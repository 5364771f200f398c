"""What a GPU is for a process, and why there is none."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.errors import StartupError
from engine.attention.torch_sdpa import TorchAttention
from engine.device import gpus
from engine.device.gpus import Gpu, TorchBuild, VisibleGpus, find_gpus, resolve_device
from kvstore.layout import PageLayout

CUDA = TorchBuild("2.11.0+cu130", "13.0")
CPU = TorchBuild("2.13.0+cpu", None)
H100 = Gpu("NVIDIA H100", 80 * 2**30)


class Driver:
    """A driver with these devices, or one that fails."""

    def __init__(self, *devices: Gpu, version: int = 13_000, fails: str = "") -> None:
        self._devices, self._version, self._fails = devices, version, fails

    def start(self) -> int:
        if self._fails:
            raise RuntimeError(self._fails)
        return self._version

    def devices(self) -> tuple[Gpu, ...]:
        return self._devices


def test_a_machine_with_gpus() -> None:
    visible = find_gpus(CUDA, Driver(H100, H100, Gpu("NVIDIA T4", 16 * 2**30)), {}, True)
    assert visible.gpus[0] == H100
    assert str(visible) == "2 × NVIDIA H100, 1 × NVIDIA T4"


class Library:
    """libcuda with one device."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuDeviceGetUuid_v2(self, identity: Any, device: Any) -> int:  # noqa: N802 - the driver's name
        identity.raw = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_a_gpu_has_the_uuid_that_nvidias_tools_show() -> None:
    gpu = gpus._LibCuda(Library())._device(0)
    assert (gpu.uuid, gpu.capability) == ("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", (9, 0))


@pytest.mark.parametrize(
    ("build", "driver", "environ", "file", "why"),
    [
        (None, Driver(H100), {}, True, "torch is not installed"),
        (CPU, Driver(H100), {}, True, "install a CUDA build of torch"),
        (CPU, None, {}, False, "torch 2.13.0+cpu is a build without CUDA"),
        (CUDA, None, {}, False, "libcuda.so.1 is not found"),
        (CUDA, Driver(H100), {"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES is '', which hides"),
        (CUDA, Driver(H100), {"CUDA_VISIBLE_DEVICES": "-1"}, True, "CUDA_VISIBLE_DEVICES is '-1', which hides"),
        (CUDA, Driver(), {"CUDA_VISIBLE_DEVICES": "7"}, True, "lists no GPU; CUDA_VISIBLE_DEVICES is '7'"),
        (CUDA, Driver(), {}, True, "lists no GPU"),
        (CUDA, Driver(H100, version=12_040), {}, True, "the driver supports up to 12.4"),
        (CUDA, Driver(fails="system not yet initialized (802)"), {}, True, "answers: system not yet initialized"),
    ],
)
def test_no_gpu_and_why(
    build: TorchBuild | None, driver: Driver | None, environ: dict[str, str], file: bool, why: str
) -> None:
    visible = find_gpus(build, driver, environ, file)
    assert (visible.gpus, visible.wasted) == ((), file)
    assert why in visible.problem
    assert str(visible) == visible.problem
    assert resolve_device("auto", visible) == resolve_device("cpu", visible) == "cpu"
    with pytest.raises(StartupError, match="there is no GPU"):
        resolve_device("cuda", visible)


def test_a_newer_driver_of_the_same_toolkit_serves() -> None:
    assert find_gpus(CUDA, Driver(H100, version=13_020), {}, True).gpus


@pytest.mark.parametrize(("setting", "device"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")])
def test_devices_of_a_machine_with_two_gpus(setting: str, device: str) -> None:
    assert resolve_device(setting, VisibleGpus((H100, H100))) == device


@pytest.mark.parametrize("setting", ["cuda:2", "cuda:first"])
def test_a_gpu_that_is_not_here(setting: str) -> None:
    with pytest.raises(StartupError, match="this process has 2 GPUs"):
        resolve_device(setting, VisibleGpus((H100, H100)))


def test_torch_agrees() -> None:
    """On this machine, whatever it is; without importing torch."""
    build = gpus.installed_torch()
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda)
    visible = gpus.visible_gpus()
    assert len(visible.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    script = "import sys; from engine.device import gpus; gpus.visible_gpus(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_sdpa_never_asks_cudnn() -> None:
    """It would build a plan for every new shape, and almost every step has one."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    layout = PageLayout(1, 1, 16, 16, "float32")
    TorchAttention(torch.zeros(1, *layout.shape), layout)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
