"""A process whose main thread stands still while its other threads go on: what a hung copy, disk or lock looks like.

SIGSTOP stops every thread, so it shows a process that is gone. ptrace stops one thread: the thread that sends
heartbeats goes on, and says that the process is live. A thread of Python that is stopped while it computes holds the
interpreter's lock, and then no other thread goes on: such a process falls silent. So `hung` stops a thread only while
it waits in the kernel, unless told otherwise.
SIGSTOP for a part of every period makes a process slow.
"""

import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CONT, _DETACH, _SEIZE, _INTERRUPT = 7, 17, 0x4206, 0x4207  # <linux/ptrace.h>
_WALL = 0x40000000
_DEADLINE = 60.0  # seconds

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def hung(pid: int, *, anywhere: bool = False) -> Iterator[None]:
    """Stop the main thread of `pid` meanwhile. The thread goes on afterwards, unless the process has ended.

    `anywhere`: also while it computes, so that it may keep its process's other threads from going on.

    Raises ProcessLookupError if there is no such process, PermissionError where ptrace is not allowed, and TimeoutError
    when the thread does not stop.
    """
    # The kernel takes ptrace requests only from the thread that attached, so one thread makes all of them.
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    go_on = threading.Event()
    tracer = threading.Thread(target=_trace, args=(pid, anywhere, results, go_on), name="tracer")
    tracer.start()
    try:
        if (error := results.get()) is not None:
            raise error
        yield
    finally:
        go_on.set()
        tracer.join()


@contextmanager
def stuttering(pid: int, stopped: float, period: float) -> Iterator[None]:
    """Stop `pid` for the first `stopped` seconds of each period meanwhile. It goes on afterwards."""
    over = threading.Event()

    def stutter() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(stopped)
                os.kill(pid, signal.SIGCONT)
                over.wait(period - stopped)

    thread = threading.Thread(target=stutter, name="stutter")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _trace(pid: int, anywhere: bool, results: queue.SimpleQueue[BaseException | None], go_on: threading.Event) -> None:
    try:
        _ptrace(_SEIZE, pid)
    except OSError as error:
        results.put(error)
        return
    try:
        until = time.monotonic() + _DEADLINE
        while not _interrupted(pid, anywhere):
            if time.monotonic() > until:
                raise TimeoutError(f"the main thread of process {pid} did not wait for anything in {_DEADLINE:.0f} s")
            time.sleep(0.001)
        results.put(None)
        go_on.wait()
    except (OSError, TimeoutError) as error:
        results.put(error)
    finally:
        with suppress(ProcessLookupError):  # the process has ended, or it is dying
            _ptrace(_DETACH, pid)


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of process {pid}: {os.strerror(number)}")


def _interrupted(pid: int, anywhere: bool) -> bool:
    """Stop the thread, and let it go on if it did not wait in the kernel. Return whether it is stopped."""
    waits_in = _system_call(pid)
    if not anywhere and not waits_in[:1].isdigit():  # "running", or "-1" outside a system call
        return False
    _ptrace(_INTERRUPT, pid)
    _wait_stopped(pid)
    if anywhere or _system_call(pid) == waits_in:
        return True
    _ptrace(_CONT, pid)
    return False


def _wait_stopped(pid: int) -> None:
    """Wait for the main thread's ptrace stop. Deliver the signals that come before it."""
    until = time.monotonic() + _DEADLINE
    while time.monotonic() < until:
        child, status = os.waitpid(pid, _WALL | os.WNOHANG)
        if child and os.WIFSTOPPED(status) and status >> 16:  # PTRACE_EVENT_STOP
            return
        if child and os.WIFSTOPPED(status):
            _libc.ptrace(_CONT, pid, None, os.WSTOPSIG(status))
        elif child:
            raise ProcessLookupError(f"process {pid} ended while it was being stopped")
        time.sleep(0.001)
    raise TimeoutError(f"the main thread of process {pid} did not stop within {_DEADLINE:.0f} s")


def stopped(pid: int) -> bool:
    """Whether the main thread of `pid` stands in a ptrace stop."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "t"


def _system_call(pid: int) -> str:
    """Return the call in which the thread waits, with its arguments and the place it came from."""
    return Path(f"/proc/{pid}/task/{pid}/syscall").read_text()
