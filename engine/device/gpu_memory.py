"""How much of a GPU's memory the pages of one worker may take. Pure.

A worker may use `gpu_memory_utilization` of the GPU in all, times its share of the GPU. Of that the weights, the
largest step and the CUDA context are taken away, and a small reserve. Pages have the rest.
"""

from dataclasses import dataclass

CONTEXT_BYTES = 600 * 2**20
"""Of a process's CUDA context with cuBLAS and torch's kernels, which no allocator counts. An estimate, not measured
here; `bench/engine/gpu.py` prints it."""

_RESERVE = 1 / 64  # of what the worker may use, and of what is free, for the gaps between blocks of torch's allocator


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU, in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class GpuUse:
    """What a worker takes besides its pages, in bytes. `step`: the most that any step needs for its duration."""

    weights: int
    step: int


def worker_bytes(total: int, utilization: float, share: float) -> int:
    """Return how many bytes of a GPU a worker may use in all."""
    return int(total * utilization * share)


def pool_bytes(memory: GpuMemory, use: GpuUse, utilization: float, share: float = 1.0) -> int:
    """Return how many bytes the pages may take; 0 if nothing is left.

    `memory` is read when the weights are loaded and no step's memory is held. Other processes bound it as well: what
    they have taken is not free, whatever the worker may use.
    """
    may_use = worker_bytes(memory.total, utilization, share)
    own = may_use - use.weights - CONTEXT_BYTES - int(may_use * _RESERVE)
    there = memory.free - int(memory.free * _RESERVE)
    return max(0, min(own, there) - use.step)
