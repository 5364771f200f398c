"""Pages between a GPU and host memory, alone and beside a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from bench.engine.gpu_device import Device
from engine.engine import Engine
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopyIn, CopyOut

PAGES = {"2 MiB": 2 * 2**20, "128 KiB": 128 * 2**10}
_BYTES = 256 * 2**20  # of one measurement
_BUSY_SIZE, _FAKE_BUSY_SIZE = 8_192, 256  # of the matrices of the step in the background


@dataclass(frozen=True)
class Copied:
    """Bytes per second of one way to copy."""

    case: str
    rate: float


def pinned(device: Device) -> Iterator[Copied]:
    """Yield what the mover could reach: copies on a side stream from pinned memory, all pages in flight at a time."""
    for name, size in PAGES.items() if device.is_cuda else ():
        pool = torch.zeros((_BYTES // size, size), dtype=torch.uint8, device=device.name)
        host = torch.empty(pool.shape, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(device.name)
        for direction, source, dest in (("out", pool, host), ("in", host, pool)):
            copy = partial(_copy_all, stream, source, dest)
            yield Copied(f"{name} {direction}, pinned, alone", _BYTES / device.seconds(copy, 3))
            yield Copied(f"{name} {direction}, pinned, beside a step", _BYTES / beside_a_step(device, copy))


def _copy_all(stream: torch.cuda.Stream, source: torch.Tensor, dest: torch.Tensor) -> None:
    with torch.cuda.stream(stream):  # pyright: ignore[reportArgumentType]
        for page in range(len(source)):
            dest[page].copy_(source[page], non_blocking=True)
    stream.synchronize()


def moved(device: Device, engine: Engine) -> Iterator[Copied]:
    """Yield the speed of the worker's own mover, checksums included, on the pages of an engine."""
    count, size = engine.num_pages, engine.layout.page_bytes
    mover = engine.mover(verify=False)
    arena = Arena.create(count * size)
    arena.divide(size)
    mover.attach(arena)

    def out() -> None:
        moving = [
            mover.start([CopyOut(first, page - first, page, page) for page in range(first, min(first + 64, count))])
            for first in range(0, count, 64)
        ]
        for each in moving:
            each.wait()

    def back() -> None:
        moving = [
            mover.start([CopyIn(first, page - first, page, page, 0) for page in range(first, min(first + 64, count))])
            for first in range(0, count, 64)
        ]
        for each in moving:
            each.wait()

    try:
        for direction, work in (("out", out), ("in", back)):
            case = f"{size // 1024:,} KiB {direction}, the worker's mover"
            yield Copied(f"{case}, alone", count * size / device.seconds(work, 3))
            yield Copied(f"{case}, beside a step", count * size / beside_a_step(device, work))
    finally:
        mover.close()
        arena.close()


def beside_a_step(device: Device, work: Callable[[], object]) -> float:
    """Seconds of `work`, which ends with its last copy, while matrix products keep the device busy. On a CPU they run
    on another thread."""
    size = _FAKE_BUSY_SIZE if device.fake else _BUSY_SIZE
    left = torch.randn(size, size, device=device.name)
    if device.is_cuda:
        _ = left @ left  # warm
        device.sync()
        for _ in range(20):
            _ = left @ left
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        device.sync()
        return seconds
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: [left @ left for _ in range(20)])
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        busy.result()
    return seconds
