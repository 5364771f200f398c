"""The threads that an engine's kernels run on; what they do is told in `pool.h`."""

from __future__ import annotations

import ctypes
import weakref

from engine.cpu.build import Library


class ThreadPool:
    """`threads` threads, of which the caller of a kernel is one. One caller at a time; never fork while it lives."""

    def __init__(self, library: Library, threads: int) -> None:
        """With one thread it starts none."""
        make, free = library.baton_pool_make, library.baton_pool_free
        make.argtypes, make.restype = [ctypes.c_int], ctypes.c_void_p
        free.argtypes, free.restype = [ctypes.c_void_p], None
        self.threads = threads
        self.handle = ctypes.c_void_p(make(threads))
        """What kernels take as their `Pool*`."""
        self._end = weakref.finalize(self, free, self.handle)
        self._end.atexit = False  # a process that ends ends its threads
