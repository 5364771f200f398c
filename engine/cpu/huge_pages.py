"""Memory in pages of 2 MiB, where the kernel has such to give.

A step walks through all weights, and through K and V in pieces of a few KiB from all over the pool. With pages of 4 KiB
the processor looks up an address for each piece, and its prefetchers stop at the end of each page.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SIZE = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # the latter since Linux 6.1


def promise(address: int, size: int) -> None:
    """What lies here and has not been touched yet becomes large pages as it is."""
    _advise(address, size, _MADV_HUGEPAGE)


def collapse(address: int, size: int) -> None:
    """What lies here already moves into large pages, whole ones only; takes as long as copying it."""
    promise(address, size)
    _advise(address, size, _MADV_COLLAPSE)


def _advise(address: int, size: int, advice: int) -> None:
    """A kernel that won't is no error: everything works as it did, a little slower."""
    first, last = -(-address // _SIZE) * _SIZE, (address + size) // _SIZE * _SIZE
    if first < last:
        _madvise()(first, last - first, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
