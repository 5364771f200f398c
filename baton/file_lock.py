"""A lock between processes that ends with its holder: the kernel frees what a killed process had locked."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL = 0.05  # seconds


@contextmanager
def locked(path: Path, deadline: float, late: Exception) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made. Raises `late` if another process holds it past the deadline, by
    the monotonic clock."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise late from None
            time.sleep(_POLL)
        yield
