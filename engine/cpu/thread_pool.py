"""The threads that an engine's kernels run on; what they do is told in `pool.h`."""

from __future__ import annotations

import ctypes
import weakref

from engine.cpu.build import Library


class ThreadPool:
    """`threads` threads, of which the caller of a kernel is one. One caller at a time; never fork while it lives."""

    def __init__(self, library: Library, threads: int, *, openmp: bool = False) -> None:
        """With one thread it starts none, and with `openmp` it takes that many of this process's OpenMP runtime."""
        make, free = library.baton_pool_make, library.baton_pool_free
        make.argtypes, make.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        free.argtypes, free.restype = [ctypes.c_void_p], None
        self.threads = threads
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p) if openmp else None
        self.handle = ctypes.c_void_p(make(threads, parallel))
        """What kernels take as their `Pool*`."""
        self._end = weakref.finalize(self, free, self.handle)
        self._end.atexit = False  # a process that ends ends its threads
