"""Measure this machine's memory bandwidth and arithmetic rate, with the fastest routines among the libraries at hand.

Bandwidth is measured by torch's sum of integers over a buffer far larger than any cache. Of eleven loops tried on two
cores (libc's memchr, sums, maxima and dot products of numpy and torch) it was the fastest, at 93 GB/s. memchr, which
does hardly anything but read, reached 87. Arithmetic is a large matrix product, plain or with a packed weight,
whichever is faster. On a CPU without bfloat16 instructions the product is in float32, since such a CPU multiplies
bfloat16 that way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from bench.roofline import Limits

_BYTES = 2**29
_SIZE = 2_048  # of square matrices; those of 4,096 came out slower
_TRIES = 5

_buffer = torch.empty(0, dtype=torch.int64)


def measure(threads: int, dtype: torch.dtype) -> Limits:
    """Return the limits; takes about a quarter of a second. torch's number of threads stays changed."""
    global _buffer
    torch.set_num_threads(threads)
    if not len(_buffer):
        # numpy asks for huge pages, torch does not: worth 5 %.
        _buffer = torch.from_numpy(np.ones(_BYTES // 8, dtype=np.int64))
    read = _BYTES / _shortest(lambda: _buffer.sum())
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtype = torch.float32
    left, right = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    spent = _shortest(lambda: left @ right)
    if dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(right)
        spent = min(spent, _shortest(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")))
    return Limits(read, 2 * _SIZE**3 / spent)


def _shortest(work: Callable[[], object]) -> float:
    """Return the shortest of several tries after a warm-up, in seconds: a limit is the best case, not the usual one."""
    work()
    times: list[float] = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
