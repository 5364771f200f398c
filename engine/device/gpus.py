"""The GPUs that torch can use in this process, or the reason why there is none. No torch is imported.

The command line, the supervisor's preflight and the engine all ask `visible_gpus`, so they never disagree. It reads
what torch was built for from torch's own version file, and counts the devices through the driver (libcuda), which knows
CUDA_VISIBLE_DEVICES, MIG and containers. `torch.cuda.is_available()` would say the same, but without a reason, and
only after an import of two seconds.
"""

import ctypes
import functools
import importlib.util
import os
import runpy
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baton.errors import StartupError

_NAME_BYTES = 100
_CAPABILITY = (75, 76)  # attributes of a device: the major and the minor number


@dataclass(frozen=True)
class Gpu:
    """One GPU. Its number in `VisibleGpus.gpus` is the number of its CUDA device."""

    name: str
    memory_bytes: int
    uuid: str = ""  # as NVIDIA's tools write it
    capability: tuple[int, int] = (0, 0)  # (9, 0) for Hopper


@dataclass(frozen=True)
class VisibleGpus:
    """All GPUs of this process. `problem` says why there is none. `wasted` is true where the machine has an NVIDIA
    driver, so that the problem is probably a mistake."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    wasted: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return self.problem
        names = dict.fromkeys(gpu.name for gpu in self.gpus)
        return ", ".join(f"{sum(gpu.name == name for gpu in self.gpus)} × {name}" for name in names)


@dataclass(frozen=True)
class TorchBuild:
    """What an installed torch was built for."""

    version: str
    cuda: str | None  # version of the CUDA toolkit; None: a build without CUDA


class CudaDriver(Protocol):
    """The driver's part of `visible_gpus`. Errors are its own, as RuntimeError."""

    def start(self) -> int:
        """Initialize the driver. Return the newest CUDA version that it supports, 13000 for 13.0."""
        ...

    def devices(self) -> tuple[Gpu, ...]:
        """Return the devices that CUDA_VISIBLE_DEVICES leaves. An empty tuple if there is none."""
        ...


class _LibCuda:
    """The driver API of libcuda. It makes no context, so it takes no memory of a GPU."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def start(self) -> int:
        self._check(self._library.cuInit(0))
        version = ctypes.c_int()
        self._check(self._library.cuDriverGetVersion(ctypes.byref(version)))
        return version.value

    def devices(self) -> tuple[Gpu, ...]:
        count = ctypes.c_int()
        self._check(self._library.cuDeviceGetCount(ctypes.byref(count)))
        return tuple(map(self._device, range(count.value)))

    def _device(self, index: int) -> Gpu:
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
        identity = ctypes.create_string_buffer(16)
        self._check(self._library.cuDeviceGet(ctypes.byref(device), index))
        self._check(self._library.cuDeviceGetName(name, _NAME_BYTES, device))
        self._check(self._library.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
        self._check(self._library.cuDeviceGetUuid_v2(identity, device))
        capability = [ctypes.c_int() for _ in _CAPABILITY]
        for attribute, part in zip(_CAPABILITY, capability, strict=True):
            self._check(self._library.cuDeviceGetAttribute(ctypes.byref(part), attribute, device))
        return Gpu(
            name.value.decode(errors="replace"),
            memory.value,
            f"GPU-{uuid.UUID(bytes=identity.raw)}",
            (capability[0].value, capability[1].value),
        )

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            known = self._library.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value
            raise RuntimeError(f"{text.value.decode() if known and text.value else 'error'} ({code})")


def visible_gpus() -> VisibleGpus:
    """Return the GPUs that torch can use in this process. Never raises.

    A child that is forked afterwards, without exec, can't use CUDA: the driver has been initialized here.
    """
    return find_gpus(installed_torch(), _load_driver(), os.environ, Path("/dev/nvidiactl").exists())


def gpu_uuids(device: str, ranks: int) -> Sequence[str]:
    """Return the UUIDs of the GPUs that the ranks of a torch device compute on; none of a CPU."""
    kind, _, index = device.partition(":")
    first = int(index or 0)
    return [gpu.uuid for gpu in visible_gpus().gpus[first : first + ranks]] if kind == "cuda" else ()


def find_gpus(
    torch: TorchBuild | None, driver: CudaDriver | None, environ: Mapping[str, str], has_device_file: bool
) -> VisibleGpus:
    """Decide from the facts. `driver` None: there is no libcuda. `has_device_file`: NVIDIA's kernel module runs."""

    def none(problem: str) -> VisibleGpus:
        return VisibleGpus(problem=problem, wasted=has_device_file)

    if torch is None:
        return none("torch is not installed")
    if torch.cuda is None:
        here = "; this machine has an NVIDIA driver: install a CUDA build of torch" if has_device_file else ""
        return none(f"torch {torch.version} is a build without CUDA{here}")
    if driver is None:
        return none("there is no NVIDIA driver: libcuda.so.1 is not found")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return none(f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU")
    try:
        supported = driver.start()
        if supported // 1_000 < int(torch.cuda.partition(".")[0]):
            return none(
                f"torch {torch.version} is built for CUDA {torch.cuda} and the driver supports up to "
                f"{supported // 1_000}.{supported % 1_000 // 10}: update the driver, or install a torch for its CUDA"
            )
        gpus = driver.devices()
    except RuntimeError as error:
        return none(f"the NVIDIA driver answers: {error}")
    if not gpus:
        chosen = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
        return none(f"the NVIDIA driver lists no GPU{chosen}")
    return VisibleGpus(gpus)


def resolve_device(setting: str, visible: VisibleGpus | None = None) -> str:
    """Return the torch device that `model.device` means here: "auto" is cuda where there is a GPU, else cpu.

    Raises StartupError for a CUDA device that this process has not, with the reason.
    """
    if setting != "auto" and not setting.startswith("cuda"):
        return setting
    visible = visible_gpus() if visible is None else visible
    if setting == "auto":
        return "cuda" if visible.gpus else "cpu"
    if not visible.gpus:
        raise StartupError(f"the device is {setting} and there is no GPU: {visible.problem}")
    index = setting.partition(":")[2] or "0"
    if not index.isdigit() or int(index) >= len(visible.gpus):
        raise StartupError(f"the device is {setting} and this process has {len(visible.gpus)} GPUs: {visible}")
    return setting


@functools.cache
def installed_torch() -> TorchBuild | None:
    """Return what the installed torch was built for; None without torch. Reads one small file of it."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        file = Path(folder) / "version.py"
        if file.is_file():
            module = runpy.run_path(str(file))
            return TorchBuild(str(module.get("__version__", "?")), module.get("cuda"))
    return None


def _load_driver() -> CudaDriver | None:
    try:
        return _LibCuda(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
