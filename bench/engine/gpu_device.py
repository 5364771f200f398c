"""The device that `bench.engine.gpu` measures: a CUDA device, or a CPU in its place, timed in one way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from bench.engine.roofline import Limits
from engine.checkpoint.formats.format import Shape
from engine.engine import Engine, layout_of, linear_maker
from engine.models.config import parse_spec
from engine.models.weights import TORCH_DTYPES, assembled
from engine.step.batch import Chunk

_SIGMA = 0.02


@dataclass(frozen=True)
class Device:
    """`fake`: shapes are small, as everything runs on a CPU or shall only show that it runs."""

    name: str  # torch's
    fake: bool

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.is_cuda else "float32"

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        """The median time of `work`, by the host's clock, until the device has done it; after one run to warm up."""
        times: list[float] = []
        for _ in range(runs + 1):
            self.sync()
            began = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.name)[0] if self.is_cuda else 0


def limits(device: Device) -> Limits:
    """Bytes that a copy reads and writes, and operations of a matrix product, each per second."""
    count = 2**23 if device.fake else 2**32
    source = torch.empty(count, dtype=torch.uint8, device=device.name)
    dest = torch.empty_like(source)
    copied = 2 * count / device.seconds(partial(dest.copy_, source), 5)
    del source, dest
    size = 512 if device.fake else 8_192
    left = torch.randn(size, size, dtype=TORCH_DTYPES[device.dtype], device=device.name)
    product = 2 * size**3 / device.seconds(lambda: left @ left, 5)
    return Limits(read=copied, compute=product)


def random_engine(config: Mapping[str, object], device: Device, num_pages: int, page_size: int) -> Engine:
    """An engine on random weights that are made on the device."""
    spec = parse_spec({**config, "torch_dtype": device.dtype})
    layout = layout_of(spec, device.dtype, page_size)
    torch.manual_seed(0)

    def take(name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=TORCH_DTYPES[device.dtype], device=device.name)
        return torch.randn(shape, dtype=TORCH_DTYPES[device.dtype], device=device.name).mul_(_SIGMA)

    weights = assembled(
        spec, TORCH_DTYPES[device.dtype], torch.device(device.name), True, linear_maker(device.name, spec), take
    )
    pool = torch.zeros((num_pages, *layout.shape), dtype=TORCH_DTYPES[layout.dtype], device=device.name)
    return Engine(spec, weights, b"random weights..", layout, pool, torch.get_num_threads())


def step_seconds(engine: Engine, chunks: list[Chunk], device: Device, runs: int) -> tuple[float, float]:
    """The median time of a step until the device has done it, and of the call alone, which the host is busy for."""
    calls: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        engine.step(chunks)
        calls.append(time.perf_counter() - began)

    whole = device.seconds(step, runs)
    return whole, statistics.median(calls[1:])


@dataclass(frozen=True)
class Profiled:
    """Of one step: how many operations the device ran, the seconds spent in them, and the seconds of the whole."""

    count: float
    busy: float
    step: float
    table: str


def profiled(engine: Engine, chunks: list[Chunk], device: Device, runs: int) -> Profiled:
    """Run steps under torch's profiler, after as many without it for the time."""
    whole, _ = step_seconds(engine, chunks, device, runs)
    kinds = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * device.is_cuda]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(runs):
            engine.step(chunks)
        device.sync()
    events = profile.key_averages()
    kernels = [one for one in events if one.device_type.name != "CPU"]  # not also the operations that launched them
    spent = [(one.count, one.self_device_time_total) for one in kernels]
    by = "self_device_time_total" if device.is_cuda else "self_cpu_time_total"
    table = events.table(sort_by=by, row_limit=30, max_name_column_width=80)
    return Profiled(sum(count for count, _ in spent) / runs, sum(time for _, time in spent) / runs / 1e6, whole, table)
