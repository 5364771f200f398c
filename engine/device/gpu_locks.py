"""Locks on GPUs, held while a process measures how much of their memory is free.

vLLM takes what a GPU has lost since the start of its process for its own use. Of two that start on one GPU at once,
each would count the weights and pages of the other. So all processes of a user start there one after the other.
"""

# pyright: strict

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from baton import file_lock, private_folder
from baton.errors import StartupError


@contextmanager
def locked(gpus: Sequence[str], seconds: float) -> Generator[None]:
    """Hold the locks of the GPUs with these UUIDs. Raises StartupError if another process still holds one after so
    many seconds, FolderUntrusted, and OSError."""
    folder, deadline = private_folder.runtime_root() / "gpus", time.monotonic() + seconds
    with ExitStack() as held:
        for gpu in sorted(set(gpus)):  # in one order, so that no two wait for each other
            private_folder.make(folder)
            late = StartupError(
                f"another process has been loading a model on {gpu} for {seconds:.0f} s; wait until it serves or end it"
            )
            held.enter_context(file_lock.locked(folder / f"{gpu}.lock", deadline, late))
        yield
