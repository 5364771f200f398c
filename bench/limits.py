"""What this machine does at best, measured by what comes closest to it among the libraries at hand.

Reading is torch's sum of integers over a buffer far larger than any cache: of eleven loops tried on two cores (libc's
memchr, sums, maxima and dot products of numpy and torch) the fastest, at 93 GB/s; memchr, which does hardly anything
else, came to 87. Arithmetic is a large product, plain or with a packed weight, whichever is faster; where a CPU has no
instructions for bfloat16, it is one of float32, as which such a CPU multiplies.
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
    """Takes about a quarter of a second. The setting of threads is torch's, so it stays."""
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
    """Of several tries after one to warm up, in seconds: a limit is what can be, not what is usual."""
    work()
    times: list[float] = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
