"""What vLLM's processes would leave on the machine when they are killed, and its removal.

A child has a folder of its own for temporary files and for the sockets of its ranks. Its worker holds a lock on that
folder. Two kinds of names lie in /dev/shm whatever the folder is. Intel's OpenMP runtime writes one for each process.
Ranks on a CPU exchange sums through memory that is named after a file of the folder. A killed worker removes nothing.
The next one that loads a model on the machine does it.
"""

# pyright: strict

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel keeps it
_PREFIX = "baton-vllm-"
_LONGEST = 107 - len(f"/{_PREFIX}12345678/") - 36
"""Bytes of the parent's path: the kernel takes 107 of a socket's, and vLLM's names have 36."""
_ATTEMPTS = 5
_MEETING_PLACES = "vllm_dist_*"  # files in the folder
_OPENMP = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_(\d+)")  # process and user


def parent() -> Path:
    """Return where the folders are: where temporary files are, or below /tmp where the paths of sockets would be too
    long."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST else "/tmp")  # noqa: S108 - mkdtemp makes the folders


class ProcessFolder:
    """A child's temporary folder, for this user alone. Raises OSError."""

    def __init__(self) -> None:
        remove_abandoned()
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent()))
            if (lock := _lock(self.path)) is not None:  # else another worker took it for abandoned
                self._lock = lock
                return
        raise OSError(f"no folder in {parent()} can be locked")

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the child's processes find it."""
        return {"TMPDIR": str(self.path), "VLLM_RPC_BASE_PATH": str(self.path)}

    def remove(self) -> None:
        """Remove what the child and its ranks have left. They have ended."""
        _remove(self.path)
        os.close(self._lock)
        remove_abandoned()


def remove_abandoned() -> None:
    """Remove what processes of this user have left that are no more."""
    for folder in parent().glob(f"{_PREFIX}*"):
        if (lock := _lock(folder)) is not None:
            _remove(folder)
            os.close(lock)
    for file in SHARED_MEMORY.glob("__KMP_REGISTERED_LIB_*"):
        named = _OPENMP.fullmatch(file.name)
        if named and int(named[2]) == os.getuid() and not Path("/proc", named[1]).exists():
            _unlink(file)


def unlink_shared_memory(meeting_place: str) -> None:
    """Remove the names of the memory that ranks share. `meeting_place`: the name of the file by which they found each
    other. They keep the memory."""
    for file in SHARED_MEMORY.glob(f"{meeting_place}-*"):
        _unlink(file)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock on a folder of this user; None where there is none to be had."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid() and folder.exists():
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove(folder: Path) -> None:
    for file in folder.glob(_MEETING_PLACES):
        unlink_shared_memory(file.name)
    shutil.rmtree(folder, ignore_errors=True)


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):  # another has removed it, or may not
        file.unlink()
