"""Wakes the worker's loop from another thread."""

import contextlib
import os
import threading


class Alarm:
    """A file descriptor that can be read once `ring` was called, from whatever thread."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()  # a descriptor that is closed may be another file's in the next moment

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        """Take note."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self._descriptor)
