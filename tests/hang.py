"""A process whose main loop hangs while it lives: its main thread is stopped by ptrace, its other threads run on.

SIGSTOP stops every thread, so that a process falls silent. Here the thread that sends heartbeats goes on, as it does
when a page copy, a log on a full disk or an endless loop holds the main loop. Linux on x86_64 or arm64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONT, _DETACH, _SEIZE, _INTERRUPT = 7, 17, 0x4206, 0x4207  # linux/ptrace.h
_WALL = 0x4000_0000  # waitid: children of every kind
_EVENT_STOP = 128  # the stop that PTRACE_INTERRUPT asks for
_TRAP = 5
_PATIENCE = 30.0  # seconds until the thread must have stopped

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """Stop the main thread of `pid`, a child of ours that runs; it goes on when the block ends.

    The process may die meanwhile, of SIGKILL too. Do not wait for it in another thread while this begins: the kernel
    would tell that thread of the stop. Raises ProcessLookupError or PermissionError when it can't be traced."""
    stopped, let_go = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def trace() -> None:
        try:
            _stop(pid)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
            return
        finally:
            stopped.set()
        let_go.wait()
        with suppress(ProcessLookupError):  # it has died
            _ptrace(_DETACH, pid)

    # The kernel takes orders for a stopped thread from the very thread that traces it.
    tracer = threading.Thread(target=trace, name=f"tracer of {pid}", daemon=True)
    tracer.start()
    stopped.wait()
    try:
        if failures:
            raise failures[0]
        yield
    finally:
        let_go.set()
        tracer.join()


def _stop(pid: int) -> None:
    _ptrace(_SEIZE, pid)
    _ptrace(_INTERRUPT, pid)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        # WNOWAIT leaves the status where it is: should the process end, its parent must learn of that, not we.
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG | _WALL)
        if found is None:
            time.sleep(0.001)
            continue
        if found.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} ended before it could be stopped")
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | _WALL)
        signal, event = found.si_status & 0xFF, found.si_status >> 8
        if event == _EVENT_STOP:
            return
        _ptrace(_CONT, pid, signal if signal != _TRAP else 0)  # a signal came first: it gets it
    raise TimeoutError(f"the main thread of {pid} did not stop within {_PATIENCE} s")


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace request {request:#x} of {pid}: {os.strerror(code)}")
